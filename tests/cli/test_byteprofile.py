"""The commands of ByteProfile's analyzer, option by option: every expected value is computed by hand."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[1] / "profiler" / folder) for folder in ("", "byteprofile")]

from profiled_jobs import (
    BW_A,
    BW_B,
    FW_A,
    FW_B,
    OTHERS,
    PARTS,
    STEP,
    byteprofile,
    complete,
    dpro_nccl,
    gml,
    sources,
    write,
)

MS = 1e-3
HALF = sum(FW_A) // 2 + FW_B + BW_B
OWN, ROOT = sum(OTHERS.values()), sum(PARTS.values())
ONE, TWO = HALF + BW_A + OWN + 15 + STEP, HALF + 2 * ROOT + 15 + STEP


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker of two GPUs; commands that are not told where write into an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return byteprofile(tmp_path / "worker")


def test_stats(cli, worker: Path) -> None:
    answer = cli("echoprof", "stats", worker, "--sort", "--head", 2, "--json").json()
    assert [(row["name"], row["count"]) for row in answer["stats"]] == [("rank1.Comm.wb", 2), ("rank1.Comm.wa", 2)]
    assert answer["stats"][0]["avg_ms"] == pytest.approx((2 * ROOT + 15) * MS)
    assert {row["category"]: row["operation"] for row in answer["categories"]} == {
        "FW": "rank0.FW.a",
        "BW": "rank0.BW.a",
        "STEP": "rank0.STEP",
        "Comm": "rank1.Comm.wb",
    }
    lines = cli("echoprof", "stats", worker / "0", "--head", 1).out.splitlines()
    assert lines[1].split() == ["name", "count", "total_ms", "min_ms", "max_ms", "avg_ms", "variance_ms2"]
    assert lines[2].split() == ["FW.a", "2", "0.2200", "0.1000", "0.1200", "0.1100", "0.0001"]


def test_workbooks(cli, worker: Path) -> None:
    pytest.importorskip("xlsxwriter", reason="needs the [report] extra")
    from workbooks import sheets

    assert cli("echoprof", "stats", worker, "--sort", "--head", 1, "--xlsx", "s.xlsx").status == 0
    book = sheets(Path("s.xlsx"))
    assert list(book) == ["stats"]
    # All of them, whatever is shown.
    assert len(book["stats"]) == 1 + 2 * 5 + 3 * (len(OTHERS) + len(PARTS)) + 4
    assert book["stats"][1][:2] == ["rank1.Comm.wb", "2"]
    assert cli("echoprof", "compare", worker / "0", worker / "1", "--xlsx", "c.xlsx").status == 0
    book = sheets(Path("c.xlsx"))
    assert list(book) == ["stats1", "stats2", "diff", "notes"]
    assert [row[0] for row in book["diff"][:3]] == ["name", "FW.a", "FW.b"]


def test_compare(cli, worker: Path) -> None:
    answer = cli("echoprof", "compare", worker / "0", worker / "1", "--sort", "--head", 2, "--json").json()
    first, second = 2 * OWN + 15, 2 * ROOT + 15
    assert [row["name"] for row in answer["compare"]] == ["Comm.wb", "Comm.wa"]
    assert answer["compare"][0]["difference_ms"] == pytest.approx((second - first) * MS)
    assert answer["compare"][0]["relative"] == pytest.approx((second - first) / first)
    assert answer["notes"] == ["3 names are only in the first and 6 only in the second"]


def test_compare3d(cli, worker: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the [report] extra")
    trial = dpro_nccl(worker.parent / "trial")
    answer = cli("echoprof", "compare3d", worker, trial, "--plot", "p.png", "--json").json()
    means = {(Path(r["setting"]).name, r["worker"], r["category"]): r["mean_ms"] for r in answer["compare3d"]}
    for setting in (("worker", 0), ("trial", 0), ("trial", 1)):
        assert means[*setting, "FW"] == pytest.approx((sum(FW_A) / 2 + FW_B) / 2 * MS)
    assert means["trial", 1, "UPDATE"] == pytest.approx((20 + 9) / 2 * MS)
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_mapping(cli, worker: Path) -> None:
    kernels = write(Path("k.json"), [complete("gemm", ts, 4, "kernel") for ts in (1003, 1110, 2003)])
    answer = cli("echoprof", "mapping", worker / "0", kernels, "--offset-us", -1000, "--json").json()
    assert [(r["operator"], r["kernel"], r["count"]) for r in answer["mapping"]] == [
        ("FW.a", "gemm", 2),
        ("FW.b", "gemm", 1),
    ]
    alone = cli("echoprof", "mapping", kernels)
    assert (alone.status, alone.err.count("\n")) == (2, 1)
    assert "give the trace of their kernels" in alone.err


def test_mapping_of_a_pytorch_trace_is_by_launches(cli, worker: Path) -> None:
    operator = complete("aten::mm", 0, 10, "cpu_op") | {"pid": 9, "tid": 9, "args": {}}
    call = complete("cudaLaunchKernel", 2, 3, "cuda_runtime") | {"pid": 9, "tid": 9, "args": {"correlation": 5}}
    kernel = complete("gemm", 50, 7, "kernel") | {"pid": 0, "tid": 7, "args": {"correlation": 5, "stream": 7}}
    trace = {"schemaVersion": 1, "traceEvents": [operator, call, kernel]}
    (row,) = cli("echoprof", "mapping", write(Path("t.json"), trace), "--json").json()["mapping"]
    assert (row["aten_op_name"], row["kernel_sequence"], row["occurrence_count"]) == ("aten::mm", "gemm", 1)


def test_combine(cli, worker: Path) -> None:
    other = byteprofile(worker.parent / "other", clock=300, worker=1)
    answer = cli("echoprof", "combine", worker, other, "--filter", "Comm.wa, Comm.wb.PUSH", "--json").json()
    assert answer == {
        "output": "combined.json",
        "traces": 4,
        "shift_us": {"0": 0.0, "1": 300.0},
        "aligned_by": "rank1.Comm.wb.PULL.8",
    }
    events = json.loads(Path("combined.json").read_text())["traceEvents"]
    assert {e["ts"] for e in events if e["name"] == "rank0.FW.a"} == {0, 1000}
    assert {e["name"] for e in events if "wb" in e["name"]} == {"rank1.Comm.wb.PUSH"}
    told = cli("echoprof", "combine", worker, other, "-o", "two.json").out.splitlines()
    assert told[1] == "worker 1: its clock was 300 us ahead (by rank1.Comm.wb.PULL.8)"
    assert (
        cli("echoprof", "combine", worker, other, "--no-align", "-o", "three.json", "--json").json()["aligned_by"]
        == ""
    )
    # What was combined is a trace like any other.
    again = cli("echoprof", "stats", "two.json", "--json").json()["stats"]
    assert sum(row["count"] for row in again if row["name"] == "rank1.FW.b") == 4
    wrong = cli("echoprof", "combine", worker, "--filter", "Comm.wc")
    assert wrong.status == 2
    assert "unknown communication 'Comm.wc': did you mean" in wrong.err


def test_collect(cli, worker: Path) -> None:
    job = worker.parent / "raw"
    for rank in range(2):
        sources(job / str(rank), root=rank == 1)
    made = cli("echoprof", "collect", job)
    names = [job / str(rank) / f"bps_trace_local_rank{rank}_2step.json" for rank in range(2)]
    assert made.out.splitlines()[:2] == [str(name) for name in names]
    assert made.out.splitlines()[-1].split() == ["rank1", "2", "0.3000", "0.8650"]
    # The same job as what was written directly.
    assert cli("echoprof", "compare", worker, job, "--json").json()["compare"] == [
        row | {"difference_ms": 0, "relative": 0, "avg2_ms": row["avg1_ms"]}
        for row in cli("echoprof", "compare", worker, worker, "--json").json()["compare"]
    ]
    assert {row["iteration_ms"] for row in cli(
        "echoprof", "collect", worker, "--sub-option", "iter_time", "--json"
    ).json()["iterations"]} == {0.865}  # fmt: skip
    shutil.copy(job / "0" / "temp.json", worker / "0")
    before = names[0].read_bytes()
    assert cli("echoprof", "collect", job, "--sub-option", "operator", "-o", "out").status == 0
    assert names[0].read_bytes() == before
    assert Path("out/rank0/bps_trace_local_rank0_2step.json").is_file()


def test_critical(cli, worker: Path) -> None:
    answer = cli("echoprof", "critical", worker, "--json").json()
    assert answer["length_ms"] == pytest.approx({"rank0": ONE * MS, "rank1": TWO * MS, "all": TWO * MS})
    assert [row["name"] for row in answer["paths"] if row["of"] == "all"][-2:] == ["rank1.Comm.wb", "rank1.STEP"]
    apart = cli("echoprof", "critical", worker, "--del-queue", "--run-time", "--json").json()
    assert apart["length_ms"]["rank0"] == pytest.approx((ONE - 15) * MS)
    lines = cli("echoprof", "critical", worker, "--head", 1).out.splitlines()
    assert lines[0] == f"rank0: {ONE} us"
    assert lines[1].split() == ["0.1100", "ms", "rank0.FW.a"]


def test_replay(cli, worker: Path) -> None:
    answer = cli("echoprof", "replay", worker, "--step-num", 2, "--json").json()
    assert answer["step_ms"] == pytest.approx(TWO * MS)
    assert answer["parallelism"] == {"rank0": 1, "rank1": 1}
    assert answer["critical_ms"]["all"] == pytest.approx(TWO * MS)
    assert [(r["step"], r["gpu"], r["end_ms"]) for r in answer["steps"]] == [
        (0, "rank0", pytest.approx(ONE * MS)),
        (0, "rank1", pytest.approx(TWO * MS)),
        (1, "rank0", pytest.approx(2 * ONE * MS)),
        (1, "rank1", pytest.approx(2 * TWO * MS)),
    ]
    events = json.loads(Path("replay.json").read_text())["traceEvents"]
    ends = [e["ts"] + e["dur"] for e in events if e["name"] == "rank1.STEP"]
    assert ends == [TWO, 2 * TWO]
    pretty = cli("echoprof", "replay", worker, "--pretty", "--json").json()
    assert not {"parallelism", "critical_ms"} & set(pretty)
    assert "critical path" not in cli("echoprof", "replay", worker, "--pretty").out
    assert "critical path" in cli("echoprof", "replay", worker).out


def test_replay_taken_apart(cli, worker: Path) -> None:
    answer = cli("echoprof", "replay", worker, "--del-queue", "-o", "r.json", "--json").json()
    handed = OTHERS["REDUCE"] + OTHERS["COPYD2H"] + OTHERS["COORDINATE_PUSH"]
    pushed = ROOT - PARTS["REDUCE"] - PARTS["COPYD2H"]
    assert answer["step_ms"] == pytest.approx((HALF + BW_A + handed + pushed + STEP) * MS)
    names = {e["name"] for e in json.loads(Path("r.json").read_text())["traceEvents"]}
    assert {"rank1.Comm.wb.PUSH.8", "rank0.Comm.wa.COORDINATE_PUSH.10"} <= names


@pytest.mark.parametrize(
    ("what", "ratio", "added", "step"),
    [
        ("communication", 2.0, 0.0, TWO + 2 * ROOT + 15),
        ("computation", 1.5, 0.0, 1.5 * (HALF + STEP) + 2 * ROOT + 15),
        ("rank1.FW.a", 1.0, 0.1, TWO + 100),
    ],
)
def test_replay_with_a_delay(cli, worker: Path, what: str, ratio: float, added: float, step: float) -> None:
    options = ("--delay", what, "--delay-ratio", ratio, "--delay-ms", added, "--json")
    answer = cli("echoprof", "replay", worker, *options).json()
    assert answer["step_ms"] == pytest.approx(step * MS)
    assert answer["step_ms_before"] == pytest.approx(TWO * MS)


def test_replay_delays_each_nth_critical_node(cli, worker: Path) -> None:
    answer = cli("echoprof", "replay", worker, "--delay", "each:3", "--delay-ms", 10, "--json").json()
    # Of I/O_0, FW.a, FW.b, OUTPUT0, BW.b, Comm.wb, STEP.
    assert [row["name"] for row in answer["delays"]] == ["rank1.I/O_0", "rank1.OUTPUT0", "rank1.STEP"]
    assert {row["share"] for row in answer["delays"]} == {1.0}
    assert answer["step_ms"] == pytest.approx(TWO * MS)


def test_dag(cli, worker: Path) -> None:
    answer = cli("echoprof", "dag", worker / "0", "--run-time", "-o", "d.gml", "--json").json()
    assert answer["parallelism"] == {"rank0": 1}
    assert {row["name"]: row["waits_for"] for row in answer["dag"]}["STEP"] == "BW.a, Comm.wa, Comm.wb"
    # What was written is a graph with times: no event is needed.
    gpu = Path("bare/0")
    write(gpu / "trace.json", [complete("FW.z", 0, 1, "operator")])
    shutil.copy("d.gml", gpu / "dag.gml")
    assert cli("echoprof", "critical", gpu, "--json").json()["length_ms"]["all"] == pytest.approx(ONE * MS)
    assert cli("echoprof", "dag", worker, "-o", "d.dot", "--head", 2).status == 0
    assert Path("d.dot").read_text().startswith("digraph")


@pytest.mark.slow
def test_a_simulated_timeline_is_a_trace_too(cli, graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    said = cli("echosim", "run", graph, "--gpus", 8, "--trace", path, "--json").json()
    rows = cli("echoprof", "stats", path, "--json").json()["stats"]
    (step,) = [row for row in rows if row["name"] == "ProfilerStep#0"]
    assert step["avg_ms"] == pytest.approx(said["step_time_s"] * 1e3)
    (row,) = cli("echoprof", "collect", path, "--sub-option", "iter_time", "--json").json()["iterations"]
    assert row["iteration_ms"] == pytest.approx(said["step_time_s"] * 1e3)


@pytest.mark.parametrize(
    ("module", "package", "arguments"),
    [
        ("analyses.workbook", "XlsxWriter", ("stats", "--xlsx", "s.xlsx")),
        ("byteprofile.report", "matplotlib", ("compare3d", "--plot", "p.png")),
        ("byteprofile.dag", "networkx", ("critical",)),
    ],
)
def test_what_is_not_installed_is_said(
    cli, worker: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(f"echograph.profiler.{module}.find_spec", lambda name: None)
    outcome = cli("echoprof", *arguments, worker)
    assert outcome.status == 1
    assert f"needs {package}: install it with pip install 'echograph[report]'" in outcome.err


def test_wrong_input_is_one_line(cli, worker: Path) -> None:
    (worker.parent / "empty").mkdir()
    broken = Path("broken.json")
    broken.write_text("{]")
    cut = Path("cut.json.gz")
    cut.write_bytes(gzip.compress(json.dumps([complete("FW.a", 0, 1, "operator")] * 50).encode())[:40])
    bare = gml(Path("bare/0/dag.gml"), [("FW.a", "BW.a")]).parent
    asked: list[tuple[tuple[Any, ...], str]] = [
        (("stats", worker.parent / "empty"), "no trace in it"),
        (("stats", "nowhere"), "no such file"),
        (("stats", broken), "not a trace"),
        (("stats", cut), "cut.json.gz: not a trace"),
        (("critical", bare), "no trace in it"),
        (("compare", worker, worker / "0"), "no name is in both"),
        (("combine", worker, worker / "0" / "bps_trace_local_rank0_2step.json"), "--no-align"),
        (("collect", worker), "no such file: the final trace is made from it"),
        (("collect", worker, "--sub-option", "iter_time", "-o", "x"), "writes nothing"),
        (("replay", worker, "--delay-ratio", "2"), "say what is delayed"),
        (("replay", worker, "--delay", "communication"), "say by how much"),
        (("replay", worker, "--delay", "each:x", "--delay-ms", "1"), "each:N"),
        (("replay", worker, "--delay", "all", "--delay-ms", "1"), "unknown node 'all'"),
        (("replay", worker, "--delay", "communication", "--delay-ratio", "-1"), "a ratio from 0"),
        (("replay", worker, "-o", "no/where.json"), "cannot write"),
        (("dag", worker, "-o", "d.png"), "give one of .dot, .gml"),
        (("compare3d", worker, "--plot", "p.txt"), "give one of .png"),
        (("stats", worker, "--xlsx", "s.txt"), "the ending of a workbook is .xlsx"),
        (("stats", worker, "--head", "0"), "--head"),
    ]
    for arguments, message in asked:
        outcome = cli("echoprof", *arguments)
        assert outcome.status in (1, 2), arguments
        assert outcome.err.count("\n") == 1, outcome.err
        assert message in outcome.err
        assert "internal error" not in outcome.err
    file = worker / "0" / "bps_trace_local_rank0_2step.json"
    write(file, {"schemaVersion": 1, "traceEvents": json.loads(file.read_text())["traceEvents"]})
    (worker / "0" / "dag.gml").unlink()
    assert "echoprof analyze TRACES critical-path" in cli("echoprof", "critical", worker).err
    assert not list(Path().glob("*.png")) and not Path("replay.json").exists()


def test_an_offset_that_is_no_number_is_refused(cli, worker: Path) -> None:
    kernels = write(Path("k.json"), [complete("gemm", 1003, 4, "kernel")])
    wrong = cli("echoprof", "mapping", worker / "0", kernels, "--offset-us", "nan")
    assert (wrong.status, wrong.err) == (2, "echoprof: --offset-us nan: give at most 1e12\n")
