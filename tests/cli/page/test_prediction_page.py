"""The page of a prediction: its numbers are the JSON's, all of it is in one file, and it is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_pages import Page, element, rows

from echograph.units import format_bytes, format_count, format_time

STAGED = ("--gpus", 12, "--tp", 2, "--pp", 3, "--micro-batch", 1, "--global-batch", 8)


def seconds(value: float) -> str:
    return format_time(value * 1e12)


@pytest.fixture(scope="module")
def made(
    session_cli: Callable[..., Any], graph: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], str]:
    """The JSON of a run and its page."""
    folder = tmp_path_factory.mktemp("page")
    files = ("-o", folder / "result.json", "--html", folder / "page.html")
    assert session_cli("echosim", "run", graph, *STAGED, *files).status == 0
    return json.loads((folder / "result.json").read_text()), (folder / "page.html").read_text()


def flat(parts: dict[str, Any]) -> dict[str, float]:
    exposed = {f"exposed {axis}": value for axis, value in parts["exposed_communication"].items()}
    return {**exposed, **{name: parts[name] for name in ("compute", "host", "bubble", "wait")}}


def test_numbers_on_the_page_are_those_of_the_json(made: tuple[dict[str, Any], str]) -> None:
    record, text = made
    assert element(text, "result") == record
    page = Page(text)
    tiles = dict(zip(page.texts("b"), page.texts("span"), strict=False))
    step = record["step_time_s"]
    low, high = map(seconds, record["step_time_interval_s"])
    assert tiles[seconds(step)] == f"step time; 90 % interval {low} to {high}"
    assert tiles[format_count(record["tokens_per_s"])] == "tokens/s"
    assert tiles[format_count(record["samples_per_s"])] == "samples/s"
    assert f"{100 * record['mfu']:.1f} %" in tiles
    assert format_bytes(record["memory"]["device_bytes"]) in tiles

    parts = record["breakdown_s"]
    split = {"compute": parts["compute"], **{f"exposed {k}": v for k, v in parts["exposed_communication"].items()}}
    split |= {name: parts[name] for name in ("host", "bubble", "wait")}
    assert sum(split.values()) == pytest.approx(step)
    shown = [[name, seconds(v), f"{100 * v / step:.1f} %"] for name, v in split.items() if v]
    where = rows(text, "Where the step goes")
    assert [row[:3] for row in where] == shown
    for (name, *_), row in zip(shown, where, strict=True):
        of_ranks = [flat(record[f"breakdown_{which}_s"])[name] for which in ("mean", "least", "most")]
        assert row[3:] == [f"{100 * value / step:.1f} %" for value in of_ranks]
    limits = [
        [name, seconds(v), f"{100 * v / step:.1f} %", seconds(v / 10)] for name, v in record["limits_s"].items()
    ]
    assert rows(text, "What limits the step") == limits
    held = [
        [row["where"], row["role"].replace("_", " "), format_bytes(row["bytes"])]
        for row in record["memory"]["contributors"]
    ]
    assert [row[:3] for row in rows(text, "Memory at the peak")] == held
    calls = [
        [axis, f"{entry['calls']:,}", seconds(entry["busy_s"])] for axis, entry in record["collectives"].items()
    ]
    assert [[row[0], row[1], row[3]] for row in rows(text, "Communication")] == calls


def test_details_agree_with_the_result(made: tuple[dict[str, Any], str]) -> None:
    record, text = made
    details, step = element(text, "details"), record["step_time_s"]
    assert record["breakdown_s"] in [role["breakdown_s"] for role in details["roles"]]
    for role in details["roles"]:
        assert sum(role["compute_s"].values()) == pytest.approx(role["breakdown_s"]["compute"])
    path = details["critical_path"]
    listed = [*path["operations"], *path["collectives"]]
    assert sum(row["on_path_s"] for row in listed) + path["rest_s"] == pytest.approx(step)
    # What is listed of a kind cannot be more than the kind is on the path.
    for axis in ("tp", "pp"):
        of_axis = sum(row["on_path_s"] for row in path["collectives"] if row["group"] == axis)
        assert of_axis <= record["limits_s"][f"{axis} communication"] * (1 + 1e-9)
    shown = [[row["module"], seconds(row["on_path_s"])] for row in path["operations"]]
    assert [[row[0], row[2]] for row in rows(text, "On the critical path")] == shown
    assert {row["source"] for row in path["operations"]} <= {"fitted", "analytical"}
    assert all(row["source"] and row["ranks"] in (2, 3) for row in path["collectives"])
    assumed = {part["part"]: part["basis"] for part in details["assumptions"]}
    assert assumed["ranks"] == "assumed"
    assert assumed["overlap"] == "left out"


def test_the_lanes_cover_the_step(made: tuple[dict[str, Any], str]) -> None:
    record, text = made
    found = element(text, "lanes")
    lanes = {lane["label"]: lane for lane in found["lanes"] if not lane["detail"]}
    assert list(lanes) == ["critical path", "stage 0", "stage 1", "stage 2"]
    step_ns = record["step_time_s"] * 1e9
    assert found["span"] == pytest.approx(step_ns, abs=1)
    for lane in lanes.values():
        start = np.cumsum(lane["start"])
        end = start + lane["dur"]
        assert start[0] == 0
        assert end[-1] == pytest.approx(step_ns, abs=1)
        assert (np.abs(start[1:] - end[:-1]) <= 1).all()
        assert len(lane["filled"]) == len(lane["under"]) == len(start)
    names = {found["names"][code] for code in lanes["stage 1"]["name"]}
    assert {f"forward, micro-batch {n}" for n in range(4)} <= names
    assert {"bubble", "optimizer"} <= names
    streams = [lane for lane in found["lanes"] if lane["detail"]]
    assert {lane["head"] for lane in streams} == {f"stage {n}: streams" for n in range(3)}
    assert {"host", "compute", "comm.tp"} <= {lane["label"] for lane in streams}


def test_a_page_is_one_file_that_loads_nothing(made: tuple[dict[str, Any], str]) -> None:
    page = Page(made[1])
    assert not page.all("link")
    assert all("src" not in attributes for tag in ("script", "img", "iframe") for attributes in page.all(tag))
    style = "".join(page.texts("style"))
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert len(made[1]) < 10**6


def test_what_was_asked_is_said(cli: Any, graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    options = ("--scale", "comm=2", "--straggler", "3=1.5", "--set", "cluster.network.nic_GBps=10")
    record = cli("echosim", "run", graph, "--gpus", 16, *options, "--html", path, "--json").json()
    text = path.read_text()
    assert element(text, "result") == record
    assert element(text, "details")["asked"] == [
        "comm takes 2 times as long",
        "network.nic_GBps is 10",
        "rank 3 is 1.5 times as slow",
    ]
    assert "rank 3 is 1.5 times as slow" in "".join(Page(text).texts("p"))
    assert "those ranks are drawn that end last" in text


def test_a_step_of_no_time_has_a_page(cli: Any, graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    nothing = (x for what in ("compute", "comm", "host") for x in ("--without", what))
    assert cli("echosim", "run", graph, "--gpus", 8, *nothing, "--html", path, "--json").json()["step_time_s"] == 0
    assert Page(path.read_text()).texts("h1")


def test_a_job_graph_and_names_that_are_html(cli: Any, job_graph: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from echograph.ir import serde

    job, path = serde.load(job_graph), tmp_path / "p.html"
    named = replace(job, workload=replace(job.workload, model="</script><b>x"))
    serde.save(named, tmp_path / "named.pb")
    assert cli("echosim", "run", tmp_path / "named.pb", "--html", path).status == 0
    assert Page(path.read_text()).texts("h1") == ["</script><b>x"]


def test_many_roles_are_shown_in_part() -> None:
    from echograph.workflow.report.prediction import MOST_ROLES, _shown

    assert _shown(3) == [0, 1, 2]
    some = _shown(100)
    assert (len(some), some[0], some[-1]) == (MOST_ROLES, 0, 99)


def test_the_page_is_no_other_file(cli: Any, graph: Path) -> None:
    outcome = cli("echosim", "run", graph, "--html", graph)
    assert outcome.status == 2
    assert "give it a file of its own" in outcome.err
