"""Several jobs on one system: where they are placed, and what the command says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import echograph as eg
from echograph.cli.echosim import app
from echograph.errors import PlanError, UsageError
from echograph.simulator.clusters import load_cluster
from echograph.workflow.jobs import place_jobs

CLUSTER = load_cluster("dgx-h100")
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@given(sizes=SIZES, place=st.sampled_from(["packed", "interleaved"]))
def test_jobs_have_gpus_of_their_own_and_no_node_together(sizes: list[int], place: str) -> None:
    placed = place_jobs([place], sizes, CLUSTER)
    assert [len(gpus) for gpus in placed] == sizes
    nodes = [set((gpus // 8).tolist()) for gpus in placed]
    assert sum(map(len, nodes)) == len(set().union(*nodes)) == sum(-(-size // 8) for size in sizes)


def test_places() -> None:
    def first(*place: str) -> list[list[int]]:
        return [(gpus[::8] // 8).tolist() for gpus in place_jobs(place, [16, 24], CLUSTER)]

    assert first("packed") == first() == [[0, 1], [2, 3, 4]]
    assert first("interleaved") == [[0, 2], [1, 3, 4]]
    assert first("0,4", "1-3") == [[0, 4], [1, 2, 3]]
    (gpus,) = place_jobs(["gpus:3,8-10"], [4], CLUSTER)
    assert gpus.tolist() == [3, 8, 9, 10]


@pytest.mark.parametrize(
    ("place", "sizes", "said"),
    [
        (["spread"], [8], "give packed, interleaved, or nodes of each job"),
        (["3-1"], [8], "give packed, interleaved, or nodes of each job"),
        (["0", "1", "2"], [8, 8], "3 given for 2 jobs"),
        (["0-1"], [24], "that is 16 GPUs for a job of 24"),
        (["0-3"], [24], "that is 32 GPUs for a job of 24"),
        (["gpus:0-9"], [8], "that is 10 GPUs for a job of 8"),
    ],
)
def test_places_that_cannot_be(place: list[str], sizes: list[int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place_jobs(place, sizes, CLUSTER)


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(PlanError, match="it has"):
        place_jobs(["packed"], [CLUSTER.max_gpus, 8], CLUSTER)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jobs") / "gpt2.pb"
    eg.save(eg.compile("gpt2", batch_size=1, seq_len=128), path)
    return path


SETTINGS = {"network.level.leaf.gpus": "16", "network.level.spine.oversubscription": "8"}
NARROW = [word for key, value in SETTINGS.items() for word in ("--set", f"cluster.{key}={value}")]


def test_the_command_says_what_jobs_lose_to_each_other(graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = ["run", str(graph), str(graph), "--gpus", "16", "--cluster", "dgx-h100", *NARROW, "-o", str(out)]
    apart = CliRunner().invoke(app, [*words, "--place", "0-1", "--place", "2-3", "--json"])
    assert apart.exit_code == 0, apart.output
    record = json.loads(apart.stdout)
    assert record["contended"] == [] and [job["slowdown"] for job in record["jobs"]] == [1.0, 1.0]
    system = eg.System("dgx-h100", settings=SETTINGS)
    job = eg.lower(eg.load(graph), eg.Plan(gpus=16), system)
    alone = eg.simulate(job, system, eg.Scenario(network="flows"))
    assert record["jobs"][0]["step_s"] == alone.step_s
    beside = CliRunner().invoke(app, [*words, "--place", "interleaved"])
    assert beside.exit_code == 0, beside.output
    found = json.loads(out.read_text())
    assert all(job["slowdown"] > 1 for job in found["jobs"])
    assert found["jobs"][0]["placed_on"] == "0-7,16-23"
    assert found["contended"][0]["name"] == "leaf 0 rail 0 up" and "contended: leaf 0 rail 0 up" in beside.stdout


def test_one_job_that_waits_for_its_samples(graph: Path) -> None:
    words = ["run", str(graph), "--gpus", "8", "--read-gib", "1", "--storage-gbps", "1", "--json"]
    (job,) = json.loads(CliRunner().invoke(app, words).stdout)["jobs"]
    assert job["alone_s"] == pytest.approx(2**30 / 1e9) and job["step_s"] < job["alone_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--html", "page.html", "--jitter", "0.1"], "--html, --jitter: not of jobs that share a system"),
        (["--read-gib", "3"], "--read-gib: say how fast the storage is, with --storage-gbps"),
        (["--read-gib", "3", "--read-gib", "1", "--read-gib", "2", "--storage-gbps", "1"], "3 given for 2 jobs"),
        (["--checkpoint-gib", "-1", "--storage-gbps", "1"], "--checkpoint-gib -1.0: give a number from 0"),
        (["--checkpoint-every", "0"], "--checkpoint-every 0: give 1 to 10,000 steps"),
        (["--cluster", "h100-sxm"], "one measured device|cluster"),
    ],
)
def test_what_the_command_refuses(graph: Path, words: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["run", str(graph), str(graph), "--gpus", "8", *words])
    assert found.exit_code != 0
    assert re.search(said, str(found.exception) + found.output), found.output


def test_several_devices_are_needed_and_one_job() -> None:
    with pytest.raises(UsageError, match="no job to run"):
        eg.simulate_jobs([])
    assert np.array_equal(place_jobs(["0"], [3], CLUSTER)[0], [0, 1, 2])
