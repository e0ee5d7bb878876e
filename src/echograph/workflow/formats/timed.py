"""Formats with times: Chakra traces and their ASTRA-sim files, the Chrome trace of a simulation, SimAI text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from echograph.errors import PlanError, UsageError
from echograph.ir.chakra.writer import ChakraExport, write_chakra
from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.progress import Progress, silent
from echograph.simulator.clusters import DEFAULT_CLUSTER, Cluster
from echograph.simulator.clusters.fabric import Protocols
from echograph.simulator.durations import durations
from echograph.units import GB, GIB, format_time, to_ps, to_s
from echograph.workflow.plan import Plan
from echograph.workflow.system import System, annotate


def export_chakra(
    graph: Graph,
    output: Path,
    *,
    cluster: str = DEFAULT_CLUSTER,
    per_role: bool = False,
    name: str = "",
    progress: Progress = silent,
) -> ChakraExport:
    """Writes the traces of a job, and the configuration of ASTRA-sim for the cluster that it runs on.

    Durations are those of `echosim run`: those that the graph has, else estimated ones.

    Args:
        graph: the job.
        output: the folder.
        cluster: where the job runs.
        per_role: one file a role of the job instead of one a rank.
        name: name of the files; "" takes the model's.
        progress: told what goes on.

    Raises:
        UsageError: the graph is a step graph.
        PlanError: the job is too large to be written out, or does not fill the cluster's NVLink domains.
    """
    job = job_of(graph)
    system = System(cluster)
    where, device = system.cluster, system.device
    progress("estimating durations")
    timed = system.annotate(job)
    times = None if where.degraded else durations(timed, where).picoseconds
    done = write_chakra(
        timed,
        output,
        device=where.device,
        name=name,
        per_role=per_role,
        progress=progress,
        communication_ps=times,
        beside=astra_sim_files(
            where,
            job.world_size,
            peak_flops_per_s=system.peak_flops_per_s(job),
            memory_bytes_per_s=0.0 if device is None else device.datasheet.memory_bandwidth_bytes_per_s,
        ),
    )
    progress("simulating, to say what a reader of the traces will make of them")
    expected = None if done.one_at_a_time_ps is None else _expected(timed, system, done.one_at_a_time_ps)
    gap = () if expected is None else (_gap(expected),)
    return replace(done, notes=(*done.notes, *_lost(where, output), *gap), expected=expected)


def job_of(graph: Graph) -> JobGraph:
    """The graph as a job, for formats that say what every rank executes.

    Raises:
        UsageError: it is a step graph.
    """
    if isinstance(graph, JobGraph):
        return graph
    raise UsageError(
        f"{graph.name or 'it'} is a step graph, and the format is of jobs: spread it first, "
        "as echoc lower graph.pb --gpus 8 -o job.pb"
    )


def _expected(job: JobGraph, system: System, serial_ps: int) -> dict[str, float]:
    """Seconds of the step: as `echosim` says, without the time of the host, and one communication at a time."""
    from echograph.simulator.host import IssueTimes
    from echograph.simulator.simulate import simulate

    step, free = (
        simulate(job, system.cluster, host, memory=False).step_ps
        for host in (system.host, IssueTimes(op_ps=0, launch_ps=0))
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


# -- ASTRA-sim's files ----------------------------------------------------------------------------------------
# A cluster as ASTRA-sim 2 is told of one: its system, network and memory files.
#
# Its analytical network has dimensions, the innermost first: here the NVLink domain, then the levels of the
# network that a job of this size climbs to. A dimension has one bandwidth and one latency: here the highest
# and the lowest that a protocol of the fabric reaches, so that large and small messages take what they
# should, and those in between somewhat less. Keys and units are those of ASTRA-sim's example inputs; its
# network's GB/s are 2^30 bytes.


NETWORK, SYSTEM, MEMORY = "astra_network.yml", "astra_system.json", "astra_memory.json"

SWITCH_LINKS = 2
"""A message over a dimension of the kind Switch pays the latency of the link up and of the link down."""

PIECES = 4
"""A collective over several dimensions is cut up, so that its pieces are on different ones at a time."""

IMPLEMENTATIONS = {
    "all-reduce": "ring",
    "all-gather": "ring",
    "reduce-scatter": "ring",
    # To one peer after the other: a ring of them would pass everything on through all ranks between.
    "all-to-all": "direct1",
}
_TERA, _NS_PER_S = 1e12, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A dimension of ASTRA-sim's network.

    Attributes:
        name: for people.
        ranks: ranks along the dimension.
        bytes_per_s: bandwidth of a rank in one direction, bytes per second.
        latency_s: latency of a message, seconds.
    """

    name: str
    ranks: int
    bytes_per_s: float
    latency_s: float


def dimensions(cluster: Cluster, ranks: int) -> tuple[Dimension, ...]:
    """The network of the first ranks of a cluster, the innermost dimension first; their product is the ranks.

    Raises:
        PlanError: the ranks are more than the cluster has, or fill the last NVLink domain in part.
    """
    domain = min(cluster.domain_gpus, ranks)
    if ranks > cluster.max_gpus:
        raise PlanError(f"{ranks} ranks: cluster {cluster.name} has at most {cluster.max_gpus}")
    if ranks % domain:
        raise PlanError(
            f"{ranks} ranks fill NVLink domains of {domain} in part, which ASTRA-sim's network cannot: "
            f"use {ranks // domain * domain} or {-(-ranks // domain) * domain}, or export without --cluster"
        )
    node, network = cluster.node_fabric, cluster.network
    hop, share = _best(node.protocols)
    rate = node.bytes_per_s(domain) * share
    found, inside = [Dimension(name="domain", ranks=domain, bytes_per_s=rate, latency_s=hop)], domain
    between, share = _best(network.fabric.protocols)
    rate = cluster.gpu_network_bytes_per_s * share
    latency = max(hop, between * network.fabric.ring_hop_share)
    for level in network.crossed(ranks):
        rate, latency = rate / level.oversubscription, latency + level.hop_s
        below = min(level.gpus, ranks)
        # A level that its groups do not divide evenly is part of the one above it.
        if below == inside or below % inside or ranks % below:
            continue
        found.append(Dimension(name=level.name, ranks=below // inside, bytes_per_s=rate, latency_s=latency))
        inside = below
    return tuple(found)


def _best(protocols: Protocols) -> tuple[float, float]:
    """The lowest latency of a step and the highest share of the bandwidth."""
    every = (protocols.ll, protocols.ll128, protocols.simple)
    return min(cost.hop_s for cost in every), max(cost.efficiency for cost in every)


def astra_sim_files(
    cluster: Cluster, ranks: int, *, peak_flops_per_s: float = 0.0, memory_bytes_per_s: float = 0.0
) -> dict[str, str]:
    """The configuration of ASTRA-sim, by file name.

    Args:
        cluster: the cluster.
        ranks: number of ranks of the job.
        peak_flops_per_s: peak of the device, for the roofline that a user may switch on; 0 where unknown.
        memory_bytes_per_s: bandwidth of the device's memory, for the roofline too; 0 where unknown.

    Raises:
        PlanError: as `dimensions`.
    """
    found = dimensions(cluster, ranks)
    system = {
        "scheduling-policy": "FIFO",
        "endpoint-delay": 1,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": PIECES if len(found) > 1 else 1,
        **{f"{kind}-implementation": [name] * len(found) for kind, name in IMPLEMENTATIONS.items()},
        "collective-optimization": "localBWAware",
        "local-mem-bw": memory_bytes_per_s / GB,
        "peak-perf": peak_flops_per_s / _TERA,
        "boost-mode": 0,
        "roofline-enabled": 0,
    }
    return {
        NETWORK: _network(cluster, found),
        SYSTEM: json.dumps(system, indent=2) + "\n",
        MEMORY: json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}, indent=2) + "\n",
    }


def _network(cluster: Cluster, found: tuple[Dimension, ...]) -> str:
    def row(key: str, values: list[str], comment: str) -> str:
        return f"{key}: [ {', '.join(values)} ]  # {comment}\n"

    names = ", ".join(dimension.name for dimension in found)
    latencies = [d.latency_s / SWITCH_LINKS * _NS_PER_S for d in found]
    return "".join(
        (
            f"# {cluster.name}: {names}\n",
            row("topology", ["Switch"] * len(found), "innermost first"),
            row("npus_count", [str(d.ranks) for d in found], "ranks along each"),
            row("bandwidth", [f"{d.bytes_per_s / GIB:.7g}" for d in found], "2^30 bytes a second of a rank"),
            row(
                "latency",
                [f"{latency:.7g}" for latency in latencies],
                "ns of a link; a message takes two",
            ),
        )
    )


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
