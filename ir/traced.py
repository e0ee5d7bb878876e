"""Job graphs that were lowered from traces: by what they are known, and the names of what traces do not say."""

from __future__ import annotations

from echograph.ir.columns import distinct
from echograph.ir.graph import Graph, JobGraph

STEP = "step"
"""What stands for the device in a duration that is not of the operation, but of the step that it ends."""
FREE = "free step"
"""What stands for the device in the duration of a step in which nothing was observed."""
TRACE = "trace"
"""The step that is all of a trace."""
NOT_TRACED = "not traced"
"""The group of collectives whose other ranks were not traced, or are not known."""
NOT_TRACED_WORLD = "not traced (all ranks)"
"""The group of such collectives where the trace says that all ranks of the job are in it."""
PARTLY_TRACED = "partly traced"
"""What names of groups begin with of which several ranks were traced, and others were not."""
ONE_OF_SEVERAL = "one rank of several"
"""The group of collectives that a rank of a larger job runs alone."""


def is_traced(graph: Graph) -> bool:
    """Whether a graph is a job that was traced, with the host's own times and the steps in it."""
    devices = set(distinct(graph.ops.duration_device).tolist())
    return isinstance(graph, JobGraph) and any(graph.strings[device] == STEP for device in devices)
