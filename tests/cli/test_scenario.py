"""`echosim run` beyond the plan: what if, every rank, noise, failures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

WHERE = ("--gpus", 16, "--tp", 2, "--pp", 2)


@pytest.fixture
def run(cli, graph: Path):
    """`run("--scale", "comm=2")`: the record of a prediction."""

    def predict(*options: object) -> dict[str, Any]:
        return cli("echosim", "run", graph, *WHERE, *options, "--json").json()

    return predict


def test_what_limits_the_step_adds_up_to_it(run) -> None:
    record = run()
    assert sum(record["limits_s"].values()) == pytest.approx(record["step_time_s"])
    assert list(record["limits_s"].values()) == sorted(record["limits_s"].values(), reverse=True)


@pytest.mark.parametrize("what", ["compute", "host", "comm", "comm.tp", "op:aten.*", "module:*mlp*"])
def test_slower_is_not_faster_and_nothing_scaled_is_nothing_changed(run, what: str) -> None:
    usual = run()["step_time_s"]
    assert run("--scale", f"{what}=1")["step_time_s"] == usual
    assert run("--scale", f"{what}=3")["step_time_s"] >= usual
    assert run("--without", what)["step_time_s"] <= usual


def test_a_small_change_moves_the_step_by_its_share_of_the_critical_path(run) -> None:
    usual, changed = run(), run("--scale", "comm.tp=1.001")
    expected = usual["limits_s"].get("tp communication", 0.0) * 0.001
    assert changed["step_time_s"] - usual["step_time_s"] == pytest.approx(expected, rel=0.05, abs=1e-9)


def test_a_key_of_the_cluster_with_another_value(run) -> None:
    slow = run("--set", "cluster.network.nic_GBps=0.1", "--set", "cluster.network.level.leaf.oversubscription=8")
    assert slow["collectives"]["pp"]["busy_s"] > run()["collectives"]["pp"]["busy_s"]


def test_another_device_in_the_same_cluster(run) -> None:
    other, usual = run("--device", "b200"), run()
    assert (other["cluster"], other["device"]) == (usual["cluster"], "b200")
    assert other["breakdown_s"]["compute"] < usual["breakdown_s"]["compute"]
    assert other["memory"]["capacity_bytes"] > usual["memory"]["capacity_bytes"]
    assert run("--device", "h100-sxm")["memory"] == usual["memory"]


def test_equal_ranks_change_nothing_and_a_slow_one_is_found(run) -> None:
    usual, every = run(), run("--ranks", "all")
    assert every["step_time_s"] == usual["step_time_s"]
    assert every["simulation"]["ranks"] == 16
    slow = run("--straggler", "5=100")
    assert slow["step_time_s"] > usual["step_time_s"]
    assert slow["ranks"]["waited_s"]["max"] > 0
    assert slow["ranks"]["waited_least"][0] == 5
    assert run("--straggler", "node:0=100")["step_time_s"] >= slow["step_time_s"]


def test_noise_is_seeded_and_has_percentiles(run) -> None:
    noisy = ("--jitter", 0.1, "--draws", 9, "--seed", 3)
    one, two = run(*noisy), run(*noisy)
    assert one["step_time_percentiles_s"] == two["step_time_percentiles_s"]
    low, middle, high = (one["step_time_percentiles_s"][k] for k in ("p50", "p95", "p99"))
    assert run()["step_time_s"] < low <= middle <= high
    assert run("--jitter", 0.1, "--seed", 4)["step_time_s"] != one["step_time_s"]


def test_failures_leave_a_goodput(run) -> None:
    failures = run("--node-mtbf-hours", 100, "--checkpoint-s", 30, "--restart-s", 120)["failures"]
    assert 0 < failures["goodput"] < 1
    assert failures["job_mtbf_s"] == 100 * 3600 / 2
    assert failures["checkpoint_interval_s"] == failures["best_checkpoint_interval_s"]


def test_parts_of_the_step_are_one_column_and_times_are_written_out(cli, graph: Path) -> None:
    failing = ("--node-mtbf-hours", 10_000, "--checkpoint-s", 30, "--restart-s", 120)
    shown = cli("echosim", "run", graph, "--gpus", 16, "--zero", 3, "--hsdp-replicas", 2, *failing).out
    body = shown[shown.index("where the step goes") :].splitlines()[1:5]
    assert any("exposed dp_replicate" in line for line in body)
    assert len({line.index("%") for line in body}) == 1
    assert re.search(r"one every 5,000 h, a checkpoint every \d+,\d{3} s ", shown)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scale", "compute"), "WHAT=FACTOR"),
        (("--scale", "compute=-1"), "WHAT=FACTOR"),
        (("--scale", "comm.xx=2"), "comm.tp"),
        (("--scale", "colour:red=2"), "unknown"),
        (("--scale", "op:no.such=2"), "selects nothing"),
        (("--without", "collective:barrier"), "collective:all_reduce"),
        (("--set", "network.nic_GBps=1"), "cluster.KEY=VALUE"),
        (("--set", "cluster.network.nic_GBs=1"), "did you mean 'network.nic_GBps'?"),
        (("--set", "cluster.network.nic_GBps=fast"), "nic_GBps"),
        (("--device", "b2000"), "did you mean 'b200'?"),
        (("--ranks", "some"), "roles or all"),
        (("--straggler", "x=2"), "RANK=FACTOR"),
        (("--straggler", "99=2"), "from 0 to 15"),
        (("--jitter", 2), "from 0 to 0.5"),
        (("--draws", 5), "--jitter"),
        (("--checkpoint-s", 5), "--node-mtbf-hours"),
        (("--node-mtbf-hours", 5), "--checkpoint-s"),
        (("--ranks", "all", "--engine", "reference"), "reference"),
    ],
)
def test_a_wrong_question_is_one_line(cli, graph: Path, options: tuple[object, ...], words: str) -> None:
    outcome = cli("echosim", "run", graph, *WHERE, *options)
    assert outcome.status in (1, 2)
    assert words in outcome.err
    assert outcome.err.count("\n") == 1
