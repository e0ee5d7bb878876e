"""What a communication operator of PyTorch is: kind, group, bytes, tensors, whether its caller waits.

All of torch.distributed ends in two namespaces of operators: `c10d`, whose operators take a process group and
answer with a Work to wait for, and `_c10d_functional`, which names its group and answers with tensors to wait
for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork

from echograph.errors import CaptureError
from echograph.ir.comms.operations import OPERATIONS, collective_of_operation
from echograph.ir.types import CollectiveKind

MESSAGES = ("send", "recv")
NAMESPACES = ("c10d", "_c10d_functional")
WAIT = "wait_tensor"
_COALESCED = ("allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")
# Operators of `_c10d_functional` that write what they are given; the others make new tensors.
_IN_PLACE = ("all_reduce_", "all_reduce_coalesced_", "broadcast_")


@contextmanager
def coalesced() -> Iterator[None]:
    """In the context, PyTorch has shape rules for collectives of several buckets at once; it lacks them."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in _COALESCED:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            library.impl(name, lambda *_, **__: FakeWork().boxed(), "Meta")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Communication:
    """One call, as this rank makes it.

    Attributes:
        op: as torch.distributed names it ("all_reduce", "reduce_scatter_tensor", "send").
        group: as PyTorch names the process group.
        ranks: of the group, global, in its order.
        nbytes: message size as nccl-tests defines it.
        dtype: of its elements; None for a barrier.
        asynchronous: whether the caller goes on before it has ended.
        inputs: tensors that this rank gives.
        outputs: tensors that this rank gets; those of a functional operator are new.
        peer: global rank of the other side of a message, or -1.
        tag: of a message.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int
    dtype: torch.dtype | None
    asynchronous: bool
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    peer: int = -1
    tag: int = 0

    @property
    def kind(self) -> CollectiveKind | None:
        """Of a collective; None for a message."""
        return collective_of_operation(self.op)


def communication_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> Communication | None:
    """What an operator communicates; None for one that only waits, or asks.

    Args:
        func: the overload.
        args: positional arguments.
        kwargs: arguments by name.
        out: what it answered.

    Raises:
        CaptureError: a collective operator that is not known here.
    """
    name = func._schema.name.partition("::")[2]
    if func.namespace == "_c10d_functional":
        return None if name == WAIT else _functional(name, func, args, kwargs, out)
    operation = OPERATIONS.get(name)
    if operation is None or name == "recv_any_source_":
        if any("ProcessGroup" in str(argument.type) for argument in func._schema.arguments):
            raise CaptureError(f"torch.distributed's c10d::{name} is no communication that a graph holds")
        return None
    group = torch.distributed.ProcessGroup.unbox(args[operation.group])
    root = operation.root >= 0 and args[operation.root] == group.rank()
    inputs = tuple(operation.inputs(args, root))
    outputs = inputs if operation.in_place else tuple(operation.outputs(args, root))
    position = operation.asynchronous
    ranks = ranks_of(group)
    return Communication(
        op=operation.name.removeprefix("monitored_"),
        group=group.group_name,
        ranks=ranks,
        nbytes=_size(operation.name, inputs, outputs, len(ranks)),
        dtype=_dtype(inputs, outputs),
        asynchronous=bool(args[position]) if -1 < position < len(args) else operation.work,
        inputs=inputs,
        outputs=outputs,
        peer=ranks[args[operation.peer]] if operation.peer >= 0 else -1,
        tag=max(0, args[operation.tag]) if operation.tag >= 0 else 0,
    )


def _functional(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Communication:
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    group = torch.distributed.distributed_c10d._resolve_process_group(  # type: ignore[attr-defined]
        named["group_name"]
    )
    inputs, outputs = _tensors(args[0]), _tensors(out)
    if name in _IN_PLACE:
        outputs = inputs
    ranks, op = ranks_of(group), name.removesuffix("_").removesuffix("_out")
    return Communication(
        op=op,
        group=group.group_name,
        ranks=ranks,
        nbytes=_size(op, inputs, outputs, len(ranks)),
        dtype=_dtype(inputs, outputs),
        asynchronous=True,
        inputs=inputs,
        outputs=outputs,
    )


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, in its order."""
    return tuple(torch.distributed.get_process_group_ranks(group))


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _dtype(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> torch.dtype | None:
    return next((tensor.dtype for tensor in (*inputs, *outputs)), None)


def _size(op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], ranks: int) -> int:
    """As nccl-tests counts it: what one rank holds of the whole message."""
    given, got = (sum(t.numel() * t.element_size() for t in side) for side in (inputs, outputs))
    if op in ("gather", "scatter"):
        return ranks * (given if op == "gather" else got)
    return max(given, got)
