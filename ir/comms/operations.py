"""The operations of PyTorch's `c10d` namespace: what each argument is.

All of torch.distributed ends in these, whoever calls: its own functions, functional collectives, DDP's reducer.
The positions are those of the operators' schemas; an argument at the end that has its default is not passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echograph.ir.comms.bandwidth import base_operation
from echograph.ir.types import CollectiveKind

Tensors = Sequence[Any]
OperatorArguments = tuple[Any, ...]
Take = Callable[[OperatorArguments, bool], Tensors]

_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.REDUCE,
    "gather": CollectiveKind.GATHER,
    "scatter": CollectiveKind.SCATTER,
    "barrier": CollectiveKind.BARRIER,
    "monitored_barrier": CollectiveKind.BARRIER,
}


def collective_of_operation(operation: str) -> CollectiveKind | None:
    """What a graph calls an operation of torch.distributed ("reduce_scatter_tensor"); None for what it has not."""
    return _KINDS.get(base_operation(operation))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """One operator.

    Args:
        name: as torch.distributed calls it.
        inputs: tensors that this rank gives; takes the arguments and whether this rank is the root.
        outputs: tensors that this rank gets; takes the same two.
        in_place: whether those are the same.
        group: position of the process group.
        asynchronous: position of `async_op`, or -1.
        root: position of the root's rank in the group, or -1.
        peer: position of the other rank's number in the group (point to point), or -1.
        tag: position of the tag, or -1.
        work: whether it answers with a Work.
    """

    name: str
    inputs: Take
    outputs: Take
    in_place: bool = False
    group: int = 1
    asynchronous: int = -1
    root: int = -1
    peer: int = -1
    tag: int = -1
    work: bool = True

    @property
    def point_to_point(self) -> bool:
        """Whether two ranks take part, and not the group."""
        return self.tag >= 0


def _at(position: int) -> Take:
    return lambda arguments, root: arguments[position]


def _one(position: int) -> Take:
    return lambda arguments, root: (arguments[position],)


def _flat(position: int) -> Take:
    return lambda arguments, root: [tensor for row in arguments[position] for tensor in row]


def _none(arguments: OperatorArguments, root: bool) -> Tensors:
    return ()


def _if_root(take: Take) -> Take:
    return lambda arguments, root: take(arguments, root) if root else ()


OPERATIONS: dict[str, Operation] = {
    "allreduce_": Operation(name="all_reduce", inputs=_at(0), outputs=_at(0), in_place=True, asynchronous=4),
    "allreduce_coalesced_": Operation(
        name="all_reduce_coalesced", inputs=_at(0), outputs=_at(0), in_place=True, asynchronous=3
    ),
    "allgather_": Operation(name="all_gather", inputs=_at(1), outputs=_flat(0), group=2, asynchronous=3),
    "allgather_coalesced_": Operation(
        name="all_gather_coalesced", inputs=_at(1), outputs=_flat(0), group=2, asynchronous=3
    ),
    "_allgather_base_": Operation(
        name="all_gather_into_tensor", inputs=_one(1), outputs=_one(0), group=2, asynchronous=3
    ),
    "allgather_into_tensor_coalesced_": Operation(
        name="all_gather_into_tensor_coalesced", inputs=_at(1), outputs=_at(0), group=2, asynchronous=3
    ),
    "reduce_scatter_": Operation(name="reduce_scatter", inputs=_flat(1), outputs=_at(0), group=2, asynchronous=4),
    "_reduce_scatter_base_": Operation(
        name="reduce_scatter_tensor", inputs=_one(1), outputs=_one(0), group=2, asynchronous=4
    ),
    "reduce_scatter_tensor_coalesced_": Operation(
        name="reduce_scatter_tensor_coalesced", inputs=_at(1), outputs=_at(0), group=2, asynchronous=4
    ),
    "alltoall_": Operation(name="all_to_all", inputs=_at(1), outputs=_at(0), group=2, asynchronous=3),
    "alltoall_base_": Operation(
        name="all_to_all_single", inputs=_one(1), outputs=_one(0), group=2, asynchronous=5
    ),
    "broadcast_": Operation(name="broadcast", inputs=_if_root(_at(0)), outputs=_at(0), asynchronous=4, root=2),
    "reduce_": Operation(name="reduce", inputs=_at(0), outputs=_if_root(_at(0)), asynchronous=5, root=3),
    "gather_": Operation(
        name="gather", inputs=_at(1), outputs=_if_root(_flat(0)), group=2, asynchronous=4, root=3
    ),
    "scatter_": Operation(
        name="scatter", inputs=_if_root(_flat(1)), outputs=_at(0), group=2, asynchronous=4, root=3
    ),
    "send": Operation(name="send", inputs=_at(0), outputs=_none, peer=2, tag=3),
    "recv_": Operation(name="recv", inputs=_none, outputs=_at(0), peer=2, tag=3),
    "recv_any_source_": Operation(name="recv", inputs=_none, outputs=_at(0), tag=2),
    "barrier": Operation(name="barrier", inputs=_none, outputs=_none, asynchronous=3),
    "monitored_barrier_": Operation(name="monitored_barrier", inputs=_none, outputs=_none, work=False),
}
