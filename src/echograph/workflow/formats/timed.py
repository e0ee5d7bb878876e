"""Formats that hold times: a Chrome trace of a simulation, and SimAI's workload text."""

from __future__ import annotations

from pathlib import Path

from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.progress import Progress, silent
from echograph.simulator.clusters import DEFAULT_CLUSTER
from echograph.workflow.annotate import annotate
from echograph.workflow.formats.chakra import job_of
from echograph.workflow.plan import Plan
from echograph.workflow.system import System


def export_chrome(
    graph: Graph, output: Path, *, cluster: str = DEFAULT_CLUSTER, progress: Progress = silent
) -> Exported:
    """Writes the timeline of a simulation without options, as `echosim run --trace` does; a step is one node's.

    Raises:
        OutputError: the path cannot be written.
        SimulationError: the job cannot run.
    """
    from echograph.ir.exporters.chrome import chrome_trace
    from echograph.workflow.predict import predict

    assert isinstance(graph, StepGraph | JobGraph)
    progress("simulating")
    result, job = predict(graph, Plan(cluster=cluster))
    progress(f"writing {output}")
    written = write_whole(output, chrome_trace(job, result.timeline))
    note = (
        f"the times are simulated, of {job.world_size} GPUs of {result.cluster}; echosim run --trace has options"
    )
    return Exported(files=1, bytes=written, notes=(note,))


def export_simai(
    graph: Graph, output: Path, *, cluster: str = DEFAULT_CLUSTER, progress: Progress = silent
) -> Exported:
    """Writes SimAI's workload text with the durations of a cluster's device.

    Raises:
        UsageError: the graph is a step graph, or a job without a mesh.
        PlanError: a message is too large for the format.
        OutputError: the path cannot be written.
    """
    from echograph.ir.exporters.simai import write_simai

    progress("estimating durations")
    system = System(cluster)
    return write_simai(annotate(job_of(graph), system), output, device=system.cluster.device)
