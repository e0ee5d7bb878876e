"""What a script may ask of the GPU of a capture, what is answered, and what only a real one could do.

To the questions of `torch.cuda` and `torch.accelerator` that scripts ask it answers as an H100 of 80 GB. Where a
script finds none (`World.gpus` is false), each of them is refused, as are streams and devices. What compiles or
launches code of its own, and what asks the driver, needs a real GPU: it raises, and `remedy` says what to do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from echograph.errors import CaptureError
from echograph.frontend.scripts import streams
from echograph.frontend.scripts.adapter import replaced
from echograph.frontend.scripts.streams import Event, Stream
from echograph.frontend.scripts.world import NO_GPU, World

MEMORY_BYTES = 80 * 2**30
_CUDA, _NCCL = "13.0", (2, 28, 9)
_CUSTOM = "custom operator with a fake implementation (torch.library.register_fake)"
_OPERATOR = (
    f"runs code of its own on a GPU, which a capture neither sees nor has: leave it out, or make it a {_CUSTOM}"
)
_GRAPHS = "CUDA graphs are not captured: leave them out, the operators are those of the eager model"
_DRIVER = "this asks a real GPU, and a capture has only the answers of one: leave it out if you can"
_NOT_ANSWERED = "the GPU of a capture, where PyTorch has no CUDA, does not answer it: leave it out if you can"
# What raises by itself where there is no GPU: text of the exception -> what to do.
_REMEDIES = (
    (r"active drivers|[Tt]riton", f"a Triton kernel {_OPERATOR}"),
    (r"lib(cuda|cudart|cublas|cudnn|nccl|nvrtc|nvidia-ml)\w*[.\d]*\.so|NVML|nvml|nvidia-ml|no NVIDIA", _DRIVER),
    (r"not compiled with CUDA|dummy base class|'_cuda_\w+'|No CUDA GPUs|nvrtc", _NOT_ANSWERED),
    (r"the GPU of a capture has no", "decide on something else, or leave it out"),
)
_FOR_GPUS = ("triton", "pynvml", "cupy", "flash_attn", "apex", "transformer_engine", "xformers", "bitsandbytes")
_NEEDS_GPU = f"its kernels need a GPU: choose PyTorch's own operators, or make it a {_CUSTOM}"


class Properties:
    """What `torch.cuda.get_device_properties` answers."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    total_memory = MEMORY_BYTES
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 48 * 2**10
    shared_memory_per_block_optin = 227 * 2**10
    shared_memory_per_multiprocessor = 228 * 2**10
    L2_cache_size = 50 * 2**20
    is_integrated = is_multi_gpu_board = 0

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the GPU of a capture has no property '{name}'")


class Chosen:
    """`torch.cuda.device`: a context with another current GPU; a class, since types are made of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whichever is chosen, it is the one that the rank has."""

    def __enter__(self) -> None:
        """It is the current one already."""

    def __exit__(self, *_: Any) -> None:
        """It stays so."""


def remedy(error: BaseException) -> str:
    """What to do about an exception that a missing GPU led to; "" for any other."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return _NEEDS_GPU if package in _FOR_GPUS else f"install {package} beside echograph"
    return next((what for pattern, what in _REMEDIES if re.search(pattern, text)), "")


def is_gpu(device: Any) -> bool:
    """Whether a device, as PyTorch takes it, is a GPU."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def answers(world: World) -> Iterator[AbstractContextManager[None]]:
    """Functions and classes of `torch.cuda` and its like, as a GPU of the world has them, or refused without."""
    for owner, answered in _answers(world).items():
        for name, answer in answered.items():
            if hasattr(owner, name):
                yield replaced(owner, name, answer if world.gpus else _without(name, answer))
    for owner, name, why in _needs_its_own():
        yield replaced(owner, name, _refuse(f"{name} {why}" if why is not _GRAPHS else why))


def _answers(world: World) -> dict[Any, dict[str, Any]]:
    properties = Properties()
    shared = {
        "is_available": lambda: True,
        "device_count": lambda: min(world.local_size, world.size),
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_reserved": _zero,
        "memory_stats": lambda *_, **__: defaultdict(int),
        "reset_peak_memory_stats": _nothing,
        "set_stream": _set_stream,
        "current_stream": lambda *_, **__: Stream.current,
    }
    cuda = shared | {
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "current_device": lambda: world.local_rank,
        "set_device": _nothing,
        "device": Chosen,
        "device_of": Chosen,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: ["sm_90"],
        "can_device_access_peer": lambda *_: True,
        "ipc_collect": _nothing,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed": _nothing,
        "seed_all": _nothing,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda *_: [torch.get_rng_state()],
        "set_rng_state": _nothing,
        "set_rng_state_all": _nothing,
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_summary": lambda *_, **__: "",
        "memory_snapshot": lambda *_, **__: [],
        "reset_max_memory_allocated": _nothing,
        "reset_accumulated_memory_stats": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "Event": Event,
        "stream": streams.on,
        "default_stream": lambda *_, **__: Stream.default,
    }
    accelerator = shared | {
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: world.local_rank,
        "current_device_idx": lambda: world.local_rank,
        "set_device_index": _nothing,
        "set_device_idx": _nothing,
        "device_index": Chosen,
        "get_memory_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "reset_accumulated_memory_stats": _nothing,
    }
    marks = dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _nothing)
    return {
        torch.cuda: cuda,
        torch.accelerator: accelerator,
        torch.cuda.nvtx: marks,
        torch.cuda.profiler: {"start": _nothing, "stop": _nothing},
        torch.cuda.nccl: {"version": lambda: _NCCL, "is_available": lambda *_: True},
        torch.cuda.memory: {"_record_memory_history": _nothing, "_dump_snapshot": _nothing},
        torch.version: {"cuda": _CUDA},
        torch.distributed: {"is_nccl_available": lambda: True},
    }


# What asks whether there is a GPU, and is told that there is none.
_WITHOUT: dict[str, Any] = {
    "is_available": lambda *_: False,
    "is_nccl_available": lambda: False,
    "is_initialized": lambda: False,
    "is_bf16_supported": lambda *_, **__: False,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 0,
    "current_accelerator": lambda *_, **__: None,
    "cuda": None,
}
# What PyTorch itself calls on machines without GPUs too, and what does nothing on them.
_HARMLESS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "empty_cache", "ipc_collect", "get_arch_list",
             "mark", "memory_allocated", "max_memory_allocated", "memory_reserved",
             "max_memory_reserved", "memory_stats", "reset_peak_memory_stats")  # fmt: skip


def _without(name: str, answer: Any) -> Any:
    if name in _WITHOUT:
        return _WITHOUT[name]
    return answer if name in _HARMLESS else _refuse(f"'{name}' {NO_GPU}")


def _needs_its_own() -> Iterator[tuple[Any, str, str]]:
    from torch.utils import cpp_extension

    for name in ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle"):
        yield torch.cuda, name, _GRAPHS
    for name in ("load", "load_inline"):
        yield cpp_extension, name, _OPERATOR


def _refuse(why: str) -> type[Any]:
    """What cannot be called, nor made; a class, since types are made of some."""

    class Refused:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise CaptureError(why)

    return Refused


def _set_stream(stream: Stream) -> None:
    Stream.current = stream


def _nothing(*_: Any, **__: Any) -> None:
    """The device needs no such care."""


def _zero(*_: Any, **__: Any) -> int:
    return 0
