"""`echoc export --to chakra`: a job with the durations of a cluster, and ASTRA-sim's files of that cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from echograph.cli.export import ExportOptions, job_of
from echograph.ir.exporters.chakra import ChakraExport, write_chakra
from echograph.ir.graph import Graph
from echograph.progress import Progress, silent
from echograph.simulator.clusters import DEFAULT_CLUSTER, Cluster, load_cluster
from echograph.simulator.clusters.astra_sim import astra_sim_files

if TYPE_CHECKING:
    from echograph.profiler.costs import DeviceProfile


def export_chakra(graph: Graph, output: Path, options: ExportOptions, say: Progress = silent) -> ChakraExport:
    """Writes the traces of a job, and the configuration of ASTRA-sim for the cluster that it runs on.

    Durations are those of `echosim run`: those that the graph has, else estimated ones.

    Raises:
        UsageError: the graph is a step graph.
        PlanError: the job is too large to be written out, or does not fill the cluster's NVLink domains.
    """
    from echograph.profiler.costs import load_device
    from echograph.profiler.costs.estimate import estimate

    job = job_of(graph)
    cluster = load_cluster(options.cluster or DEFAULT_CLUSTER)
    device = load_device(cluster.device)
    say("estimating durations")
    timed = estimate(job, device)(job)
    done = write_chakra(
        timed,
        output,
        device=device.name,
        name=options.name or "",
        per_role=options.per_role,
        progress=say,
        beside=astra_sim_files(
            cluster,
            job.world_size,
            peak_flops_per_s=_peak(job, device),
            memory_bytes_per_s=device.datasheet.memory_bandwidth_bytes_per_s,
        ),
    )
    return replace(done, notes=(*done.notes, *_lost(cluster, output)))


def _peak(job: Graph, device: DeviceProfile) -> float:
    """Dense peak for the model's type; fp16 runs as bf16 does."""
    from echograph.profiler.costs.estimate import DTYPE_NAMES

    name = DTYPE_NAMES.get(job.workload.dtype, "fp32").replace("fp16", "bf16")
    return device.datasheet.peak_flops_per_s.get(name, 0.0)


def _lost(cluster: Cluster, output: Path) -> Iterator[str]:
    """What ASTRA-sim's files do not say of the cluster."""
    yield "ASTRA-sim's files have rings over links of one bandwidth and latency: no trees, NVLS or protocols"
    if cluster.degraded or cluster.slow_nodes:
        yield f"cluster {cluster.name}: what is degraded is not in ASTRA-sim's files"
    if "empty" in str(output):
        yield "ASTRA-sim reads no groups from a path that has 'empty' in it: move the folder"
