"""What passes leave of one step: plans that begin with the same passes share it."""

from __future__ import annotations

from collections.abc import Sequence

from echograph.ir.graph import StepGraph
from echograph.ir.passes.base import Pass, pass_text, run

MOST_STEPS = 256
"""Steps that are kept, some hundred kilobytes each."""


class SharedSteps:
    """The steps that passes make of one; of many, those are kept that were asked for last.

    Args:
        graph: the step before all passes.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self._known: dict[tuple[str, ...], StepGraph] = {}

    def after(self, passes: Sequence[Pass]) -> StepGraph:
        """The step that passes leave, each of which leaves a step.

        Raises:
            PlanError: one of them does not fit.
        """
        texts, step = tuple(map(pass_text, passes)), self.graph
        for count, one in enumerate(passes, 1):
            made = self._known.pop(texts[:count], None)
            step = run(step, (one,), to=StepGraph, verify=False) if made is None else made
            self._known[texts[:count]] = step
            if len(self._known) > MOST_STEPS:
                del self._known[next(iter(self._known))]
        return step
