"""Measures jobs on the bed, fits a fabric to its collectives, and predicts the jobs on it.

A fabric is fitted to collectives that run alone, by the code that `echoprof fit` uses; no job is in any fit, and no
message of a job has a size of the fit.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from jobs import DEVICE, Job, alone
from namespaces import HOSTS, HOSTS_PER_LEAF, Bed

from echograph.profiler.fit.collectives import CollectiveRow, Kind
from echograph.profiler.fit.fabric import FabricFit, fit_fabric
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.collectives.calibrate import LIMITS, Calibration
from echograph.simulator.host import Host
from echograph.simulator.simulate import simulate

WORKER = Path(__file__).with_name("worker.py")
PORT = 29_400
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "send_recv")
SIZES = (384 << 10, 1_500_000, 6_000_000)
WARM_UP = 1
REPEATS = 5
LONGEST_S = 120.0


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
                self._bed.command(rank, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
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


class Links(NamedTuple):
    """The rates of a bed, bits a second; no uplink: it is never the bottleneck."""

    nic: float
    uplink: float | None = None


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


def fit(folder: Path, links: Links, measured: Sequence[CollectiveRow]) -> tuple[Cluster, FabricFit]:
    """A cluster whose network and ring are fitted to collectives, and the fit.

    gloo's all-reduce and all-gather are rings, and its messages sends, so the formulas are those of the simulator with
    one rank a node. Fitted are a ring's latencies and efficiency, its `fill`, and the same of messages.
    """
    documents = {"node": _node(), "network": _network()}
    base = _cluster(folder, links, documents)

    def parts(values: Mapping[str, float]) -> tuple[Calibration, dict[str, float]]:
        network = Calibration(base, "network", documents["network"], measured, ("protocols.LL",))
        of = {name: {k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(name)} for name in documents}
        cluster = network.cluster({**network.start(), **of["network"]})
        fixed = ("levels", "protocols", "peer")
        return Calibration(cluster, "node", documents["node"], measured, fixed), of["node"]

    def predict(values: Mapping[str, float]) -> np.ndarray:
        node, its = parts(values)
        return node.predict({**node.start(), **its})

    network = Calibration(base, "network", documents["network"], measured, ("protocols.LL",)).start()
    start = {f"network.{name}": value for name, value in network.items()}
    start |= {f"node.{name}": value for name, value in parts(start)[0].start().items()}
    made = fit_fabric(measured, predict, start, upper=LIMITS)
    node, its = parts(made.parameters)
    return node.cluster({**node.start(), **its}), made


def predicted_seconds(job: Job, cluster: Cluster) -> float:
    """What the simulator says of a job's step."""
    return simulate(job.graph(), cluster, Host(op_ps=0, launch_ps=0), memory=False).step_ps / 1e12


def _cluster(folder: Path, links: Links, documents: Mapping[str, Any]) -> Cluster:
    for name, content in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    above = 1.0 if links.uplink is None else max(1.0, HOSTS_PER_LEAF * links.nic / links.uplink)
    path = folder / "bed.toml"
    path.write_text(
        f"""max_gpus = {HOSTS}
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
nic_GBps = {links.nic / 8e9}
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
oversubscription = {above}
"""
    )
    return load_cluster(path)


def _about() -> dict[str, Any]:
    return {"origin": "fitted", "source": "collectives alone on the test bed", "date": "", "assumed_error": 0.1}


def _cost(base: float, hop: float, efficiency: float) -> dict[str, float]:
    return {"base_us": base, "hop_us": hop, "efficiency": efficiency}


def _node() -> dict[str, Any]:
    """A host of one rank: nothing happens inside; `fill` is the ring's."""
    free = _cost(0, 0, 1)
    return {
        "about": _about(),
        "kind": "node",
        "levels": [{"ranks": 2, "bandwidth_GBps": 1000}],
        "fill": 0.5,
        "protocols": {"LL": free, "LL128": free, "Simple": free},
        "peer": {"LL": free, "Simple": free, "bandwidth_GBps": 1000, "local_share": 0},
        "nvls": None,
    }


def _network() -> dict[str, Any]:
    """gloo knows one protocol and no tree: the others are priced out of the choice."""
    never = _cost(900_000, 900_000, 0.001)
    return {
        "about": _about(),
        "kind": "network",
        "protocols": {"LL": never, "LL128": never, "Simple": _cost(500, 500, 0.95)},
        "tree_efficiency": 0.001,
        "ring_hop_share": 1,
        "two_domain_volume": 2,
        "nvls_tree": None,
        "pat": False,
        "peer": _cost(500, 500, 0.95),
    }
