"""Traces of a job to a job graph that runs again as it was measured, and can be changed.

`threads` and `rank` take one rank's trace apart into `pieces` of work that wait for each other; `lower` joins the
ranks by their collectives and writes the graph.
"""

from echograph.profiler.replay.lower import Lowered, lower

__all__ = ["Lowered", "lower"]
