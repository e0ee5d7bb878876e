"""What fully sharded data parallelism gathers and reduces at once: its units, and when each runs.

A unit is a layer: an instance of a repeated block, or a layer that does not repeat exactly (the first of T5, whose
attention has a bias of positions) and so stands in the main block, where modules' paths say what belongs to it.
The rest of a main block is the *root*. That is `fully_shard` applied to each layer, and then to the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit of a block.

    Attributes:
        module: path of the layer in a main block; "" for a block that is a layer, and for the root.
        root: whether it is the root.
        parameters: rows of its parameters.
        gradients: rows of its final gradients.
    """

    module: str
    root: bool
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]


def phase_of(phase: int) -> t.Phase:
    """Recomputation belongs to the backward pass, and what is not named to the forward pass."""
    named = {t.Phase.RECOMPUTE: t.Phase.BACKWARD, t.Phase.OTHER: t.Phase.FORWARD}
    return named.get(t.Phase(phase), t.Phase(phase))


class Units:
    """The units of every block of a graph.

    Args:
        graph: the step, or a pipeline's job, whose chunks each have a main block.
        gradients: rows of its final gradients.
    """

    def __init__(self, graph: Graph, gradients: list[int]) -> None:
        self.graph = graph
        layers = sorted({re.escape(b.name) for n, b in enumerate(graph.blocks) if self._is_layer(n)})
        self._module = re.compile(rf"(?:{'|'.join(layers)})\.\d+(?=\.|$)") if layers else None
        self.of_block = [self._units(number, gradients) for number in range(len(graph.blocks))]
        self._modules: dict[tuple[int, str], int] = {}

    def is_main(self, block: int) -> bool:
        """Whether a block is no layer, and runs forward."""
        rows = self.graph.blocks[block].ops
        forward = (self.graph.ops.phase[rows.start : rows.stop] == t.Phase.FORWARD).any()
        return bool(forward) and not self._is_layer(block)

    def of_op(self, block: int, row: int) -> int:
        """Number of the unit in its block that an operation belongs to."""
        if len(self.of_block[block]) == 1:
            return 0
        module = self.graph.strings[self.graph.ops.module[row]]
        if (block, module) not in self._modules:
            found = self._layer(module)
            modules = [unit.module for unit in self.of_block[block]]
            self._modules[block, module] = modules.index(found) if found in modules else 0
        return self._modules[block, module]

    def _is_layer(self, block: int) -> bool:
        return any(instance.label for instance in self.graph.blocks[block].instances)

    def _layer(self, path: str) -> str:
        found = self._module.match(path) if self._module else None
        return found.group() if found else ""

    def _units(self, number: int, gradients: list[int]) -> tuple[Unit, ...]:
        graph, block = self.graph, self.graph.blocks[number]
        parameters: dict[str, list[int]] = {"": []}
        reduced: dict[str, list[int]] = {}
        main = not self._is_layer(number)
        for row in block.tensors:
            if self._is_parameter(row):
                layer = self._layer(graph.strings[graph.tensors.name[row]]) if main else ""
                parameters.setdefault(layer, []).append(row)
        for row in gradients:
            if row in block.tensors:
                layer = self._layer(graph.strings[graph.tensors.name[row]]) if main else ""
                reduced.setdefault(layer if layer in parameters else "", []).append(row)
        return tuple(
            Unit(
                module=layer, root=main and not layer, parameters=tuple(rows),
                gradients=tuple(reduced.get(layer, ())),
            )
            for layer, rows in parameters.items()
        )  # fmt: skip

    def _is_parameter(self, row: int) -> bool:
        tensors = self.graph.tensors
        made = self.graph.maker[row] != NONE or tensors.alias_of[row] != NONE or tensors.port[row]
        return not made and bool(tensors.role[row] == t.TensorRole.PARAMETER)
