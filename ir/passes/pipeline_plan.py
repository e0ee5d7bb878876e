"""What all chunks of a pipeline have in common while they are written."""

from __future__ import annotations

from dataclasses import dataclass, field

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.pipeline_layers import Layers
from echograph.ir.passes.pipeline_placement import Placement, memory_of
from echograph.ir.passes.pipeline_routes import Part, Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step and where it goes. "Ids" are those of the step.

    Attributes:
        graph: the step.
        placement: which chunk runs what.
        routes: what crosses between chunks.
        parts: the part of every operation.
        layers: the layers' blocks.
        leads: (chunk, operation of the main block) that bear a launch on their stage.
        stages: chunk k is on stage k modulo this.
        group: the group of the stages.
        shared: for every gradient that chunks share, the group that all-reduces it; None where two exchange it.
    """

    graph: StepGraph
    placement: Placement
    routes: Routes
    parts: list[Part]
    layers: Layers
    leads: set[tuple[int, int]]
    stages: int
    group: int
    shared: dict[int, int | None]
    _tensors: dict[int, t.Tensor] = field(default_factory=dict, init=False)

    def tensor(self, row: int) -> t.Tensor:
        """A tensor of the step."""
        if row not in self._tensors:
            self._tensors[row] = self.graph.tensors[row]
        return self._tensors[row]

    def is_flag(self, tensor: int) -> bool:
        """Whether a tensor id is a version of a flag that is handed through all stages."""
        flags = self.placement.flag_memory
        return bool(flags) and memory_of(self.graph, *self.graph.locate_tensor(tensor)) in flags

    def version(self, tensor: int, stage: int) -> int:
        """The last version of a flag that a stage makes, up to the one asked for; any other tensor is itself."""
        if not self.is_flag(tensor):
            return tensor
        graph, place = self.graph, self.graph.locate_tensor(tensor)
        while True:
            block, instance, row = graph.value(*place)
            maker = int(graph.maker[row])
            if maker == NONE or self.runs(stage, (block, instance, maker)):
                return graph.tensor_id(block, instance, row)
            place = block, instance, int(graph.tensors.alias_of[row])

    def runs(self, stage: int, place: tuple[int, int, int]) -> bool:
        """Whether a stage runs (block, instance, operation)."""
        return any(chunk % self.stages == stage for chunk in self.placement.of(place))

    def has(self, stage: int, tensor: int) -> bool:
        """Whether the optimizer has a tensor on a stage."""
        source = self.graph.source(*self.graph.locate_tensor(tensor))
        return source is None or self.runs(stage, source) or self.is_flag(tensor)

    def is_late(self, tensor: int) -> bool:
        """Whether the optimizer makes a tensor, when all chunks of a stage are done."""
        source = self.graph.source(*self.graph.locate_tensor(tensor))
        return source is not None and self.parts[source[2]] == Part.UPDATE
