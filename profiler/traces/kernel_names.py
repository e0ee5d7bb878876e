"""Which kernels communicate, by the names that libraries give them: one line a family, to be added to.

A name is looked up by its function alone, without return type, template arguments and parameters: a kernel that is
given an all-reduce as a type, or that reduces within a device, is none.
"""

from __future__ import annotations

import re

COMMUNICATION = (
    (r"(\w+::)*nccl", "NCCL, RCCL"),
    (r"rccl", "RCCL"),
    (r"(hccl|hcom_)", "HCCL"),
    (r"mscclKernel", "MSCCL, in RCCL"),
    (r"mscclpp::", "MSCCL++"),
    (r"(\w+::)*allreduce_(LL_)?[12]node$", "MSCCL++, in SGLang"),
    (r"(\w+::)*cross_device_reduce_", "vLLM, SGLang, AITER"),
    (r"(\w+::)*(reduce_scatter|allgather)_cross_device", "AITER"),
    (r"(\w+::)*allreduce_prototype_(one|two)shot$", "quick-reduce, in vLLM, SGLang, AITER"),
    (r"(\w+::)*(multimem_)?(one|two)_shot_(all_)?reduce", "PyTorch symmetric memory"),
    (r"(\w+::)*multimem_(all_reduce|all_gather|reduce_scatter)_", "PyTorch symmetric memory"),
    (r"(\w+::)*hybridCubeMeshAllReduceKernel$", "PyTorch within a node"),
    (r"(\w+::)*(one|two)ShotAllReduceKernel$", "PyTorch within a node, TensorRT-LLM"),
    (r"(\w+::)*(lamport_style_)?one_shot_all_reduce_norm_kernel$", "TensorRT-LLM, FlashInfer"),
    (r"(\w+::)*(\w+_)?allreduce_fusion_kernel_(one|two)shot", "TensorRT-LLM, FlashInfer"),
    (r"(\w+::)*(one|two)shotAllreduce(Fusion)?Kernel$", "TensorRT-LLM, FlashInfer, of multi-node NVLink"),
    (r"(\w+::)*moeA2A(Dispatch|Combine)Kernel$", "TensorRT-LLM, FlashInfer"),
    (r"(\w+::)*(moeAllToAllKernel|fusedMoeCommKernel)$", "TensorRT-LLM"),
    (r"(\w+::)*k?userbuffers_", "Transformer Engine, TensorRT-LLM"),
    (r"(nvshmem|rocshmem)", "NVSHMEM, rocSHMEM"),
    (r"deep_ep::(?!layout::)", "DeepEP"),
    (r"(\w+::)*Ep(Dispatch|Combine)\w*Kernel", "MORI"),
    (r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start|-done)?(\.\d+)*$", "XLA"),
)
"""How names of functions begin, and the library that has them."""

_LIBRARIES = tuple((re.compile(pattern), library) for pattern, library in COMMUNICATION)
_TEMPLATE = re.compile(r"<[^<>]*>")
_UNNAMED = re.compile(r"(\(anonymous namespace\)|<unnamed>|\{anonymous\})::")
_MANGLED = re.compile(r"_ZN?K?(?=\d)")
_LENGTH = re.compile(r"\d+")


def communicates(name: str) -> bool:
    """Whether a kernel of this name communicates with other devices."""
    return bool(library_of(name))


def library_of(name: str) -> str:
    """The library of a kernel that communicates with other devices; "" of one that does not."""
    function = function_name(name)
    return next((library for pattern, library in _LIBRARIES if pattern.match(function)), "")


def function_name(name: str) -> str:
    """The function of a kernel's name with its namespaces: `vllm::cross_device_reduce_1stage`."""
    if mangled := _MANGLED.match(name):
        return _demangled(name, mangled.end())
    plain, count = _UNNAMED.sub("", name), 1
    while count:
        plain, count = _TEMPLATE.subn("", plain)
    return (plain.partition("(")[0].split() or [""])[-1]


def _demangled(name: str, at: int) -> str:
    """The identifiers at the begin of a mangled name, each of which has its length before it."""
    parts = []
    while length := _LENGTH.match(name, at):
        at = length.end() + int(length[0][:4])
        parts.append(name[length.end() : at])
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N"))
