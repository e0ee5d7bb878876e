"""A training on shaped links, traced on two ranks and predicted on four, held against four real ranks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from configurations import Links
from measure import Ranks, cluster, fit, rows
from namespaces import Bed, why_not

from echograph.profiler.replay import lower
from echograph.profiler.traces import read_traces
from echograph.workflow.replay import StepTime, replay, steps
from echograph.workflow.system import System

WORKER = Path(__file__).with_name("replay_worker.py")
NIC, STEPS, PORT = 400e6, 8, 29_700
REPLAYED, PREDICTED = 0.05, 0.12


def train(bed: Bed, world: int, folder: Path) -> dict[str, list[float]]:
    """Trains on some ranks; the slowest rank's seconds of each step."""
    folder.mkdir()
    started = []
    for rank in range(world):
        arguments = [str(rank), str(world), bed.address(0), str(PORT + world), str(folder), str(STEPS)]
        command = bed.command(rank, "env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, str(WORKER), *arguments)
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said: list[dict[str, list[float]]] = []
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        said.append(json.loads(output.splitlines()[-1]))
    return {what: [max(step) for step in zip(*(rank[what] for rank in said), strict=True)] for what in said[0]}


def of_job(found: Sequence[StepTime]) -> list[StepTime]:
    return [step for step in found if step.name != "trace"]


@pytest.mark.slow
def test_two_ranks_are_replayed_and_say_what_four_take(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"no test bed here: {reason}")
    with Bed() as bed:
        bed.shape(NIC)
        with Ranks(bed) as ranks:
            made = fit(tmp_path, NIC, rows(ranks, [4]))
        cluster(tmp_path, Links(NIC), made)
        two, four = train(bed, 2, tmp_path / "two"), train(bed, 4, tmp_path / "four")
    print(f"two: {two}\nfour: {four}")
    job = lower(read_traces(tmp_path / "two", last_step=True), "two").graph
    result = replay(job)
    again = of_job(steps(result))
    assert len(again) == 2 * STEPS
    assert max(abs(step.error) for step in again) <= REPLAYED
    result = replay(
        job, gpus=4, system=System(tmp_path / "bed.toml", device="h100-sxm")
    )  # computes nothing: all is traced
    predicted = statistics.median(step.replayed_s for step in of_job(steps(result)))
    real = statistics.median(four["profiled"])
    print(f"predicted {predicted:.4f} s, real {real:.4f} s: {predicted / real - 1:+.1%}")
    assert predicted == pytest.approx(real, rel=PREDICTED)
    # It is not what two ranks take: the links have half as much again to carry.
    assert statistics.median(two["profiled"]) < 0.85 * real
