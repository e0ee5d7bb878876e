"""Steps of real jobs on shaped links, held against what the simulator says of the same jobs."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from configurations import CONFIGURATIONS, Configuration, Links
from jobs import Job, alike, ddp, fsdp, pipeline
from measure import SIZES, cluster, fabric_to_start_from, outcomes, predict
from namespaces import HOSTS, Bed, why_not

MEAN_ERROR = 0.08


@pytest.fixture(scope="module")
def possible() -> None:
    if reason := why_not():
        pytest.skip(f"no test bed here: {reason}")


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"echo-{os.getpid()}-")]


@pytest.mark.slow
def test_a_bed_leaves_nothing_behind(possible: None) -> None:
    with pytest.raises(RuntimeError, match="in between"), Bed() as bed:
        bed.shape(200e6, 100e6)
        folder = bed.folder
        assert len(namespaces()) == HOSTS + 1
        ping = bed.command(0, "ip", "route", "get", bed.address(HOSTS - 1))
        assert "eth0" in subprocess.run(ping, capture_output=True, text=True, check=True).stdout
        raise RuntimeError("in between")
    assert namespaces() == []
    assert not folder.exists()


@pytest.mark.slow
def test_real_steps_take_what_the_simulator_says(possible: None) -> None:
    found = []
    for one in outcomes(CONFIGURATIONS):
        print(f"{one.configuration.name}: {one.measured:.4f} s, predicted {one.predicted:.4f} s, {one.error:+.1%}")
        found.append(one)
    assert len(found) == len(CONFIGURATIONS) >= 24
    assert statistics.mean(abs(one.error) for one in found) <= MEAN_ERROR


def test_no_job_has_a_message_that_a_fit_has_seen() -> None:
    fitted = {size // (4 * ranks) * 4 * ranks for size in SIZES for ranks in (4, HOSTS)}
    said = [what for c in CONFIGURATIONS for rank in range(c.job.ranks) for what in c.job.program(rank)]
    assert fitted.isdisjoint({what["bytes"] for what in said if "bytes" in what})


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.name)
def test_what_the_ranks_run_is_what_the_graph_holds(configuration: Configuration) -> None:
    """The two readings of a job agree on who communicates what, and its messages have two ends."""
    job, graph = configuration.job, configuration.job.graph()
    ends: Counter[tuple[object, ...]] = Counter()
    for rank in range(job.ranks):
        said = job.program(rank)
        shares = [
            program
            for program in graph.programs
            if all(job.coordinates(rank)[axis] == place for axis, place in program.coordinates.items())
        ]
        assert len(shares) == 1
        begin, end = shares[0].calls[0, 1:3].tolist()
        held = [int(graph.ops.nbytes[row]) for row in range(begin, end) if graph.ops.group[row] >= 0]
        assert held == [what["bytes"] for what in said if "bytes" in what]
        assert sorted(w["handle"] for w in said if w["do"] == "wait") == sorted(
            w["handle"] for w in said if "bytes" in w
        )
        for what in said:
            if what["do"] in ("send", "recv"):
                here, there = rank, what["ranks"][what["peer"]]
                pair = (here, there) if what["do"] == "send" else (there, here)
                ends[(*pair, what["communicator"], what["bytes"])] += 1 if what["do"] == "send" else -1
    assert set(ends.values()) <= {0}


def seconds(job: Job, folder: Path, bits_per_s: float) -> float:
    """By the simulator, over links of a rate that have no latency and lose nothing."""
    ideal = fabric_to_start_from()
    for cost in (ideal.network["protocols"]["Simple"], ideal.network["peer"]):
        cost |= {"base_us": 0, "hop_us": 0, "efficiency": 1}
    bed = cluster(folder, Links(bits_per_s), ideal._replace(node={**ideal.node, "fill": 0}))
    assert predict(job, bed, "flows") == pytest.approx(predict(job, bed, "closed-form"))
    return predict(job, bed, "closed-form")


def test_a_pipeline_without_messages_has_its_bubble(tmp_path: Path) -> None:
    job = pipeline(4, 1, micro_batches=6, forward_s=0.1, backward_s=0.2, nbytes=4)
    assert seconds(job, tmp_path, 1e15) == pytest.approx((6 + 4 - 1) * 0.3)


def test_a_gradient_is_hidden_but_for_what_backward_is_too_short_for(tmp_path: Path) -> None:
    bucket = 2 * 3 / 4 * 1e6 / 1e7
    job = alike(4, ddp(0.1, 0.2, [1_000_000] * 4, ("dp",)))
    assert seconds(job, tmp_path, 8e7) == pytest.approx(0.1 + 0.05 + 4 * bucket)
    assert seconds(job, tmp_path, 8e10) == pytest.approx(0.1 + 0.2 + bucket / 1000)


def test_a_fully_sharded_step_hides_all_but_first_gathers_and_last_reduction(tmp_path: Path) -> None:
    job = alike(4, fsdp(0.0, 0.0, 5, 1_000_000, ("dp",)))
    assert seconds(job, tmp_path, 8e7) == pytest.approx(5 * (1 + 1 + 2) * 3 / 4 * 1e6 / 1e7)
    shown = (1 + 1 + 2) * 3 / 4 * 1e6 / 1e8
    job = alike(4, fsdp(0.5, 1.0, 5, 1_000_000, ("dp",)))
    assert seconds(job, tmp_path, 8e8) == pytest.approx(1.5 + shown)
