"""Over which axes of the mesh gradients are added up.

Along a *data axis* every rank has its own part of the batch: other micro-batches (data- and expert-parallel
ranks), or other tokens of the same ones (context-parallel ranks). So each holds a summand of every gradient, but
for those of tensors that are divided over the axis: experts over "ep".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis

DATA, REPLICATE, SHARD = "dp", "dp_replicate", "dp_shard"
EXPERT, CONTEXT = "ep", "cp"
MICRO_BATCH_AXES = (DATA, REPLICATE, SHARD, EXPERT)
"""Axes whose ranks work on micro-batches of their own."""
DATA_AXES = (*MICRO_BATCH_AXES, CONTEXT)


def reduction_axes(mesh: Iterable[Axis], sharded: Sequence[str]) -> tuple[str, ...]:
    """The data axes, in the order of the mesh, whose ranks each hold a summand of a gradient.

    Args:
        mesh: of the job; axes of one rank are left out.
        sharded: axes over which the gradient is divided (`Tensor.sharded`).
    """
    return tuple(a.name for a in mesh if a.name in DATA_AXES and a.size > 1 and a.name not in sharded)


def axes_group(builder: GraphBuilder, axes: Sequence[str]) -> tuple[int, int]:
    """The group of some axes and the stream of its communicator."""
    name = "+".join(axes)
    return builder.group(name, axes=axes), builder.stream(f"comm.{name}")
