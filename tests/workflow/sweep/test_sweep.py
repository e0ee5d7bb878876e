"""A sweep has a row a point, and repeats nothing that it finished, however it ended."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from echograph.errors import DataError, MissingExtraError, UnknownNameError, UsageError
from echograph.ir import serde
from echograph.ir.graph import StepGraph
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.sweep import sweep
from echograph.workflow.sweep.grid import GridAxis, parse_grid_axis
from echograph.workflow.sweep.store import check_table, flat, read_journal, write_table
from echograph.workflow.system import System, SystemOptions
from echograph.workflow.workers import WorkerOptions

AXES = [GridAxis(name="gpus", values=(8, 16)), GridAxis(name="cluster", values=("dgx-h100", "dgx-a100"))]


@pytest.fixture(scope="session")
def step(tmp_path_factory: pytest.TempPathFactory) -> StepGraph:
    """A Llama of two layers."""
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    import echograph as eg

    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "max_position_embeddings": 64,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(json.dumps(config))
    return eg.compile(str(path), batch_size=2, seq_len=64)


def test_a_row_is_what_a_run_says(step: StepGraph) -> None:
    axes = [*AXES[:1], parse_grid_axis("--over", "cluster.network.nic_GBps=25,50")]
    found = sweep(step, axes, Plan(zero=1))
    assert [(row["gpus"], row["cluster.network.nic_GBps"]) for row in found.rows] == [
        (8, "25"), (8, "50"), (16, "25"), (16, "50"),
    ]  # fmt: skip
    system = System("dgx-h100", settings={"network.nic_GBps": "25"})
    record = predict(step, Plan(gpus=16, zero=1), system)[0].to_json()
    row = found.rows[2]
    assert row["step_time_s"] == record["step_time_s"]
    assert row["step_time_interval_s.high"] == record["step_time_interval_s"][1]
    assert row["breakdown_s.compute"] == record["breakdown_s"]["compute"]
    assert row["memory.fits"] is True
    assert {k: row[k] for k in flat(record) if k in row and k != "simulation.wall_s"}.items() <= flat(
        record
    ).items()


def test_what_is_finished_is_not_repeated(step: StepGraph, tmp_path: Path) -> None:
    journal = tmp_path / "points.jsonl"
    first = sweep(step, AXES, journal_path=journal)
    assert (first.predicted, first.known) == (4, 0)
    again = sweep(step, AXES, journal_path=journal)
    assert (again.predicted, again.known) == (0, 4)
    assert again.rows == first.rows
    more = [GridAxis(name="gpus", values=(8, 16, 32)), AXES[1]]
    assert sweep(step, more, journal_path=journal).predicted == 2
    other = sweep(step, AXES, Plan(zero=1), journal_path=journal)
    assert (other.predicted, other.known) == (4, 0)


def test_equal_points_are_predicted_once(step: StepGraph) -> None:
    """The default of a key that a file has already is the same system."""
    axes = [parse_grid_axis("--over", "cluster.network.nic_GBps=25,25.0,30")]
    found = sweep(step, axes, Plan(gpus=16))
    assert found.predicted == 3 - 1 and len(found.rows) == 3
    assert found.rows[0]["step_time_s"] == found.rows[1]["step_time_s"]


def test_a_line_that_was_cut_off_is_done_again(step: StepGraph, tmp_path: Path) -> None:
    journal = tmp_path / "points.jsonl"
    first = sweep(step, AXES, journal_path=journal)
    journal.write_bytes(journal.read_bytes()[:-40])
    again = sweep(step, AXES, journal_path=journal)
    assert (again.predicted, again.known) == (1, 3)
    assert again.rows == first.rows
    assert len(read_journal(journal)) == 4


def test_a_journal_of_something_else_is_refused(step: StepGraph, tmp_path: Path) -> None:
    journal = tmp_path / "points.jsonl"
    journal.write_text("hello\nworld\n")
    with pytest.raises(DataError, match="line 1 is no point"):
        sweep(step, AXES, journal_path=journal)


def test_a_point_that_cannot_be_says_why_in_its_row(step: StepGraph) -> None:
    found = sweep(step, [GridAxis(name="tp", values=(1, 3, 0))], Plan(gpus=8))
    assert found.rows[0]["error"] is None
    assert "no multiple of 3" in found.rows[1]["error"]
    assert "give 1 or more" in found.rows[2]["error"]
    assert len(found.answered) == 1


def test_processes_have_the_same_rows(step: StepGraph) -> None:
    assert sweep(step, AXES).rows == sweep(step, AXES, where=WorkerOptions(jobs=2)).rows


def test_an_interrupt_keeps_what_is_finished(
    step: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echograph.workflow import workers

    calls, take = [], workers._Here.take

    def interrupted(self: Any, timeout_s: float | None = None) -> list[tuple[Any, Any]]:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return take(self, timeout_s)

    journal = tmp_path / "points.jsonl"
    monkeypatch.setattr(workers._Here, "take", interrupted)
    found = sweep(step, AXES, journal_path=journal)
    assert (found.ended, len(found.rows)) == ("interrupt", 2)
    monkeypatch.undo()
    assert sweep(step, AXES, journal_path=journal).predicted == 2


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(step: StepGraph, tmp_path: Path) -> None:
    graph, table = tmp_path / "step.pb", tmp_path / "rows.csv"
    serde.save(step, graph)
    command = [
        sys.executable, "-c", "from echograph.cli.echosim import main; main()",
    ]  # fmt: skip
    command += ["sweep", str(graph), "--over", "gpus=8..256:+8", "-o", str(table), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = table.with_name("rows.csv.points.jsonl")
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 8):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = set(read_journal(journal))
    assert 8 <= len(finished) < 32
    record = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (record["known"], record["predicted"]) == (len(finished), 32 - len(finished))
    assert [row["gpus"] for row in record["rows"]] == list(range(8, 257, 8))


def test_a_table_has_every_column(step: StepGraph, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    found = sweep(step, [GridAxis(name="zero", values=(1, 3))], Plan(gpus=16))
    write_table(path, found.rows)
    rows = list(csv.DictReader(path.open()))
    assert [row["zero"] for row in rows] == ["1", "3"]
    assert float(rows[0]["step_time_s"]) == found.rows[0]["step_time_s"]
    assert rows[0]["breakdown_s.exposed_communication.dp_shard"] == ""
    with pytest.raises(UsageError, match=r"\.csv or \.parquet"):
        check_table(tmp_path / "rows.txt")


def test_parquet_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"echograph\[parquet\]"):
        check_table(tmp_path / "rows.parquet")


@pytest.mark.parametrize("text", ["gpus", "gpus=", "gpus=a", "gpus=1..", "gpus=16..8:x2"])
def test_wrong_grids_are_one_line(text: str) -> None:
    with pytest.raises(UsageError):
        parse_grid_axis("--over", text)


def test_grids_that_are_none_are_refused(step: StepGraph) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'cluster'"):
        parse_grid_axis("--over", "clustr=a,b")
    with pytest.raises(UsageError, match="twice"):
        sweep(step, [AXES[0], AXES[0]])
    with pytest.raises(UsageError, match="given as an option"):
        sweep(step, AXES, Plan(gpus=8))
    with pytest.raises(UsageError, match="points"):
        sweep(step, [GridAxis(name=name, values=tuple(range(1, 1002))) for name in ("gpus", "tp")])
    assert "unknown cluster" in sweep(step, [GridAxis(name="cluster", values=("dgx-h10",))]).rows[0]["error"]


def test_options_of_the_system_vary(step: StepGraph) -> None:
    found = sweep(step, [GridAxis(name="host_waits", values=(False, True))], Plan(gpus=8), SystemOptions())
    assert len(found.answered) == 2
