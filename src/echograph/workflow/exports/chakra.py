"""`echoc export --to chakra`: a job with the durations of a cluster, and ASTRA-sim's files of that cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from echograph.ir.chakra.writer import ChakraExport, write_chakra
from echograph.ir.graph import Graph, JobGraph
from echograph.progress import Progress, silent
from echograph.simulator.clusters import DEFAULT_CLUSTER, Cluster
from echograph.simulator.clusters.astra_sim import astra_sim_files
from echograph.simulator.durations import durations
from echograph.units import format_time, to_ps, to_s
from echograph.workflow.exports import ExportOptions, job_of
from echograph.workflow.system import System


def export_chakra(graph: Graph, output: Path, options: ExportOptions, say: Progress = silent) -> ChakraExport:
    """Writes the traces of a job, and the configuration of ASTRA-sim for the cluster that it runs on.

    Durations are those of `echosim run`: those that the graph has, else estimated ones.

    Raises:
        UsageError: the graph is a step graph.
        PlanError: the job is too large to be written out, or does not fill the cluster's NVLink domains.
    """
    job = job_of(graph)
    system = System(options.cluster or DEFAULT_CLUSTER)
    cluster, device = system.cluster, system.device
    say("estimating durations")
    timed = system.annotate(job)
    times = None if cluster.degraded else durations(timed, cluster).picoseconds
    done = write_chakra(
        timed,
        output,
        device=cluster.device,
        name=options.name or "",
        per_role=options.per_role,
        progress=say,
        communication_ps=times,
        beside=astra_sim_files(
            cluster,
            job.world_size,
            peak_flops_per_s=system.peak_flops_per_s(job),
            memory_bytes_per_s=0.0 if device is None else device.datasheet.memory_bandwidth_bytes_per_s,
        ),
    )
    say("simulating, to say what a reader of the traces will make of them")
    expected = None if done.one_at_a_time_ps is None else _expected(timed, system, done.one_at_a_time_ps)
    gap = () if expected is None else (_gap(expected),)
    return replace(done, notes=(*done.notes, *_lost(cluster, output), *gap), expected=expected)


def _expected(job: JobGraph, system: System, serial_ps: int) -> dict[str, float]:
    """Seconds of the step: as `echosim` says, without the time of the host, and one communication at a time."""
    from echograph.simulator.host import Host
    from echograph.simulator.simulate import simulate

    step, free = (
        simulate(job, system.cluster, host, memory=False).step_ps
        for host in (system.host, Host(op_ps=0, launch_ps=0))
    )
    return {
        "echosim_s": to_s(step),
        "without_host_s": to_s(free),
        "one_at_a_time_s": to_s(serial_ps),
        "gap": serial_ps / step - 1 if step else 0.0,
    }


def _gap(expected: Mapping[str, float]) -> str:
    """What to expect of a reader that runs one kernel and one communication of a rank at a time, and why."""
    step, free, serial = (expected[name] for name in ("echosim_s", "without_host_s", "one_at_a_time_s"))
    host, turns = ((after - before) / step if step else 0.0 for before, after in ((step, free), (free, serial)))
    return (
        f"expected of ASTRA-sim: {format_time(to_ps(serial))} a step, {expected['gap']:+.1%} of echosim's "
        f"{format_time(to_ps(step))}: no time of the host {host:+.1%}, one kernel and one communication of a rank "
        f"at a time {turns:+.1%}; its model of the network not counted"
    )


def _lost(cluster: Cluster, output: Path) -> Iterator[str]:
    """What ASTRA-sim's files do not say of the cluster."""
    yield "ASTRA-sim's files have rings over links of one bandwidth and latency: no trees, NVLS or protocols"
    if cluster.degraded or cluster.slow_nodes:
        yield f"cluster {cluster.name}: what is degraded is not in ASTRA-sim's files"
    if "empty" in str(output):
        yield "ASTRA-sim reads no groups from a path that has 'empty' in it: move the folder"
