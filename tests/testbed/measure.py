"""Measures jobs on the bed, fits a fabric to its collectives, and predicts the jobs on it.

A fabric is fitted to collectives that run alone, by the code that `echoprof fit` uses; no job is in any fit, and
no message of a job has a size of the fit.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from configurations import Configuration, Links
from jobs import DEVICE, Job, alone
from namespaces import HOSTS, HOSTS_PER_LEAF, Bed

from echograph.profiler.fit.fabric import CollectiveRow, TimedCollective, fit_fabric
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.collectives.calibrate import LIMITS, Calibration
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import Scale
from echograph.simulator.simulate import simulate
from echograph.units import to_s

WORKER = Path(__file__).with_name("worker.py")
PORT = 29_400
KINDS: tuple[TimedCollective, ...] = ("all_reduce", "all_gather", "send_recv")
SIZES = (384 << 10, 1_500_000, 6_000_000)
WARM_UP = 1
REPEATS = 5
DOUBTFUL = 0.15
LONGEST_S = 120.0
# Of the fabrics' numbers, those that gloo gives no meaning or the bed does not show.
NETWORK_HELD = ("protocols.LL",)
NODE_HELD = ("levels", "protocols", "peer")
CLUSTER = f"""max_gpus = {HOSTS}
[node]
device = "{DEVICE}"
memory_GiB = 1
gpus = 1
nvlink_domain = 1
nvlink_GBps = 0
pcie_GBps = 100
nvls = false
fabric = "node.json"
[network]
nics_per_node = 1
nic_GBps = {{nic_GBps}}
rails = 1
fabric = "network.json"
[[network.level]]
name = "leaf"
gpus = {HOSTS_PER_LEAF}
hop_us = 0
oversubscription = 1
[[network.level]]
name = "spine"
gpus = {HOSTS}
hop_us = 0
oversubscription = {{oversubscription}}
"""


class Fabric(NamedTuple):
    """Documents of a node's and a network's fabric, and the fit's mean error by collective."""

    node: dict[str, Any]
    network: dict[str, Any]
    errors: dict[str, float]


class Ranks:
    """The processes of a bed, one a host; a context manager."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Ranks:
        try:
            for rank in range(HOSTS):
                self._processes.append(self._start(rank))
            for rank in range(HOSTS):
                self._answer(rank)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def seconds(self, job: Job, repeats: int = REPEATS) -> list[float]:
        """How long each of several steps took, from the common start to the end of the last rank."""
        for rank in range(job.ranks):
            asked = {"program": job.program(rank), "ranks": list(range(job.ranks)), "steps": WARM_UP + repeats}
            stream = self._processes[rank].stdin
            assert stream is not None
            stream.write(json.dumps(asked) + "\n")
            stream.flush()
        of_ranks = [self._answer(rank) for rank in range(job.ranks)]
        return [max(step) for step in zip(*of_ranks, strict=True)][WARM_UP:]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        arguments = [sys.executable, str(WORKER), str(rank), str(HOSTS), self._bed.address(0), str(PORT)]
        with self._log(rank).open("w") as log:
            return subprocess.Popen(
                self._bed.command(rank, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _log(self, rank: int) -> Path:
        return self._bed.folder / f"rank{rank}.log"

    def _answer(self, rank: int) -> Any:
        stream = self._processes[rank].stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], LONGEST_S)
        line = stream.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"said nothing for {LONGEST_S:.0f} s"
            raise RuntimeError(f"rank {rank} {what}: {self._log(rank).read_text()[-2000:]}")
        return json.loads(line)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def rows(ranks: Ranks, sizes_of_groups: Sequence[int]) -> list[CollectiveRow]:
    """Collectives alone on the bed as it is shaped now: medians over the repeats."""
    return [
        CollectiveRow(
            kind=kind,
            ranks=count,
            nodes=count,
            size_bytes=nbytes,
            seconds=statistics.median(ranks.seconds(alone(kind, count, nbytes))),
        )
        for count in sizes_of_groups
        for kind in KINDS
        for nbytes in (size // (4 * count) * 4 * count for size in SIZES)
    ]


def fit(folder: Path, nic_bits_per_s: float, measured: Sequence[CollectiveRow]) -> Fabric:
    """Fits what the simulator's ring and send leave open, with one rank a node, to collectives of one rate.

    gloo's all-reduce and all-gather are rings. Fitted are the latencies, the efficiency and the `fill` of a ring,
    and the latency and efficiency of a message.
    """
    start = fabric_to_start_from()
    bed = cluster(folder, Links(nic_bits_per_s), start)
    network = Calibration(bed, "network", start.network, measured, NETWORK_HELD)

    def ring(values: Mapping[str, float]) -> Calibration:
        return Calibration(network.cluster(_below("network", values)), "node", start.node, measured, NODE_HELD)

    first = {f"network.{name}": value for name, value in network.start().items()}
    first |= {f"node.{name}": value for name, value in ring(first).start().items()}
    made = fit_fabric(measured, lambda values: ring(values).predict(_below("node", values)), first, upper=LIMITS)
    return Fabric(
        node=ring(made.parameters).document(_below("node", made.parameters)),
        network=network.document(_below("network", made.parameters)),
        errors=made.error,
    )


def _below(name: str, values: Mapping[str, float]) -> dict[str, float]:
    return {path.removeprefix(f"{name}."): value for path, value in values.items() if path.startswith(f"{name}.")}


def cluster(folder: Path, links: Links, fabric: Fabric) -> Cluster:
    """The bed as a cluster file describes it: hosts of one rank, two leaves, one uplink."""
    for name, content in (("node", fabric.node), ("network", fabric.network)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    above = 1.0 if links.uplink is None else HOSTS_PER_LEAF * links.nic / links.uplink
    path = folder / "bed.toml"
    path.write_text(CLUSTER.format(nic_GBps=links.nic / 8e9, oversubscription=above))
    return load_cluster(path)


def predict(job: Job, bed: Cluster, network: str, scales: Sequence[Scale] = ()) -> float:
    """Seconds of a job's step by the simulator: in "closed-form", or as "flows" that share links."""
    host = IssueTimes(op_ps=0, launch_ps=0)
    return to_s(simulate(job.graph(), bed, host, network=network, scales=scales, memory=False).step_ps)


class Outcome(NamedTuple):
    """A configuration, measured and predicted.

    Attributes:
        configuration: what ran.
        fabric: what the prediction rests on.
        measured: seconds of a step, median of the repeats.
        least: of the repeats.
        most: of the repeats.
        predicted: seconds, with flows that share links.
        closed_form: seconds, with collectives that take what their formula says, whatever else runs.
        free: seconds, were communications free: how much the bed asks of a prediction.
        again: whether it was measured a second time.
    """

    configuration: Configuration
    fabric: Fabric
    measured: float
    least: float
    most: float
    predicted: float
    closed_form: float
    free: float
    again: bool

    @property
    def error(self) -> float:
        """Of the prediction with flows, relative to what was measured."""
        return self.predicted / self.measured - 1


def outcomes(configurations: Sequence[Configuration]) -> Iterator[Outcome]:
    """Measures and predicts on one bed: the fabric of each rate first, then the configurations of that rate.

    A step that is off by more than `DOUBTFUL` is measured a second time, which then counts, better or worse: the
    machine may have been at something else.
    """
    with Bed() as bed, Ranks(bed) as ranks:
        for nic in sorted({configuration.links.nic for configuration in configurations}):
            here = [configuration for configuration in configurations if configuration.links.nic == nic]
            bed.shape(nic)
            fabric = fit(bed.folder, nic, rows(ranks, sorted({4, *(c.job.ranks for c in here)})))
            for configuration in here:
                bed.shape(*configuration.links)
                yield _outcome(ranks, configuration, fabric, cluster(bed.folder, configuration.links, fabric))


def _outcome(ranks: Ranks, configuration: Configuration, fabric: Fabric, bed: Cluster) -> Outcome:
    job = configuration.job
    predicted = predict(job, bed, "flows")
    seconds = ranks.seconds(job)
    if again := abs(predicted / statistics.median(seconds) - 1) > DOUBTFUL:
        seconds = ranks.seconds(job)
    return Outcome(
        configuration=configuration,
        fabric=fabric,
        measured=statistics.median(seconds),
        least=min(seconds),
        most=max(seconds),
        predicted=predicted,
        closed_form=predict(job, bed, "closed-form"),
        free=predict(job, bed, "closed-form", (Scale(selector="comm", factor=0.0),)),
        again=again,
    )


def fabric_to_start_from() -> Fabric:
    """A host of one rank, inside which nothing happens, and a network whose every choice is gloo's.

    gloo knows one protocol and no tree, so the others are priced out of the simulator's choice.
    """
    about = {"origin": "fitted", "source": "collectives alone on the test bed", "date": "", "assumed_error": 0.1}
    free, never, usual = _cost(0, 0, 1), _cost(900_000, 900_000, 0.001), _cost(500, 500, 0.95)
    node = {
        "about": about,
        "kind": "node",
        "link": {"kind": "pcie", "bandwidth_GBps": 100},
        "levels": [{"ranks": 2, "bandwidth_GBps": 1e6}],
        "fill": 0.5,
        "protocols": {"LL": free, "LL128": free, "Simple": free},
        "peer": {"LL": free, "Simple": free, "bandwidth_GBps": 1e6, "local_share": 0},
        "nvls": None,
    }
    network = {
        "about": about,
        "kind": "network",
        "protocols": {"LL": never, "LL128": never, "Simple": usual},
        "tree_efficiency": 0.001,
        "ring_hop_share": 1,
        "two_domain_volume": 2,
        "nvls_tree": None,
        "pat": False,
        "peer": dict(usual),
    }
    return Fabric(node=node, network=network, errors={})


def _cost(base_us: float, hop_us: float, efficiency: float) -> dict[str, float]:
    return {"base_us": base_us, "hop_us": hop_us, "efficiency": efficiency}
