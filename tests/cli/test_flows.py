"""`echosim run` at flow level: shared and degraded links, and the timelines of chosen ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WHERE = ("--gpus", 16, "--tp", 2, "--pp", 2)
SLOW = ("--cluster", "ethernet-100g", "--set", "cluster.network.nic_GBps=0.05", "--network", "flows")


@pytest.fixture
def run(cli, graph: Path):
    """`run("--network", "flows")`: the record of a prediction."""

    def predict(*options: object) -> dict[str, Any]:
        return cli("echosim", "run", graph, *WHERE, *options, "--json").json()

    return predict


def test_flows_say_what_links_carry(run) -> None:
    usual, shared = run(), run("--network", "flows")
    assert (usual["simulation"]["network"], shared["simulation"]["network"]) == ("closed-form", "flows")
    assert "links" not in usual
    assert shared["simulation"]["engine"] == "static"  # no link is ever asked for more than it bears
    assert run("--network", "flows", "--engine", "events")["step_time_s"] == shared["step_time_s"]
    assert shared["simulation"]["ranks"] == 16
    assert shared["step_time_s"] == usual["step_time_s"]
    used = [link["utilisation"] for link in shared["links"]]
    assert used == sorted(used, reverse=True)
    assert 0 < len(used) <= 5
    assert all(0 < share <= 1 for share in used)


def test_links_that_all_want_slow_the_step(run) -> None:
    """Eight GPUs a node behind one slow NIC."""
    shared = run(*SLOW)
    assert shared["simulation"]["engine"] == "events"
    assert shared["links"][0]["utilisation"] > 0.3
    assert "nic" in shared["links"][0]["name"]
    assert shared["step_time_s"] > run("--cluster", "ethernet-100g")["step_time_s"]


def test_a_degraded_link_makes_flows_of_every_rank_and_says_so(run, cli, graph: Path) -> None:
    usual = run()
    worse = run("--degrade", "node 1 nic 3=0.001", "--degrade", "node 0 compute=0.5")
    assert worse["step_time_s"] > usual["step_time_s"]
    assert worse["simulation"]["network"] == "flows"
    assert worse["degraded"] == ["node 1 nic 3 at 0.1%", "node 0 computes at 50%"]
    assert worse["ranks"]["end_s"]["max"] == worse["step_time_s"]
    text = cli("echosim", "run", graph, *WHERE, "--degrade", "node 1 nic 3=0.001").out
    assert "degraded      node 1 nic 3 at 0.1%: every rank simulated" in text
    assert "network       flows over links; used most:\n                node 1 nic 3 " in text
    assert "engine events" in text


def test_flows_and_noise_and_stragglers(run) -> None:
    noisy = (*SLOW, "--jitter", 0.1, "--draws", 3, "--straggler", "5=3", "--ranks", "all")
    one, two = run(*noisy), run(*noisy)
    for record in (one, two):
        record["simulation"].pop("wall_s")
    assert one == two
    assert one["step_time_percentiles_s"]["p99"] >= one["step_time_percentiles_s"]["p50"]
    assert one["simulation"]["engine"] == "events"


def test_forced_events_without_flows_give_the_same_step(run) -> None:
    forced = run("--engine", "events", "--straggler", "5=3")
    assert forced["simulation"]["engine"] == "events"
    assert forced["simulation"]["network"] == "closed-form"
    assert forced["step_time_s"] == run("--straggler", "5=3")["step_time_s"]


@pytest.mark.parametrize("options", [(), ("--network", "flows"), ("--straggler", "9=2")])
def test_a_trace_of_chosen_ranks(cli, graph: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    path = tmp_path / "trace.json"
    made = cli(
        "echosim", "run", graph, *WHERE, *options, "--trace", path, "--trace-ranks", "0, 9", "--json"
    ).json()
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 9"}
    ends = [max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (0, 1)]
    assert max(ends) <= made["step_time_s"] * 1e6 * (1 + 1e-9)


def test_a_cluster_file_with_a_degraded_link(cli, graph: Path, tmp_path: Path) -> None:
    from echograph.simulator.clusters import PRESETS

    path = tmp_path / "worse.toml"
    entry = '\n[[degraded]]\nlink = "node 0 nic 1 out"\nbandwidth = 0.5\n'
    path.write_text((PRESETS / "dgx-h100.toml").read_text() + entry)
    record = cli("echosim", "run", graph, *WHERE, "--cluster", path, "--json").json()
    assert record["degraded"] == ["node 0 nic 1 out at 50%"]
    refused = cli("echosim", "run", graph, *WHERE, "--cluster", path, "--network", "closed-form")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "'node 0 nic 1 out' is degraded" in refused.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--network", "flow"), "did you mean 'flows'"),
        (("--network", "flows", "--engine", "static"), "static"),
        (("--network", "flows", "--engine", "reference"), "reference"),
        (("--degrade", "node 1 nic 3"), "LINK=FACTOR"),
        (("--degrade", "node 1 nic 3=2"), "from 1e-06 to 1"),
        (("--degrade", "node 2 nic 3=0.5"), "there is node 0 to 1"),
        (("--degrade", "node 1 nic 8=0.5"), "node 1 nic 7"),
        (("--degrade", "nodes 1=0.5"), "node 0 to 1"),
        (("--degrade", "node 2 compute=0.5"), "there is node 0 to 1"),
        (("--degrade", "node 0 nic 0=0.5", "--network", "closed-form"), "choose flows"),
        (("--trace-ranks", "0"), "--trace"),
        (("--trace-ranks", "x", "--trace", "t.json"), "as 0,17"),
        (("--trace-ranks", "99", "--trace", "t.json"), "from 0 to 15"),
        (("--trace-ranks", ",".join(map(str, range(65))), "--trace", "t.json"), "at most 64"),
    ],
)
def test_a_wrong_question_is_one_line(
    cli, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli("echosim", "run", graph, *WHERE, *options)
    assert outcome.status in (1, 2)
    assert words in outcome.err
    assert outcome.err.count("\n") == 1
