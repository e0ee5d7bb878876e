"""`echoc export` and `echoc annotate`: what they write, what they say, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echograph.ir import serde
from echograph.ir.types import Source
from echograph.registry import Table
from echograph.workflow.formats import EXPORTS, IMPORTS
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.system import System, annotate, host_name

pytest.importorskip("networkx")

PLAIN = ("gml", "graphml", "json", "text", "dot", "svg")


def lines(text: str) -> list[str]:
    return text.strip().split("\n")


@pytest.mark.parametrize("form", PLAIN)
def test_it_writes_what_the_exporter_writes(form: str, job_graph: Path, tmp_path: Path, cli: Any) -> None:
    done = cli("echoc", "export", job_graph, "--to", form, "-o", tmp_path / "a", "--json")
    expected = EXPORTS[form](serde.load(job_graph), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    record = {"files": 1, "bytes": expected.bytes, "notes": list(expected.notes)}
    assert done.json() == {"output": str(tmp_path / "a"), "format": form, **record}


@pytest.mark.parametrize("form", ["gml", "json", "text"])
def test_a_step_and_a_job_come_back_through_the_commands(
    form: str, graph: Path, job_graph: Path, tmp_path: Path, cli: Any
) -> None:
    for source in (graph, job_graph):
        assert cli("echoc", "export", source, "--to", form, "-o", tmp_path / "out").status == 0
        assert cli("echoc", "import", form, tmp_path / "out", "-o", tmp_path / "back.pb").status == 0
        assert (tmp_path / "back.pb").read_bytes() == source.read_bytes()


def test_notes_go_beside_the_result(job_graph: Path, tmp_path: Path, cli: Any) -> None:
    done = cli("echoc", "export", job_graph, "--to", "simai", "-o", tmp_path / "w.txt")
    assert done.status == 0
    assert lines(done.out)[0].startswith(f"{tmp_path / 'w.txt'}: simai, 1 file, ")
    assert len(lines(done.out)) == 1
    assert all(line.startswith("note: ") for line in lines(done.err))


def test_a_chrome_trace_is_that_of_a_simulation(job_graph: Path, tmp_path: Path, cli: Any) -> None:
    assert cli("echoc", "export", job_graph, "--to", "chrome", "-o", tmp_path / "a.json").status == 0
    assert cli("echosim", "run", job_graph, "--trace", tmp_path / "b.json").status == 0
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_simai_has_the_durations_of_the_cluster(graph: Path, tmp_path: Path, cli: Any) -> None:
    cli("echoc", "lower", graph, "--gpus", "8", "--tp", "2", "-o", tmp_path / "job.pb")
    for cluster in ("dgx-h100", "dgx-a100"):
        done = cli(
            "echoc", "export", tmp_path / "job.pb", "--to", "simai", "-o", tmp_path / cluster, "--cluster", cluster
        )
        assert done.status == 0
    rows = [(tmp_path / c).read_text().splitlines() for c in ("dgx-h100", "dgx-a100")]
    assert rows[0][:2] == rows[1][:2]
    assert rows[0][2:] != rows[1][2:]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--to", "gmll"), 2, "unknown format 'gmll': did you mean 'gml'? known: chakra, chrome, dot"),
        (("--to", "gml", "--cluster", "dgx-h100"), 2, "--cluster: gml has no such option (it is of chakra,"),
        (("--to", "simai", "--per-role"), 2, "--per-role: simai has no such option (it is of chakra)"),
        (("--to", "json", "--name", "x"), 2, "--name: json has no such option (it is of chakra)"),
        (("--to", "simai"), 2, "is a step graph, and the format is of jobs: spread it first, as echoc lower"),
        (("--to", "simai", "--cluster", "dgx-h99"), 2, "unknown cluster"),
    ],
)
def test_what_is_refused_in_one_line(
    arguments: tuple[str, ...], status: int, said: str, graph: Path, tmp_path: Path, cli: Any
) -> None:
    if "dgx-h99" in arguments:
        cli("echoc", "lower", graph, "--gpus", "8", "-o", tmp_path / "job.pb")
        graph = tmp_path / "job.pb"
    before = set(tmp_path.iterdir())
    done = cli("echoc", "export", graph, *arguments, "-o", tmp_path / "out")
    assert (done.status, len(lines(done.err))) == (status, 1)
    assert said in done.err
    assert set(tmp_path.iterdir()) == before


def test_the_graph_itself_is_not_written_over(graph: Path, cli: Any) -> None:
    before = graph.read_bytes()
    assert "is the graph itself" in cli("echoc", "export", graph, "--to", "json", "-o", graph).err
    assert graph.read_bytes() == before


@pytest.mark.parametrize("table", [EXPORTS, IMPORTS])
def test_every_line_of_a_table_leads_to_a_function(table: Table) -> None:
    assert len(table) > 0
    assert all(callable(function) for function in table.values())


# -- annotate ------------------------------------------------------------------------------------------------


def test_an_annotated_job_is_simulated_as_before_anywhere(graph: Path, tmp_path: Path, cli: Any) -> None:
    plan = ("--gpus", "8", "--tp", "2", "--pp", "2", "--global-batch", "32")
    cli("echoc", "lower", graph, *plan, "-o", tmp_path / "job.pb")
    assert cli("echoc", "annotate", tmp_path / "job.pb", "-o", tmp_path / "timed.pb").status == 0
    for cluster in ("dgx-h100", "dgx-a100"):
        steps = [
            predict(serde.load(tmp_path / p), Plan(cluster=cluster))[0].step_ps for p in ("job.pb", "timed.pb")
        ]
        assert steps[0] == steps[1]


def test_annotating_twice_changes_nothing_and_a_second_cluster_adds_its_own(
    job_graph: Path, tmp_path: Path, cli: Any
) -> None:
    first = cli("echoc", "annotate", job_graph, "-o", tmp_path / "a.pb", "--json").json()
    again = cli("echoc", "annotate", tmp_path / "a.pb", "-o", tmp_path / "a.pb", "--json").json()
    assert again["durations"] == first["durations"]
    assert again["bytes"] == first["bytes"]
    cli("echoc", "annotate", tmp_path / "a.pb", "--cluster", "dgx-a100", "-o", tmp_path / "b.pb")
    both = serde.load(tmp_path / "b.pb").ops
    alone = annotate(serde.load(job_graph), System("dgx-a100")).ops
    for name in ("a100-sxm-80g", host_name("a100-sxm-80g"), "dgx-a100"):
        if name in alone.strings:
            assert (both.duration_on(name)[0] == alone.duration_on(name)[0]).all()
    assert {"h100-sxm", host_name("h100-sxm"), "dgx-h100"} <= set(both.strings)


def test_every_operation_has_what_a_reader_needs(job_graph: Path) -> None:
    system = System("dgx-h100")
    job, where = annotate(serde.load(job_graph), system), system.cluster
    ops = job.ops
    times = {name: ops.duration_on(name)[0] >= 0 for name in (where.device, host_name(where.device), where.name)}
    assert times[host_name(where.device)].all()
    assert (times[where.device] | times[where.name] | ops.is_view).all()
    assert not (times[where.device] & times[where.name]).any()
    assert set(ops.duration_source.tolist()) <= {int(source) for source in Source}
