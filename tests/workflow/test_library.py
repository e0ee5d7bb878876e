"""`import echograph as eg`: every name is there when it is asked for, and does what its command does."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import echograph as eg
from echograph.errors import MissingExtraError, UnknownNameError, UsageError

GRAPHS = Path(__file__).resolve().parents[1] / "golden" / "predictions" / "graphs"
PLAN: dict[str, Any] = {"gpus": 16, "tp": 2, "pp": 2, "global_batch": 64}


@pytest.fixture(scope="module")
def step() -> eg.StepGraph:
    loaded = eg.load(GRAPHS / "llama.pb")
    assert isinstance(loaded, eg.StepGraph)
    return loaded


@pytest.fixture(scope="module")
def result(step: eg.StepGraph) -> eg.Result:
    system = eg.System("dgx-a100")
    return eg.simulate(eg.lower(step, eg.Plan(**PLAN), system), system)


@pytest.mark.parametrize("name", eg.__all__)
def test_a_name_is_there_and_says_what_it_does(name: str) -> None:
    if name in ("record", "trace_collectives"):
        pytest.importorskip("torch", reason="needs the [torch] extra")
    value = getattr(eg, name)
    if name == "__version__":
        return
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        given = list(inspect.signature(value).parameters)
        assert all(f"{parameter}:" in (value.__doc__ or "") for parameter in given if parameter != "options")


def test_the_names_are_loaded_when_they_are_asked_for() -> None:
    script = "import sys, echograph as eg; eg.Plan; print(set(dir(eg)) >= set(eg.__all__), *sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert said[0] == "True"
    assert {"torch", "numba", "typer", "google", "echograph.simulator"} & set(said) == set()
    with pytest.raises(AttributeError, match="no attribute 'simulator2'"):
        eg.simulator2  # noqa: B018


def test_a_prediction_is_the_commands(step: eg.StepGraph, result: eg.Result, capsys: Any) -> None:
    from echograph.cli.echosim import run_command

    plan = {**PLAN, "cluster": "dgx-a100"}
    names = [p for p in inspect.signature(run_command).parameters if p != "graphs"]
    asked: dict[str, Any] = dict.fromkeys(names) | plan | {"engine": "auto", "as_json": True}
    run_command(graphs=[GRAPHS / "llama.pb"], **asked)
    said = json.loads(capsys.readouterr().out)
    ours = result.to_json()
    for record in (said, ours):
        del record["simulation"]["wall_s"], record["plan"]
    assert said == ours
    assert result.step_s == ours["step_time_s"]
    assert result.interval_s[0] < result.step_s < result.interval_s[1]


def test_a_plan_is_a_tuple_of_passes(step: eg.StepGraph) -> None:
    system = eg.System("dgx-a100")
    named = [type(one).__name__ for one in eg.passes(eg.Plan(**PLAN), step.workload, system.cluster)]
    assert [name for name in named if "Parallel" in name or name == "Pipeline"] == [
        "TensorParallel", "Pipeline", "DataParallel",
    ]  # fmt: skip


def test_a_scenario_and_a_system_change_what_they_say(step: eg.StepGraph, result: eg.Result) -> None:
    system = eg.System("dgx-a100", settings={"network.nic_GBps": "0.1"})
    job = eg.lower(step, eg.Plan(**PLAN), system)
    assert eg.simulate(job, system).step_ps > result.step_ps
    assert eg.simulate(job, eg.System("dgx-a100"), eg.Scenario(straggler=("5=3",))).step_ps > result.step_ps
    other = eg.simulate(job, eg.System("dgx-a100", device="h100-sxm"))
    assert (other.cluster, other.device) == ("dgx-a100", "h100-sxm")
    assert other.breakdown.compute < result.breakdown.compute


def test_an_analysis_of_a_prediction_is_its_breakdown(result: eg.Result) -> None:
    rows = eg.analyze(result, "temporal-breakdown").records()
    compute = [row["compute_time(us)"] * 1e6 for row in rows]
    assert min(abs(one - result.breakdown.compute) for one in compute) < 1e3
    with pytest.raises(UnknownNameError, match="did you mean 'overlap'"):
        eg.analyze(result, "overlaps")
    with pytest.raises(UnknownNameError, match="option of kernels"):
        eg.analyze(result, "kernels", topp=1)


def test_tables_are_shown_in_notebooks_and_become_frames(
    result: eg.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = eg.analyze(result, "temporal-breakdown")
    shown = table._repr_html_()
    assert shown.count("<tr>") == 1 + len(table)
    assert "compute" in result._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pandas"):
        table.to_pandas()
    pandas = ModuleType("pandas")
    pandas.DataFrame = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert list(table.to_pandas()) == list(table.columns)


def test_answers_print_as_the_commands_print_them(result: eg.Result) -> None:
    first, *lines = str(result).splitlines()
    assert first == f"{result.model} on {result.gpus} GPUs of {result.cluster} ({result.device})"
    assert any(line.startswith("  step time ") for line in lines)
    assert result.collective_lines()[0] in lines
    table = eg.analyze(result, "temporal-breakdown")
    titles, *rows = str(table).splitlines()
    assert titles.split() == list(table.columns)
    assert len(rows) == len(table) + len(table.notes)
    assert len({len(row) for row in rows[: len(table)]}) == 1


def test_long_tables_say_what_they_leave_out() -> None:
    from echograph.profiler.analyses.table import from_rows

    shown = from_rows(("name", "n"), [(f"<{n}>", n) for n in range(60)], ["a & b"])._repr_html_()
    assert "&lt;0&gt;" in shown and "<0>" not in shown
    assert "10 more rows" in shown and "a &amp; b" in shown


def test_a_job_goes_through_files_and_formats(step: eg.StepGraph, tmp_path: Path) -> None:
    job = eg.lower(step, eg.Plan(gpus=8))
    eg.save(job, tmp_path / "job.pb")
    again = eg.load(tmp_path / "job.pb")
    assert isinstance(again, eg.JobGraph)
    assert eg.simulate(again).step_ps == eg.simulate(job).step_ps
    done = eg.export(step, "json", tmp_path / "step.json")
    assert done.files == 1
    back = eg.import_("json", tmp_path / "step.json")
    assert back.unfolded_ops == step.unfolded_ops
    with pytest.raises(UsageError, match="no such option"):
        eg.export(step, "json", tmp_path / "other.json", cluster="dgx-h100")
    with pytest.raises(UnknownNameError, match="format"):
        eg.import_("jason", tmp_path / "step.json")


def test_what_cannot_be_asked_is_said_in_one_line(step: eg.StepGraph) -> None:
    with pytest.raises(UsageError, match="lower it first"):
        eg.simulate(step)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="did you mean 'dgx-h100'"):
        eg.System("dgx-h1000")
    with pytest.raises(UsageError, match="--jitter"):
        eg.Scenario(draws=3)


def test_validation_and_fits_are_tables(tmp_path: Path) -> None:
    from echograph.profiler.analyses.table import AnswerTable

    root = Path(__file__).resolve().parents[2]
    found = eg.fit(tmp_path / "profiles", nccl_tests=[root / "examples" / "all_reduce_16.log"], cluster="dgx-h100")
    assert isinstance(found, AnswerTable) and len(found) > 0
    assert (tmp_path / "profiles" / "ours.toml").exists()
    eg.System(tmp_path / "profiles" / "ours.toml")
    with pytest.raises(UsageError, match="nothing to fit"):
        eg.fit(tmp_path / "none")


@pytest.mark.torch
def test_a_function_and_a_module_compile_alike() -> None:
    torch = pytest.importorskip("torch")

    def build() -> tuple[Any, Any, Any]:
        layers = [torch.nn.Linear(64, 64) for _ in range(3)]
        return torch.nn.Sequential(*layers), (torch.zeros(4, 64),), lambda output: output.sum()

    built = eg.compile(build)
    module, inputs, loss = build()
    weights = module[0].weight.detach().clone()
    compiled = eg.compile(module, inputs=inputs, loss=loss)
    assert compiled.unfolded_ops == built.unfolded_ops
    assert torch.equal(module[0].weight, weights)  # the module stays as it is
    assert type(module[0].weight) is torch.nn.Parameter
    tied = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    assert eg.compile(tied, inputs=(torch.zeros(2, 8),), loss=loss).workload.parameters == 64 + 8 + 8
    with pytest.raises(UsageError, match="inputs"):
        eg.compile(module)
    with pytest.raises(UsageError, match="zoo models"):
        eg.compile(build, batch_size=2)


def test_notes_go_to_a_logger(caplog: pytest.LogCaptureFixture) -> None:
    from echograph.notes import tell

    with caplog.at_level(logging.WARNING, logger="echograph"):
        tell(["the trace has no sizes"])
    assert caplog.messages == ["note: the trace has no sizes"]
