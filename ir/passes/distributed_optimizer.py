"""How what lives through a step is divided over data-parallel ranks.

Every data-parallel rank would do the same update; instead each updates its part of the parameters, and keeps that
part of the optimizer's state alone (Rajbhandari et al., "ZeRO", SC 2020, stage 1; Megatron-LM's distributed
optimizer). Which tensors are parts follows from the data axes of the mesh and from what divides them already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, prod

import numpy as np

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Axis, Graph
from echograph.ir.passes.data_parallel_axes import reduction_axes

PERSISTENT = (t.TensorRole.PARAMETER, t.TensorRole.GRADIENT, t.TensorRole.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How what lives through the step is divided over data-parallel ranks.

    Attributes:
        graph: the step, or a pipeline's job.
        mesh: of the job.
        gradients: rows of the final gradients.
        copies: data axes whose ranks keep copies (HSDP's replicas).
        flat: elements are cut evenly, whatever the shape, as in a contiguous buffer; else one dimension is.
        none: nothing is divided.
    """

    graph: Graph
    mesh: tuple[Axis, ...]
    gradients: frozenset[int]
    copies: tuple[str, ...] = ()
    flat: bool = False
    none: bool = False
    _origin: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _cut: dict[int, bool] = field(default_factory=dict, init=False, repr=False)

    def axes(self, tensor: t.Tensor) -> tuple[str, ...]:
        """The axes over which a tensor becomes divided; a scalar is not."""
        if self.none or not tensor.shape:
            return ()
        return tuple(a for a in reduction_axes(self.mesh, tensor.sharded) if a not in self.copies)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Every axis over which some tensor is, or was already, divided."""
        return () if self.none else tuple(a for a in reduction_axes(self.mesh, ()) if a not in self.copies)

    def ranks(self, axes: Iterable[str]) -> int:
        """Positions along some axes together."""
        sizes = {axis.name: axis.size for axis in self.mesh}
        return prod(sizes[name] for name in axes)

    def shape(self, tensor: t.Tensor) -> tuple[int, ...]:
        """The shape of the largest shard."""
        ranks = self.ranks(self.axes(tensor))
        if ranks == 1:
            return tensor.shape
        if self.flat:
            return (ceil(tensor.numel / ranks),)
        dim = self.dim(tensor)
        return (*tensor.shape[:dim], ceil(tensor.shape[dim] / ranks), *tensor.shape[dim + 1 :])

    def dim(self, tensor: t.Tensor) -> int:
        """The dimension that is cut: the first, or the second of stacked matrices fewer than ranks.

        torchtitan cuts experts so (`shard_placement_fn`), where the first would be padded many times over.
        """
        ranks = self.ranks(self.axes(tensor))
        stacked = len(tensor.shape) > 2 and tensor.shape[0] < ranks and tensor.shape[1] % ranks == 0
        return 1 if stacked else 0

    def padded(self, tensor: t.Tensor) -> int:
        """Elements of all shards together, those that fill up included."""
        return prod(self.shape(tensor)) * self.ranks(self.axes(tensor))

    def origin(self, row: int) -> int:
        """The tensor that a tensor has its value from, in the first instance of its block."""
        if row not in self._origin:
            number = int(np.searchsorted([b.tensors.stop for b in self.graph.blocks], row, side="right"))
            bound = bool(self.graph.blocks[number].instances)
            self._origin[row] = self.graph.value(number, 0, row)[2] if bound else row
        return self._origin[row]

    def role(self, row: int) -> t.TensorRole:
        """The role of a tensor; a final gradient is one, also where a capture took it for an activation's."""
        return t.TensorRole.GRADIENT if row in self.gradients else t.TensorRole(int(self.graph.tensors.role[row]))

    def of_optimizer(self, row: int) -> bool:
        """Whether an operation of the optimizer makes a tensor's value."""
        maker = int(self.graph.maker[self.origin(row)])
        return maker != NONE and bool(self.graph.ops.phase[maker] == t.Phase.OPTIMIZER)

    def cut(self, row: int) -> bool:
        """Whether the optimizer's tensor is a shard; what it makes is, where it is as large as what it reads."""
        if row not in self._cut:
            tensor = self.graph.tensors[row]
            if tensor.role in PERSISTENT or self.origin(row) in self.gradients:
                self._cut[row] = bool(self.axes(tensor))
            else:
                self._cut[row] = self.of_optimizer(row) and self._makes_shard(tensor)
        return self._cut[row]

    def _makes_shard(self, tensor: t.Tensor) -> bool:
        op = self.graph.ops[int(self.graph.maker[self.origin(tensor.id)])]
        if not tensor.shape:
            return False
        if isinstance(op, t.Recv):
            return op.payload == t.Payload.GRADIENT and bool(self.axes(tensor))
        return any(self.graph.tensors[i].shape == tensor.shape and self.cut(i) for i in op.inputs)
