"""Expert parallelism: the experts of each mixture-of-experts layer are divided over ranks, which exchange tokens.

The ranks of the axis "ep" are data-parallel ranks for all but the experts: each works on its own micro-batch, and
has the router, the shared experts and everything else whole. Of the experts each has an equal share. After the
router has put the rows of a layer (tokens times experts per token) in the order of the experts, an all-to-all
takes them to the ranks that have the experts (dispatch); there they are put in the order of the local experts,
multiplied, put back, and another all-to-all returns them (combine). The backward pass exchanges the gradients of
the same rows, the other way round. (Lepikhin et al., "GShard", 2020, section 3; Megatron-Core's
`MoEAlltoAllTokenDispatcher`.)

How many rows will come, a rank cannot know: before the dispatch the ranks all-gather how many each has for every
expert, and the host waits for the answer to size the exchange (`preprocess` of the same dispatcher). With a
capacity that is known beforehand (`drop_and_pad`), and neither is needed; then rows are padded or dropped by an
operation of its own, which trainers fuse with the ordering of the rows.

The axes "cp" and "ep" may share the experts together (`across`): context-parallel ranks have tokens of their own,
too, so all may exchange with all, as Megatron-Core lets the ranks of experts cut across those of attention (Liu
et al., "MoE Parallel Folding", 2025).

The graph has one program for all ranks of the axis: that of the rank that has most rows. `imbalance` says how many
that are and is an assumption; what of the rows stays on its rank (one in `size`, on average) is in the buffers of
the exchange, as nccl-tests counts them. Gradients of experts are summands over fewer ranks than others: `sharded`
names the axis, and the pass that adds them up looks there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir.graph import Axis, StepGraph
from echograph.ir.passes.expert_parallel.places import Load, Places
from echograph.ir.passes.expert_parallel.write import write
from echograph.ir.passes.gradients import EXPERT

MAX_SIZE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """The step as one rank executes it that has a share of the experts.

    Attributes:
        size: ranks that share the experts, those of the axes of `across` among them.
        capacity_factor: rows that each expert takes of each rank, in units of their even share; more are dropped,
            fewer padded. None: every expert takes what comes.
        imbalance: rows that the busiest rank has, in units of the mean (assumed; 1 is the balance that routers are
            trained for). With a capacity all ranks have as many.
        across: axes of the step's mesh whose ranks share the experts, too; each must have tokens of its own.
    """

    name: ClassVar[str] = "expert_parallel"

    size: int
    capacity_factor: float | None = None
    imbalance: float = 1.0
    across: tuple[str, ...] = ()

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step with local experts, and exchanges over the axis "ep", outside all other axes, and `across`.

        Raises:
            PlanError: an option is out of range, the experts do not divide (names sizes that do), or the step has
                no experts, or what cannot be shared.
        """
        self._check()
        if "ep.all_to_all" in graph.strings:
            raise PlanError("the step is expert-parallel already: start from the step as it was captured")
        if self.size == 1 and self.capacity_factor is None:
            return graph
        axes = self._axes(graph)
        places = Places(graph, size=self.size)
        self._check_tokens(graph, places)
        load = Load(size=self.size, imbalance=self.imbalance, capacity_factor=self.capacity_factor)
        return write(graph, places, load, axes)

    def _axes(self, graph: StepGraph) -> tuple[Axis, ...]:
        """The axes whose ranks share the experts, outermost first; the first is new, unless it has one rank."""
        inner = tuple(axis for axis in graph.mesh if axis.name in self.across)
        if len(inner) != len(self.across):
            names = ", ".join(axis.name for axis in graph.mesh) or "no axis"
            raise PlanError(f"experts across {', '.join(self.across)}: the step's mesh has {names}: leave it out")
        ranks = prod(axis.size for axis in inner)
        if self.size % ranks:
            raise PlanError(
                f"expert parallelism over {self.size} ranks, across {', '.join(self.across)}: no multiple of "
                f"{ranks}: choose {self.size // ranks * ranks or ranks} or {-(-self.size // ranks) * ranks}"
            )
        outer = self.size // ranks
        return (*((Axis(name=EXPERT, size=outer),) if outer > 1 else ()), *inner)

    def _check_tokens(self, graph: StepGraph, places: Places) -> None:
        """The ranks of the axes of `across` must divide the tokens of the step among them."""
        ranks = prod(axis.size for axis in graph.mesh if axis.name in self.across)
        whole = graph.workload.batch_size * graph.workload.sequence_length
        if self.across and {tokens * ranks for tokens in places.tokens()} != {whole}:
            raise PlanError(
                f"experts across {', '.join(self.across)}: the ranks do not have tokens of their own: leave it out"
            )

    def _check(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise PlanError(f"expert parallelism over {self.size} ranks: choose 1 to {MAX_SIZE}")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < float("inf"):
            raise PlanError(f"capacity factor {self.capacity_factor:g} of the experts: give more than 0")
        if not 1 <= self.imbalance <= self.size:
            raise PlanError(
                f"imbalance {self.imbalance:g} of the experts: the busiest of {self.size} ranks has 1 to "
                f"{self.size} times the mean"
            )
        if self.capacity_factor is not None and self.imbalance != 1:
            raise PlanError(
                f"imbalance {self.imbalance:g} of the experts: with a capacity all have as many rows: leave it out"
            )
