"""Predictions of one graph under many plans, which share what the plans have in common."""

from __future__ import annotations

from echograph.ir.graph import StepGraph
from echograph.simulator.result import Result
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System


class Predictor:
    """Predicts a step graph on a system, plan after plan; each answer is that of `predict` to the picosecond.

    Args:
        graph: one step on one device.
        system: where it runs.
        scenario: what is asked beyond that.
    """

    def __init__(self, graph: StepGraph, system: System, scenario: Scenario | None = None) -> None:
        self.graph = graph
        self.system = system
        self.scenario = scenario or Scenario()

    def predict(self, plan: Plan, *, memory: bool = True, interval: bool = True) -> Result:
        """Predicts one step under a plan.

        Args:
            plan: how the step is spread; its cluster is the system's.
            memory: whether to work out memory.
            interval: whether to work out how sure the prediction is.

        Raises:
            EchoError: as `predict`.
        """
        result, _ = predict(self.graph, plan, self.system, self.scenario, memory=memory)
        return result
