"""Which chunks run which operation of the optimizer, and what of it all stages must agree on.

Operations that write the same parameter, gradient or state go together, to the chunks that hold it. Others go
where what they read is. What reads of several stages (the norms of all gradients) runs on every stage, on what of
it the stage has; its result is the stage's share, completed by an all-reduce over the stages. What hangs on no
single stage (the loss scale, the factor that gradients are clipped by) runs on every stage, in its first chunk.

The flag of fp16 loss scaling is handed from parameter to parameter, through all stages: a stage hands it on among
its own, and an all-reduce joins the stages' flags. The gradient of a parameter that several stages hold counts
on the first of them, as Megatron-LM counts it (`param_is_not_shared`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.gradient_norm import overflow_flags, total_norms
from echograph.ir.passes.pipeline_placement import Chunks, Placement, memory_of

_KEPT = (t.TensorRole.PARAMETER, t.TensorRole.GRADIENT, t.TensorRole.OPTIMIZER_STATE)


class Optimizer:
    """Places the optimizer's operations of the main block, once all others are placed.

    Args:
        graph: the step.
        placement: gets the operations, and what is common to all stages.
        stages: chunk k is on stage k modulo this.
    """

    def __init__(self, graph: StepGraph, placement: Placement, stages: int) -> None:
        self.graph, self.placement = graph, placement
        self.everywhere = frozenset(range(stages))
        self.parent: dict[int, int] = {}
        self.writes: dict[int, bool] = {}
        self.fixed: dict[int, set[Chunks]] = defaultdict(set)
        self.shares: dict[int, set[int]] = defaultdict(set)
        for chunk, gradient in placement.shares:
            self.shares[gradient].add(chunk)

    def place(self) -> None:
        """Fills `ops`, `stagewide`, `totals` and `flags` of the placement.

        Raises:
            PlanError: a value of several stages is neither the norm of all gradients nor their overflow flag.
        """
        graph, placement = self.graph, self.placement
        rows = [r for r in graph.blocks[0].ops if graph.ops.phase[r] == t.Phase.OPTIMIZER]
        flags = overflow_flags(graph)
        placement.flags = {row: graph.tensor_id(0, 0, graph.ops.outputs.row(row)[-1]) for row in flags}
        placement.flag_memory = {memory_of(graph, 0, 0, graph.ops.outputs.row(row)[-1]) for row in flags}
        for row in rows:
            self._tie(row)
        for row in rows:
            if self.writes[row]:
                self.fixed[self._find(-1 - row)] |= self._read_from(row, outside=True)
        several = []
        for row in rows:
            places = self.fixed[self._find(-1 - row)] or self._read_from(row)
            if len(places) > 1:
                several.append(row)
            elif self.writes[row] and places:
                self.fixed[self._find(-1 - row)] = places
            if len(places) != 1:
                placement.stagewide.add(row)
            placement.ops[row] = next(iter(places)) if len(places) == 1 else self.everywhere
        self._check(several, rows)
        placement.totals = {row for row in total_norms(graph) if row in placement.stagewide}
        self._count_once(several, rows)
        self._check_layers()

    # -- where operations go -------------------------------------------------------------------------------

    def _tie(self, row: int) -> None:
        """Ties an operation that writes something kept to all such memory that it touches."""
        graph = self.graph
        made = {m for i in graph.ops.outputs.row(row) if (m := self._kept(i)) is not None}
        self.writes[row] = bool(made)
        if made:
            for memory in made | {m for i in graph.ops.inputs.row(row) if (m := self._kept(i)) is not None}:
                self.parent[self._find(memory)] = self._find(-1 - row)

    def _kept(self, tensor: int) -> int | None:
        """The memory behind a tensor if it belongs to a parameter; what is only read, as a buffer, does not."""
        root = int(self.graph.root[tensor])
        maker = int(self.graph.maker[root])
        made = maker != NONE and self.graph.ops.phase[maker] != t.Phase.OPTIMIZER
        return root if made or self.graph.tensors.role[root] in _KEPT else None

    def _find(self, node: int) -> int:
        root = node
        while (up := self.parent.setdefault(root, root)) != root:
            root = up
        while (up := self.parent[node]) != root:
            self.parent[node], node = root, up
        return root

    def _read_from(self, row: int, *, outside: bool = False) -> set[Chunks]:
        """Where the values are that an operation reads; `outside`: but for those of the main block's optimizer."""
        graph, placement, found = self.graph, self.placement, set[Chunks]()
        for tensor in graph.ops.inputs.row(row):
            if self._is_flag(0, 0, tensor):
                continue
            source = graph.source(0, 0, tensor)
            if source is None:
                holders = placement.holders.get(int(graph.root[tensor]))
                found |= {holders} if holders else self._of_state(tensor) if not outside else set()
            elif source[0] == 0 and graph.ops.phase[source[2]] == t.Phase.OPTIMIZER:
                if not outside and source[2] not in placement.stagewide:
                    found.add(placement.ops[source[2]])
            else:
                shared = frozenset(self.shares[int(graph.origin[tensor])])
                found.add(shared or placement.of(source))
        return found

    def _of_state(self, tensor: int) -> set[Chunks]:
        kept = self._kept(tensor)
        return set() if kept is None else self.fixed[self._find(kept)]

    def _is_flag(self, block: int, instance: int, tensor: int) -> bool:
        memory = self.placement.flag_memory
        return bool(memory) and memory_of(self.graph, block, instance, tensor) in memory

    # -- what crosses stages -------------------------------------------------------------------------------

    def _check(self, several: list[int], rows: list[int]) -> None:
        """Only what ends in the norm of all gradients can be computed stage by stage."""
        graph = self.graph
        ends = set(total_norms(graph))
        readers = self._readers(rows)
        for row in reversed(rows):
            after = [reader for tensor in graph.ops.outputs.row(row) for reader in readers[tensor]]
            if after and ends.issuperset(after) and not self.writes[row]:
                ends.add(row)
        for row in several:
            if row not in ends:
                self._refuse(f"operation {row} ({graph.strings[graph.ops.name[row]]})")

    def _readers(self, rows: Iterable[int]) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            for tensor in self.graph.ops.inputs.row(row):
                readers[int(self.graph.origin[tensor])].append(row)
        return readers

    def _count_once(self, several: list[int], rows: list[int]) -> None:
        """What is summed over the stages is made on one of the chunks that could."""
        readers, placement = self._readers(rows), self.placement
        for row in rows:
            after = [reader for tensor in self.graph.ops.outputs.row(row) for reader in readers[tensor]]
            held = len(placement.ops[row]) > 1 and row not in placement.stagewide
            if held and after and set(several).issuperset(after):
                placement.ops[row] = frozenset((min(placement.ops[row]),))

    def _check_layers(self) -> None:
        """A layer's optimizer may read what all stages have, but not what another layer's makes."""
        graph, placement = self.graph, self.placement
        for number, block in enumerate(graph.blocks[1:], 1):
            ports = {
                int(graph.root[tensor])
                for row in block.ops
                if graph.ops.phase[row] == t.Phase.OPTIMIZER
                for tensor in graph.ops.inputs.row(row)
                if graph.tensors.port[graph.root[tensor]]
            }
            for index in range(len(block.instances)):
                here = frozenset((placement.instances[number, index],))
                for port in ports:
                    source = graph.source(number, index, port)
                    if source is None or graph.ops.phase[source[2]] != t.Phase.OPTIMIZER:
                        continue
                    known = (source[0] == 0 and source[2] in placement.stagewide) or here <= placement.of(source)
                    if not known and not self._is_flag(number, index, port):
                        self._refuse(block.name)

    def _refuse(self, where: str) -> None:
        raise PlanError(
            f"the optimizer's part in {where} combines values of several pipeline stages, which can be done for "
            "the norm of all gradients and fp16 overflow only: use an optimizer that takes parameters one by one"
        )
