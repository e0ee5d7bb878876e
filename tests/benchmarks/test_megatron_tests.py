"""The benchmark of Megatron-LM's tests: arguments as they are, results that stay, and the page's part of them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs PyYAML, of the [dev] extra")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import megatron_page, megatron_tests
from benchmarks.accuracy import replace_part
from benchmarks.megatron_history import Measured

FIELDS = ("id", "source", "gpu", "platform", "iteration_s_median", "iteration_s_min", "iteration_s_p90",
          "mem_allocated_bytes", "mem_max_allocated_bytes", "env", "args", "gpus", "script", "kind")  # fmt: skip


def line(name: str, platform: str = "dev_dgx_h100", **other: str) -> dict[str, str]:
    return {
        "id": f"{name}@{platform}", "source": f"repo@0:tests/{name}/golden.json", "gpu": "H100",
        "platform": platform, "iteration_s_median": "0.5", "iteration_s_min": "0.4", "iteration_s_p90": "0.6",
        "mem_allocated_bytes": "100",
        "mem_max_allocated_bytes": "200", "env": '{"NVTE_FLASH_ATTN": 1, "NCCL_ALGO": "Ring"}',
        "args": '{"num-layers": 2, "bf16": true, "swiglu": false}', "gpus": "8", "script": "pretrain_gpt.py",
        "kind": "training", **other,
    }  # fmt: skip


def written(path: Path, *lines: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=FIELDS)
        writer.writeheader()
        writer.writerows(lines)
    return path


def test_tests_of_the_same_arguments_are_one_set(tmp_path: Path) -> None:
    table = written(
        tmp_path / "table.csv", line("gpt/a"), line("gpt/b", "dev_dgx_a100"), line("gpt/c", gpus="4"),
        line("gpt/d", gpus=""), line("gpt/e", kind="grpo"), line("gpt/f", args="{}"),
    )  # fmt: skip
    found = megatron_tests.tests_of(table, tmp_path)
    assert [(test.names, test.gpus) for test in found] == [(("gpt/a", "gpt/b"), 8), (("gpt/c",), 4)]
    assert found[0].environment == {"NVTE_FLASH_ATTN": "1"}
    assert found[0].key != found[1].key


def test_what_a_file_writes_for_a_shell_is_as_the_script_reads_it() -> None:
    written = {"--pipeline-model-parallel-layout": "Et*3\\\\|\\\\(tt\\\\|\\\\)*6mL"}
    assert list(megatron_tests._arguments(written))[1] == "Et*3|(tt|)*6mL"


def test_what_no_step_feels_makes_no_other_set(tmp_path: Path) -> None:
    alike = '{"seed": 2, "bf16": true, "num-layers": 12, "train-iters": 50}'
    lines = [line("gpt/a", args='{"num-layers": 12, "bf16": true}'), line("gpt/b", args=alike)]
    other = line("gpt/c", args='{"num-layers": 12, "bf16": true, "clip-grad": 0.0}')
    found = megatron_tests.tests_of(written(tmp_path / "table.csv", *lines, other), tmp_path)
    assert [test.names for test in found] == [("gpt/a", "gpt/b"), ("gpt/c",)]
    assert "--train-iters 100" in " ".join(found[0].arguments)  # as the first has it


def test_a_test_s_own_file_says_its_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gpt" / "a"
    folder.mkdir(parents=True)
    (folder / "model_config.yaml").write_text(
        "MODEL_ARGS:\n  --num-layers: 12\n  --bf16: true\n  --swiglu: false\n"
        "  --recompute-modules: '[mlp moe_act]'\n"
        "  --save: /there\n  --data-path: /data\n  --ckpt-format: torch_dist\n  --vocab-file: gpt2-vocab.json\n"
        "  --train-iters: 50\n  --lr-decay-style: 'cosine'\n"
    )
    (test,) = megatron_tests.tests_of(written(tmp_path / "table.csv", line("gpt/a")), tmp_path)
    text = " ".join(test.arguments)
    assert "--num-layers 12 --bf16 --recompute-modules mlp moe_act --ckpt-format torch_dist" in text
    assert "--train-iters 50 --lr-decay-style cosine" in text and text.endswith("--vocab-size 50257")
    assert "--data-path none" in text and "/there" not in text and "--swiglu" not in text


@pytest.mark.parametrize(
    ("file", "size"),
    [
        # BERT's, of August 2026 and of files of 2024 and 2025; T5's, and GPT-2's.
        ("${DATA_PATH}/text/common_pile/v01_filtered_data/vocab.txt", 28996),
        ("${DATA_PATH}/text/the_pile/bert_shard00/vocab.txt", 28996),
        ("${DATA_PATH}/vocab.txt", 28996),
        ("${DATA_PATH}/bert-large-cased-vocab.txt", 28996),
        ("${DATA_PATH}/bpe/vocab.json", 50257),
    ],
)
def test_a_vocabulary_is_known_by_its_file(file: str, size: int) -> None:
    assert megatron_tests._vocabulary({"--vocab-file": file})[-1] == str(size)


@pytest.mark.parametrize(("value", "given"), [(0, False), (1, True)])
def test_what_megatron_has_no_more_is_left_out_where_it_did_nothing(value: int, given: bool) -> None:
    name = "--encoder-pipeline-model-parallel-size"
    assert (name in megatron_tests._arguments({name: value})) is given


def test_what_is_there_is_not_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []

    def capture(test: Any, folder: Path, job: Path, limit_s: float, given: Any) -> dict[str, Any]:
        del folder, limit_s, given
        captured.append(test.name)
        job.write_bytes(b"a graph")
        return {"error": "", "notes": ["said"], "capture_cpu_s": 1.0, "capture_wall_s": 2.0, "captured_by": "abc"}

    monkeypatch.setattr(megatron_tests, "_captured", capture)
    monkeypatch.setattr(megatron_tests, "_simulated", lambda *_: [{"id": len(captured)}])
    (test,) = megatron_tests.tests_of(written(tmp_path / "table.csv", line("gpt/a")), tmp_path)
    for anew, times in ((False, 1), (False, 1), (True, 2)):
        record = megatron_tests.run_test(test, tmp_path, tmp_path, 1.0, False, anew)
        assert len(captured) == times and record["notes"] == ["said"] and record["rows"] == [{"id": times}]
        assert record["captured_by"] == "abc" and record["simulated_by"] == megatron_tests.code()
        assert json.loads((tmp_path / f"{test.key}.json").read_text()) == json.loads(json.dumps(record))


def test_attention_of_another_library_is_captured_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[str, ...]] = []

    def capture(test: Any, folder: Path, job: Path, *_: Any) -> dict[str, Any]:
        del folder
        captured.append(test.arguments)
        job.write_bytes(b"a graph")
        return {"error": "", "notes": [], "capture_cpu_s": 1.0, "capture_wall_s": 2.0, "captured_by": "abc"}

    monkeypatch.setattr(megatron_tests, "_captured", capture)
    monkeypatch.setattr(megatron_tests, "_simulated", lambda *_: [])
    of = {"args": '{"deterministic-mode": true}'}
    lines = line("t5/a", **of), line("t5/a", "dev_dgx_a100", gpu="A100", **of)
    (test,) = megatron_tests.tests_of(written(tmp_path / "table.csv", *lines), tmp_path)
    for _ in range(2):
        megatron_tests.run_test(test, tmp_path, tmp_path, 1.0, False, False)
    assert captured == [test.arguments, (*test.arguments, "--attention-backend", "flash")]
    captured.clear()
    (test,) = megatron_tests.tests_of(written(tmp_path / "table.csv", lines[1]), tmp_path)
    for anew in (True, False):  # of which no measurement ran as it is
        record = megatron_tests.run_test(test, tmp_path, tmp_path, 1.0, False, anew)
    assert captured == [(*test.arguments, "--attention-backend", "flash")] and record["capture_cpu_s"] == 1.0


@pytest.mark.parametrize(
    ("gpu", "platform", "date", "arguments", "backend"),
    [
        ("A100", "lts_dgx_a100", "2025-05-01", "--deterministic-mode", "unfused"),
        ("A100", "lts_dgx_a100", "2025-11-06", "--deterministic-mode", "flash"),
        ("A100", "lts_dgx_a100", "2025-05-01", "", "flash"),
        ("A100", "lts_dgx_a100", "2025-05-01", "--deterministic-mode --transformer-impl local", ""),
        ("A100", "lts_dgx_a100", "2025-05-01", "--deterministic-mode --attention-backend unfused", ""),
        ("A100", "dev_dgx_a100", "2025-05-01", "--deterministic-mode", "flash"),
        ("H100", "dev_dgx_h100", "2025-05-01", "--deterministic-mode", ""),
        ("GB200", "dev_dgx_gb200", "2026-05-01", "--deterministic-mode", "flash"),
        ("GB200", "dev_dgx_gb200", "2026-05-01", "--deterministic-mode --attention-dropout 0.0", ""),
    ],
)
def test_which_library_ran_attention(gpu: str, platform: str, date: str, arguments: str, backend: str) -> None:
    test = megatron_tests.Test(
        name="t",
        names=("t",),
        script="s.py",
        arguments=tuple(arguments.split()),
        environment={},
        gpus=8,
        measured=(),
    )
    row = {"gpu": gpu, "platform": platform, "runs": [(date, 1.0)]}
    assert megatron_tests._backend(test, row) == backend


def test_what_another_machine_took_stands_apart() -> None:
    line = {"gpu": "H100", "iteration_s_median": "1.4", "mem_allocated_bytes": "7", "mem_max_allocated_bytes": "9"}
    own, other = Measured("2026-01-05", 1.0, 1.2), Measured("2026-05-05", 1.4, on_github=True)
    assert list(megatron_tests._by_machine(line, [other, own])) == [{**line, "runs": [("2026-01-05", 1.0)]}]
    here, there = megatron_tests._by_machine(line, [own, other])
    assert (here["gpu"], here["iteration_s_median"], here["iteration_s_p90"], here["mem_allocated_bytes"]) == (
        "H100", 1.0, 1.2, "7",
    )  # fmt: skip
    assert (there["gpu"], there["iteration_s_median"], there["mem_allocated_bytes"], there["runs"]) == (
        megatron_tests.ON_AWS, "1.4", 0, [("2026-05-05", 1.4)],
    )  # fmt: skip
    (alone,) = megatron_tests._by_machine(line, [other])
    assert (alone["gpu"], alone["mem_max_allocated_bytes"]) == (megatron_tests.ON_AWS, "9")
    assert megatron_tests.ON_AWS in megatron_page.PLATFORMS


def test_a_failed_simulation_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"error": "", "notes": [], "capture_cpu_s": 1.0, "capture_wall_s": 2.0}
    monkeypatch.setattr(megatron_tests, "_captured", lambda *_: said)
    (test,) = megatron_tests.tests_of(written(tmp_path / "table.csv", line("gpt/a")), tmp_path)
    record = megatron_tests.run_test(test, tmp_path, tmp_path, 1.0, False, True)
    assert record["error"].startswith("simulation: ") and not record["rows"]
    (first, second) = list(megatron_tests.summary([record]))
    assert first == "0 of 1 sets of arguments captured" and "simulation" in second


def test_a_run_s_spread_is_the_slow_iterations_over_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = SimpleNamespace(
        step_ps=10**12, memory=SimpleNamespace(programs={"every rank": 3}, at_rest={"every rank": 2})
    )
    monkeypatch.setattr("echograph.load", lambda _: None)
    monkeypatch.setattr("echograph.simulate", lambda *_: result)
    (test,) = megatron_tests.tests_of(written(tmp_path / "table.csv", line("gpt/a")), tmp_path)
    (found,) = megatron_tests._simulated(test, {"": tmp_path})
    assert (
        found["spread"] == pytest.approx(1.5)
        and found["predicted_s"] == 1.0
        and found["predicted_rest_bytes"] == 2
    )


def row(name: str, gpu: str = "H100", hidden: int = 512, **other: Any) -> dict[str, Any]:
    return {
        "id": name, "gpu": gpu, "hidden_size": hidden, "measured_s": 1.0, "predicted_s": 1.1, "spread": 1.0,
        "measured_peak_bytes": 100, "predicted_peak_bytes": 80, "measured_rest_bytes": 50,
        "predicted_rest_bytes": 51, **other,
    }  # fmt: skip


def test_the_page_has_what_counts_and_what_does_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the [report] extra")
    wrong = "mixtral/mixtral_8x7b_tp1_release@lts_dgx_a100"
    records = [
        {
            "name": "gpt/a",
            "gpus": 8,
            "error": "",
            "rows": [row("gpt/a@x"), row("gpt/a@y", hidden=4096)],
            "captured_by": "abc",
        },
        {"name": "mixtral/m", "gpus": 8, "error": "", "rows": [row(wrong, "A100", predicted_s=9.0)]},
        {"name": "gpt/b", "gpus": 8, "error": "echoc: --this|that: leave it out", "rows": []},
    ]
    part = megatron_page.page_part(records, tmp_path / "page")
    assert part.startswith(
        "2 of 3 sets of arguments are captured (67 %), 2 measurements are compared, captured by abc and code that "
        "nobody noted, simulated by code that nobody noted."
    )
    assert "| H100 | 2 | 2 | 10.0 % | +10.0 % | 1.00 | 20.0 % | -20.0 % | -20.0 % | 2.0 % | +2.0 % |" in part
    assert "| H100, hidden size 2,048 and more | 1 | 1 |" in part and "| A100 |" not in part
    assert "| gpt/b | --this\\|that: leave it out |" in part
    assert wrong in part
    assert {path.name for path in (tmp_path / "page").iterdir()} == {"megatron-step.png", "megatron-memory.png"}
    page = "kept\n<!-- megatron -->\nold\n<!-- end megatron -->\n"
    assert replace_part(page, "megatron", part) == f"kept\n<!-- megatron -->\n{part}<!-- end megatron -->\n"


def test_times_of_runs_that_were_not_steady_are_not_judged() -> None:
    rows = [row("gpt/a@x"), row("gpt/b@x", predicted_s=3.1, spread=1.5), row("gpt/c@x", "A100", spread=9.0)]
    (_, _, both, without) = megatron_page.errors_table(rows).splitlines()
    assert both.startswith("| H100 | 2 | 1 | 10.0 % | +10.0 % | 1.00 | 20.0 % |")
    assert without.startswith("| A100 | 1 | 0 |  |  |  | 20.0 % |")
    assert megatron_page.with_all(rows) == "of all runs the mean error is H100 110.0 %, A100 10.0 %"


def test_the_fastest_steady_run_of_a_set_stands_for_it() -> None:
    runs = [row("gpt/a@x", measured_s=2.0), row("gpt/a@y"), row("gpt/a@z", measured_s=0.1, spread=2.0)]
    records = [{"rows": runs}, {"rows": [row("gpt/b@x", predicted_s=0.7)]}, {"rows": []}]
    assert megatron_page.of_fastest(records) == (
        "Against the fastest run of each set alone: H100 20.0 %, bias -10.0 % (2 sets)."
    )
    assert megatron_page.of_fastest([]) == ""


@pytest.mark.parametrize(
    ("one", "other", "rank"),
    [((1, 2, 3), (10, 20, 30), 1.0), ((1, 2, 3), (3, 2, 1), -1.0), ((1, 2, 2, 3), (1, 3, 2, 4), 0.9487)],
)
def test_ranks_agree_or_not(one: tuple[float, ...], other: tuple[float, ...], rank: float) -> None:
    assert megatron_page.rank_correlation(one, other) == pytest.approx(rank, abs=1e-4)


def test_options_say_what_is_run_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert megatron_tests._again(file, "none")
    file.write_text(json.dumps({"error": "no"}))
    answers = {which: megatron_tests._again(file, which) for which in ("none", "failed", "simulations", "all")}
    assert answers == {"none": False, "failed": True, "simulations": True, "all": True}
