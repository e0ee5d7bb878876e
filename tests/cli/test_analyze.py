"""`echoprof analyze`: a folder of traces in, a table out."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two ranks, one of them gzipped; the cache beside them."""
    monkeypatch.setenv("ECHOGRAPH_CACHE", str(tmp_path / "cache"))
    for rank in range(2):
        events: list[dict[str, Any]] = [
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "ProfilerStep#3",
                "pid": 9,
                "tid": 9,
                "ts": 0,
                "dur": 200,
            }
        ]
        for number, name in enumerate(("gemm", NCCL, "gemm")):
            args = {"correlation": number + 1}
            times = {"ts": 10 * number, "dur": 4}
            events.append(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "pid": 9,
                    "tid": 9,
                    "args": args,
                    **times,
                }
            )
            args = args | {"stream": 7}
            times = {"ts": 20 + 20 * number + rank, "dur": 10}
            events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "args": args, **times})
        text = json.dumps({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}).encode()
        target = tmp_path / "traces" / f"{rank}.json"
        target.parent.mkdir(exist_ok=True)
        target.with_name(f"{rank}.json{'.gz' * rank}").write_bytes(gzip.compress(text) if rank else text)
    return tmp_path / "traces"


def test_csv_has_the_columns_that_others_read(cli, folder: Path) -> None:
    outcome = cli("echoprof", "analyze", folder, "temporal-breakdown", "--csv")
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    assert outcome.status == 0
    assert [row["rank"] for row in rows] == ["0", "1"]
    assert rows[0] == {
        "rank": "0",
        "idle_time(us)": "20.0",
        "compute_time(us)": "20.0",
        "non_compute_time(us)": "10.0",
        "kernel_time(us)": "50.0",
        "idle_time_pctg": "40.0",
        "compute_time_pctg": "40.0",
        "non_compute_time_pctg": "20.0",
    }


def test_json_holds_the_rows(cli, folder: Path) -> None:
    answer = cli("echoprof", "analyze", folder, "kernels", "--option", "top=1", "--ranks", "1", "--json").json()
    assert answer["analysis"] == "kernels"
    assert [(row["name"], row["rank"], row["count"]) for row in answer["rows"]] == [("gemm", 1, 2), (NCCL, 1, 1)]


def test_without_a_name_an_overview(cli, folder: Path) -> None:
    outcome = cli("echoprof", "analyze", folder)
    assert outcome.status == 0
    for title in ("steps", "temporal-breakdown", "kernel-types", "overlap", "idle"):
        assert title in outcome.out.split()
    answers = cli("echoprof", "analyze", folder, "--json").json()
    assert [answer["analysis"] for answer in answers][:2] == ["steps", "temporal-breakdown"]


def test_long_names_are_cut_for_people_alone(cli, folder: Path) -> None:
    people = cli("echoprof", "analyze", folder, "kernels").out
    assert NCCL[:60] in people
    assert NCCL not in people
    assert NCCL in cli("echoprof", "analyze", folder, "kernels", "--csv").out


@pytest.mark.parametrize("how", ["--csv", "--json"])
def test_output_goes_to_a_file(cli, folder: Path, tmp_path: Path, how: str) -> None:
    shown = cli("echoprof", "analyze", folder, "idle", how)
    kept = cli("echoprof", "analyze", folder, "idle", how, "-o", tmp_path / "out")
    assert (kept.status, kept.out) == (0, "")
    assert (tmp_path / "out").read_text() == shown.out


def test_two_folders_are_compared(cli, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "0.json").write_text((folder / "0.json").read_text().replace("gemm", "gemm2"))
    words = ("echoprof", "analyze", folder, "trace-diff", "--option", f"test={other}", "--option", "device=gpu")
    rows = cli(*words, "--json").json()["rows"]
    assert {(row["name"], row["change"]) for row in rows} == {
        ("gemm", "deleted"),
        ("gemm2", "added"),
        (NCCL, "unchanged"),
    }
    assert "no such file or folder" in cli(*words[:5], "test=nowhere").err


@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_counters_go_into_a_copy_of_the_trace(cli, folder: Path, tmp_path: Path, ending: str) -> None:
    target = tmp_path / f"copy.{ending}"
    words = ("echoprof", "analyze", folder, "counters", "-o", target)
    assert "add --ranks 0" in cli(*words).err
    assert not target.exists()
    assert cli(*words, "--ranks", "1").out == ""
    raw = target.read_bytes()
    events = json.loads(gzip.decompress(raw) if ending == "json.gz" else raw)["traceEvents"]
    assert [event["args"]["value"] for event in events if event["ph"] == "C"] == [1, 2, 3, 2, 1, 0]
    cli(*words, "--ranks", "1")
    assert target.read_bytes() == raw


def test_a_page_of_the_whole_and_of_one_analysis(cli, folder: Path, tmp_path: Path) -> None:
    outcome = cli("echoprof", "analyze", folder, "--html", tmp_path / "all.html")
    assert (outcome.status, outcome.out) == (0, "")
    whole = (tmp_path / "all.html").read_text()
    for word in ("Traces of traces", "<canvas>", "temporal-breakdown", "critical-path", "What is missing"):
        assert word in whole
    words = ("echoprof", "analyze", folder, "kernels", "--option", "top=1", "--html", tmp_path / "one.html")
    assert cli(*words).status == 0
    one = (tmp_path / "one.html").read_text()
    assert "<h1>kernels of traces</h1>" in one and "<svg" in one and "<td" in one
    assert "--html: a page is written alone" in cli(*words, "--csv").err
    assert "cannot write" in cli(*words[:-1], tmp_path / "none" / "x.html").err


@pytest.mark.slow
def test_ray_reads_the_same(cli, folder: Path) -> None:
    pytest.importorskip("ray")
    words = ("echoprof", "analyze", folder, "launches", "--json", "--no-cache")
    assert cli(*words, "--engine", "ray").out == cli(*words).out
    whole = (folder / "0.json").read_text()
    (folder / "0.json").write_text(whole.replace('"dur"', '"dur', 1))
    outcome = cli(*words, "--engine", "ray")
    assert (outcome.status, outcome.err.count("\n")) == (1, 1)
    assert "0.json: event 0 is broken" in outcome.err


def test_without_ray_its_engine_is_refused(cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    outcome = cli("echoprof", "analyze", folder, "idle", "--engine", "ray", "--no-cache")
    assert "pip install 'echograph[ray]'" in outcome.err
    assert "unknown engine 'spark'" in cli("echoprof", "analyze", folder, "idle", "--engine", "spark").err


def test_notes_are_said_beside_the_answer(cli, folder: Path) -> None:
    (folder / "0.json").write_text(json.dumps({"distributedInfo": {"rank": 0}, "traceEvents": []}))
    outcome = cli("echoprof", "analyze", folder, "overlap", "--csv")
    assert outcome.status == 0
    assert "note: rank 0: nothing ran on a device" in outcome.err
    assert len(outcome.out.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("kernelz",), "unknown analysis 'kernelz': did you mean 'kernels'?"),
        (("kernels", "--option", "top"), "--option 'top': write KEY=VALUE; kernels has top, memory"),
        (("kernels", "--option", "topp=1"), "unknown option of kernels 'topp': did you mean 'top'?"),
        (("kernels", "--option", "top=few"), "--option top: 'few' is not of type int"),
        (("kernels", "--ranks", "0;1"), "--ranks 0;1: give ranks with commas between them, as 0,17 or 0-7"),
        (("kernels", "--ranks", "0-2"), "no trace of rank 2; there are 0, 1"),
        (("kernels", "--csv", "--json"), "--csv and --json: give one of them"),
        (("--csv",), "the overview is several tables"),
        (("--option", "top=1"), "--option: name the analysis"),
        (("kernel-sequences",), "name the operator, for instance --option operator=aten::linear"),
    ],
)
def test_a_wrong_question_gets_one_line(cli, folder: Path, words: tuple[str, ...], line: str) -> None:
    outcome = cli("echoprof", "analyze", folder, *words)
    assert outcome.status == 2
    assert line in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


def test_a_broken_trace_gets_one_line(cli, folder: Path) -> None:
    whole = (folder / "0.json").read_text()
    (folder / "0.json").write_text(whole.replace('"dur"', '"dur', 1))
    outcome = cli("echoprof", "analyze", folder, "kernels")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert "0.json: event 0 is broken" in outcome.err


def test_a_cut_off_trace_is_answered_with_a_note(cli, folder: Path) -> None:
    whole = (folder / "0.json").read_text()
    (folder / "0.json").write_text(whole[: len(whole) * 3 // 4])
    outcome = cli("echoprof", "analyze", folder, "kernels", "--ranks", "0", "--json")
    assert outcome.json()["rows"]
    assert "note: " in outcome.err
    assert "0.json: cut off after" in outcome.err


def test_the_same_question_gets_the_same_bytes_with_and_without_the_cache(cli, folder: Path) -> None:
    words = ("echoprof", "analyze", folder, "launches", "--json")
    assert cli(*words, "--no-cache").out == cli(*words).out == cli(*words).out


def test_nothing_heavy_is_loaded(folder: Path) -> None:
    script = (
        "import sys; from echograph.cli.app import run; from echograph.cli.echoprof import app\n"
        f"sys.argv = ['echoprof', 'analyze', {str(folder)!r}, 'idle', '--csv']\n"
        "try: run(app, 'echoprof')\n"
        "except SystemExit: pass\n"
        "print({m.partition('.')[0] for m in sys.modules} & {'torch', 'numba', 'pandas', 'google', 'scipy'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_two_runs_side_by_side(cli, folder: Path, tmp_path: Path) -> None:
    answer = cli("echoprof", "analyze", folder, "kernels", "--against", folder, "--json").json()
    assert [(row["name"], row["count"], row["change"]) for row in answer["rows"]] == [
        ("gemm", 2, "same"),
        (NCCL, 1, "same"),
    ]
    everything = cli("echoprof", "analyze", folder, "--against", folder)
    assert everything.status == 0
    assert [line for line in everything.out.splitlines() if line.isidentifier()][:2] == ["steps", "kernels"]
    assert cli("echoprof", "analyze", folder, "--against", folder, "--html", tmp_path / "page.html").status == 0
    assert "traces against traces" in (tmp_path / "page.html").read_text()
    refused = cli("echoprof", "analyze", folder, "launches", "--against", folder)
    assert refused.status == 2
    assert "launches has no two runs side by side; available: steps, " in refused.err


def test_a_workbook_has_a_sheet_for_every_analysis(cli, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("xlsxwriter", reason="needs the [report] extra")
    sys.path.append(str(Path(__file__).parents[1] / "profiler"))
    from workbooks import sheets

    assert cli("echoprof", "analyze", folder, "--xlsx", tmp_path / "all.xlsx").status == 0
    book = sheets(tmp_path / "all.xlsx")
    assert {"temporal-breakdown", "kernels", "rank-times", "cross-rank-critical-path-summar", "notes"} <= set(book)
    assert book["temporal-breakdown"][1][:3] == ["0", "20", "20"]
    # What cannot be made of these traces is said, not left out.
    assert ["execution-trace", "execution-trace: name"] in [[row[0], row[1][:21]] for row in book["notes"]]
    assert cli("echoprof", "analyze", folder, "kernels", "--xlsx", tmp_path / "one.xlsx").status == 0
    assert [*sheets(tmp_path / "one.xlsx")] == ["kernels"]
    beside = cli("echoprof", "analyze", folder, "--against", folder, "--xlsx", tmp_path / "two.xlsx")
    assert beside.status == 0 and "steps" in sheets(tmp_path / "two.xlsx")
    both = cli("echoprof", "analyze", folder, "--xlsx", tmp_path / "a.xlsx", "--json")
    assert (both.status, "a workbook is written alone" in both.err) == (2, True)
    wrong = cli("echoprof", "analyze", folder, "--xlsx", tmp_path / "a.xls")
    assert (wrong.status, "the ending of a workbook is .xlsx" in wrong.err) == (1, True)
