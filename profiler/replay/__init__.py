"""Traces of a job to a job graph that runs again as it was measured, and can be changed.

`rank` takes one rank's trace apart into work items that wait for each other; `profiling_overhead` says
what recording cost; `job` joins the ranks by their collectives and writes the graph.
"""

from echograph.profiler.replay.job import LoweredTraces, lower
from echograph.profiler.replay.profiling_overhead import Observed, observed

__all__ = ["LoweredTraces", "Observed", "lower", "observed"]
