"""Echograph: a compiler and simulator for distributed deep-learning training.

    import echograph as eg

    step = eg.compile("llama-3.1-8b", batch_size=1, seq_len=4096)
    system = eg.System("dgx-h100")
    job = eg.lower(step, eg.Plan(gpus=256, tp=8, zero=1), system)
    result = eg.simulate(job, system)
    result.step_s, result.interval_s, result.breakdown

The names below are imported when they are asked for: importing echograph loads nothing else. A command is a call
of one of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.ir.graph import JobGraph, StepGraph
    from echograph.ir.serde import load, save
    from echograph.ir.timeline import Timeline
    from echograph.profiler.comms.tracer import trace_collectives
    from echograph.profiler.record.recorder import record
    from echograph.simulator.result import Result
    from echograph.workflow.analyze import analyze
    from echograph.workflow.calibration.profiles import fit
    from echograph.workflow.capture import capture
    from echograph.workflow.compile import compile
    from echograph.workflow.formats import export, import_
    from echograph.workflow.jobs import JobPlacement, simulate_jobs
    from echograph.workflow.plan import Plan, passes
    from echograph.workflow.predict import lower, simulate
    from echograph.workflow.replay import replay
    from echograph.workflow.scenario import Scenario
    from echograph.workflow.search import search
    from echograph.workflow.system import System
    from echograph.workflow.validation.validate import validate

__version__ = "0.1.0"
__all__ = [
    "JobGraph",
    "JobPlacement",
    "Plan",
    "Result",
    "Scenario",
    "StepGraph",
    "StepSpec",
    "System",
    "Timeline",
    "__version__",
    "analyze",
    "capture",
    "compile",
    "export",
    "fit",
    "import_",
    "load",
    "lower",
    "passes",
    "record",
    "replay",
    "save",
    "search",
    "simulate",
    "simulate_jobs",
    "trace_collectives",
    "validate",
]

_HOMES = {
    "JobGraph": "ir.graph",
    "JobPlacement": "workflow.jobs",
    "Plan": "workflow.plan",
    "Result": "simulator.result",
    "Scenario": "workflow.scenario",
    "StepGraph": "ir.graph",
    "StepSpec": "frontend.pytorch.spec",
    "System": "workflow.system",
    "Timeline": "ir.timeline",
    "analyze": "workflow.analyze",
    "capture": "workflow.capture",
    "compile": "workflow.compile",
    "export": "workflow.formats",
    "fit": "workflow.calibration.profiles",
    "import_": "workflow.formats",
    "load": "ir.serde",
    "lower": "workflow.predict",
    "passes": "workflow.plan",
    "record": "profiler.record.recorder",
    "replay": "workflow.replay",
    "save": "ir.serde",
    "search": "workflow.search",
    "simulate": "workflow.predict",
    "simulate_jobs": "workflow.jobs",
    "trace_collectives": "profiler.comms.tracer",
    "validate": "workflow.validation.validate",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
