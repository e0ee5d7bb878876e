"""Traces of a job to a job graph that runs again as it was measured, and can be changed.

`walk` and `rank` take one rank's trace apart into `pieces` of work that wait for each other; `observing` says what
recording cost; `job` joins the ranks by their collectives and writes the graph.
"""

from echograph.profiler.replay.job import Lowered, lower
from echograph.profiler.replay.observing import Observed, observed

__all__ = ["Lowered", "Observed", "lower", "observed"]
