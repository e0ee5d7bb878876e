"""Software stacks: which kernels a training framework runs, and what it overlaps. One file of `data/stacks` each.

A file has a `title` and one table for each choice that it makes, with its `value` and its `source`. A stack that
differs from another in a few choices names it (`like`). What a stack does not say is as it was captured, or as the
plan's own defaults are.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal

from echograph.errors import DataError, UnknownNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The choices of one stack.

    Attributes:
        name: its word in plans.
        title: what it stands for, and of which years.
        sources: where each choice is published, by its field.
        attention: kernels of attention, the best first: the first that a device has a model of runs.
        fuse: how far elementwise operations become one kernel: those of one part of a layer ("modules"), as a
            library of fused kernels has them, or all that a compiler finds ("step"), or finds in each layer
            ("layers"); "": none.
        unfused: operators of which a library of fused kernels has none: a part of a layer with one stays as it is.
        padded_products: whether operands of products are padded to multiples of 16 bytes.
        repeated_heads: whether keys and values are copied for every query head, where queries are grouped.
        complex_rotation: whether rotary embeddings are products of complex numbers in fp32, which nothing fuses.
        loss: "eager" or "fused" cross-entropy.
        logged_losses: cross-entropies of the logits that are worked out for the log beside the loss.
        loss_in_tensor_parallel: "eager" or "fused" cross-entropy where ranks share the vocabulary; "": eager.
        foreach_optimizer: whether the optimizer has a kernel for each step of its arithmetic, not a fused one.
        grad_dtype: type in which gradients add up.
        grad_dtype_in_pipelines: type in which gradients add up in a pipeline, where it is another.
        zero_all_reduces: whether ZeRO-1 and 2 reduce whole gradients on every rank, of which each takes its part.
        zero3_apart: whether ZeRO-3 gathers and reduces each parameter by a collective of its own, and the host
            waits before each layer until the device is idle.
        flat_parameters: whether the parameters that ZeRO-3 gathers at once are views of one tensor.
        main_gradients: whether products add to buffers of gradients in any type (gradient accumulation fusion); to
            those in fp32 they always do.
        fused_accumulation: whether products add to such buffers themselves; else a kernel casts each gradient, and
            another adds it.
        reduce_dtype: type in which ZeRO-3 reduces gradients; "": their own.
        fp8_kept: what FP8 keeps of inputs and weights for backward: "bf16" or "fp8".
        fp8_scaling: "current" scales, looked for before each cast, or "delayed" ones of earlier steps.
        fp8_weights: whether FP8 casts weights for each "micro-batch", or once a "step".
        fp8_experts: whether experts' grouped products are in FP8, too.
        fp8_gathers: whether tensor-parallel ranks gather in "fp8" what FP8 products read, or in "bf16".
        etp: tensor-parallel ranks that cut each expert, with sequence parallelism.
        moe_dispatcher: what takes rows to experts.
        overlap_grad_reduce: whether gradients are reduced while backward goes on.
        overlap_grad_reduce_in_pipelines: whether they are in a pipeline, where that differs.
        overlap_param_gather: whether parameters are gathered while the next forward goes on (ZeRO-1 and 2).
        tp_comm_overlap: what of tensor-parallel communication runs beside products: "none"; "bulk": in backward,
            beside gradients of inputs and weights; "chunks": cut up with their own products, too.
        tp_comm_waits: whether kernels wait for each collective where none of them runs beside products.
        tp_dtensor: whether tensor-parallel ranks communicate as DTensor does: along the first dimension alone,
            with a copy where they share another; and what forward gathers is kept for backward.
        tp_comm_sms: multiprocessors that a tensor-parallel reduction takes from the products beside it.
        pipeline_scatter_gather: whether tensor-parallel ranks share the sending of what all of them have.
        recompute_early_stop: whether recomputation ends where backward has what it needs.
        host: whose Python runs between kernels, a name of the profiler's table of frameworks; "": not known.
        host_waits: whether the host waits for what a pipeline stage receives.
        ring_host_waits: whether it waits before each ring of attention.
        expandable_segments: PyTorch's allocator option of that name.
        other_communicators: those that the framework opens beside the ones of a step's tensors, each by the axes
            of ranks that it is along, as "dp-pp-tp".
    """

    name: str = ""
    title: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    attention: tuple[str, ...] = ()
    fuse: Literal["", "modules", "layers", "step"] = ""
    unfused: tuple[str, ...] = ()
    padded_products: bool = False
    repeated_heads: bool = False
    complex_rotation: bool = False
    loss: Literal["", "eager", "fused"] = ""
    logged_losses: int = 0
    loss_in_tensor_parallel: Literal["", "eager", "fused"] = ""
    foreach_optimizer: bool = False
    grad_dtype: Literal["", "bf16", "fp16", "fp32"] = ""
    grad_dtype_in_pipelines: Literal["", "bf16", "fp16", "fp32"] = ""
    zero_all_reduces: bool = False
    zero3_apart: bool = False
    flat_parameters: bool = False
    main_gradients: bool = False
    fused_accumulation: bool = True
    reduce_dtype: Literal["", "bf16", "fp16", "fp32"] = ""
    fp8_kept: Literal["bf16", "fp8"] = "bf16"
    fp8_scaling: Literal["current", "delayed"] = "current"
    fp8_weights: Literal["micro-batch", "step"] = "micro-batch"
    fp8_experts: bool = False
    fp8_gathers: Literal["bf16", "fp8"] = "bf16"
    etp: Literal[1] | None = None
    moe_dispatcher: Literal["", "alltoall", "deepep", "hybridep"] = ""
    overlap_grad_reduce: bool | None = None
    overlap_grad_reduce_in_pipelines: bool | None = None
    overlap_param_gather: bool | None = None
    tp_comm_overlap: Literal["", "none", "bulk", "chunks"] = ""
    tp_comm_waits: bool = False
    tp_dtensor: bool = False
    tp_comm_sms: int = 0
    pipeline_scatter_gather: bool = False
    recompute_early_stop: bool | None = None
    host: str = ""
    host_waits: bool = False
    ring_host_waits: bool = False
    expandable_segments: bool = False
    other_communicators: tuple[str, ...] = ()


_OWN = ("name", "title", "sources")
CHOICES = tuple(f.name for f in fields(Stack) if f.name not in _OWN)
"""What a stack can choose."""


def stack_names() -> tuple[str, ...]:
    """The words of all stacks, sorted."""
    return tuple(sorted(_paths()))


@cache
def load_stack(name: str) -> Stack:
    """The stack of that name.

    Raises:
        UnknownNameError: no such stack; lists the choices and the nearest.
        DataError: its file breaks a rule.
    """
    paths = _paths()
    if name not in paths:
        raise UnknownNameError("stack", name, paths)
    return read_stack(paths[name])


def read_stack(path: Traversable) -> Stack:
    """Reads a stack's file.

    Raises:
        DataError: the file is not TOML, an entry is no choice of a stack or of a wrong type, or has no source.
        UnknownNameError: it is like a stack that there is not.
    """
    import msgspec

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        said: dict[str, Any] = {"name": path.name.removesuffix(".toml"), "title": data.pop("title", "")}
        like = load_stack(data.pop("like")) if "like" in data else Stack()
        _check(path.name, data)
        choices = {key: entry["value"] for key, entry in data.items()}
        sources = {**like.sources, **{key: entry["source"] for key, entry in data.items()}}
        others = {key: getattr(like, key) for key in like.sources}
        return msgspec.convert(others | said | choices | {"sources": sources}, Stack)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise DataError(f"stack {path.name}: {error}") from error


def _check(file: str, data: Mapping[str, Any]) -> None:
    for key, entry in data.items():
        if key not in CHOICES:
            raise DataError(f"stack {file}: '{key}' is no choice of a stack: choose {', '.join(CHOICES)}")
        whole = isinstance(entry, dict) and entry.keys() == {"value", "source"}
        if not whole or not str(entry["source"]).strip():
            raise DataError(f"stack {file}: {key} needs a value and its source, and nothing else")


@cache
def _paths() -> Mapping[str, Traversable]:
    folder = files("echograph.models").joinpath("data/stacks")
    return {path.name.removesuffix(".toml"): path for path in folder.iterdir() if path.name.endswith(".toml")}
