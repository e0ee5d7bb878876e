"""Real jobs over gloo: nothing missed, nothing twice, the same names on all ranks, and trouble survived."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from comms_jobs import run_job

from echograph.ir.comms.bandwidth import base_operation
from echograph.profiler.comms.report import Report, report_on

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("raw")
    return run_job("raw", folder, warm), folder


# What workers.raw calls, counted by hand: the message of the n-th size is of 4 n bytes a rank.
BY_HAND = [
    ["all_gather", "0,1", 40, 1],
    ["all_gather_into_tensor", "0,1", 48, 1],
    ["all_reduce", "0,1", 4, 1],
    ["all_reduce", "0,1", 8, 1],
    ["all_reduce", "0,1", 16, 1],
    ["all_reduce", "0,1#2", 12, 1],
    ["all_reduce_coalesced", "0,1", 4400, 1],
    ["all_to_all", "0,1", 112, 1],
    ["all_to_all_single", "0,1#3", 104, 1],
    ["barrier", "0,1", 0, 1],
    ["broadcast", "0,1", 36, 1],
    ["gather", "0,1", 88, 1],
    ["monitored_barrier", "0,1", 0, 1],
    ["reduce", "0,1", 40, 1],
    ["reduce_scatter", "0,1", 56, 1],
    ["reduce_scatter_tensor", "0,1#2", 64, 1],
    ["scatter", "0,1", 96, 1],
    ["recv", "0,1", 68, 1],
    ["send", "0,1", 68, 1],
]
MESSAGES = [[["send", "0,1", 60, 1], ["send", "0,1", 64, 1]], [["recv", "0,1", 60, 1], ["recv", "0,1", 64, 1]]]


def test_every_kind_of_call_is_counted_as_by_hand(raw: tuple[list[Any], Path]) -> None:
    for rank, answer in enumerate(raw[0]):
        alone = [["all_reduce", "1", 4, 1]] if rank == 1 else []
        assert answer["plain"] == sorted(BY_HAND + MESSAGES[rank] + alone)


def test_objects_and_calls_without_a_wait_are_there_and_a_refused_one_is_not(raw: tuple[list[Any], Path]) -> None:
    for answer in raw[0]:
        assert answer["refused"]
        added = [call for call in answer["all"] if call not in answer["plain"]]
        assert [call[2] for call in added if call[0] == "all_reduce"] == [2800, 3200, 3600]
        # An object travels as its length and its bytes.
        assert Counter(call[0] for call in added) == {"all_gather": 2, "broadcast": 2, "all_reduce": 3}
        assert answer["calls"] == sum(call[3] for call in answer["all"])


def test_results_and_work_are_as_without_a_tracer(raw: tuple[list[Any], Path]) -> None:
    assert [answer["results"] for answer in raw[0]] == [[[3.0], [True, True]]] * 2


def test_ddps_reducer_is_seen(raw: tuple[list[Any], Path]) -> None:
    for answer in raw[0]:
        assert ["broadcast", "0,1", 4 * 1010, 1] in answer["ddp"]
        assert ["all_reduce", "0,1", 4 * 1010, 5] in answer["ddp"]


def test_the_flight_recorder_has_seen_the_same(raw: tuple[list[Any], Path]) -> None:
    for rank, answer in enumerate(raw[0]):
        told: Counter[tuple[str, str]] = Counter()
        names = {"0": "0,1", "1": "0,1#2", "2": "1", "3": "0,1#3"}
        for operation, group, _ in answer["recorded"]:
            told[base_operation(operation.partition(":")[2]), names[group]] += 1
        ours: Counter[tuple[str, str]] = Counter()
        for operation, group, _, n in answer["all"]:
            # gloo's recorder leaves out messages and monitored barriers, and shows a scattered sum as what gloo
            # makes of it: one sum over all for each rank's part, or one for a single tensor.
            if operation not in ("send", "recv", "monitored_barrier"):
                scattered = operation == "reduce_scatter"
                name = "all_reduce" if operation.startswith("reduce_scatter") else base_operation(operation)
                ours[name, group] += n * (2 if scattered else 1)
        assert told == ours, rank


def test_ranks_name_the_same_calls_alike(raw: tuple[list[Any], Path]) -> None:
    numbered = []
    for rank in range(2):
        values = [json.loads(line) for line in (raw[1] / "traces" / f"raw.{rank}.jsonl").read_text().splitlines()]
        signatures = {v["id"]: v for v in values if isinstance(v, dict) and v["line"] == "what"}
        calls = {(signatures[v[0]]["channel"], v[1]): signatures[v[0]] for v in values if isinstance(v, list)}
        numbered.append(calls)
    common = numbered[0].keys() & numbered[1].keys()
    assert numbered[1].keys() - common == {("1", 0)}
    assert numbered[0].keys() == common
    pairs = [(numbered[0][key], numbered[1][key]) for key in common]
    assert all(a["bytes"] == b["bytes"] or "object" in a["api"] for a, b in pairs)
    assert all({a["op"], b["op"]} in ({a["op"]}, {"send", "recv"}) for a, b in pairs)


def test_async_calls_end_when_they_are_done(raw: tuple[list[Any], Path]) -> None:
    """Waited for half a second later, or never: the end is the completion's, and nothing of it was exposed."""
    for rank in range(2):
        values = [json.loads(line) for line in (raw[1] / "traces" / f"raw.{rank}.jsonl").read_text().splitlines()]
        sizes = {v["id"]: v["bytes"] for v in values if isinstance(v, dict) and v["line"] == "what"}
        rows = {sizes[v[0]]: v for v in values if isinstance(v, list)}
        (*_, start, end, wait) = rows[3200]
        assert 0 <= start <= end < 400e6 < wait
        assert rows[2800][4] >= 0


def test_a_block_that_the_backend_refuses_does_not_begin(raw: tuple[list[Any], Path]) -> None:
    for rank in range(2):
        values = [json.loads(line) for line in (raw[1] / "traces" / f"raw.{rank}.jsonl").read_text().splitlines()]
        (what,) = [v for v in values if isinstance(v, dict) and v["line"] == "what" and v["bytes"] == 3600]
        (row,) = [v for v in values if isinstance(v, list) and v[0] == what["id"]]
        assert not what.get("coalesced", False) and row[4] > 0


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> list[Any]:
    return run_job("frameworks", tmp_path_factory.mktemp("frameworks"), warm)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor"])
def test_frameworks_are_counted_as_pytorch_counts(frameworks: list[Any], name: str) -> None:
    for answer in frameworks:
        ours: Counter[str] = Counter()
        for operation, _, _, n in answer[name]["counts"]:
            ours[base_operation(operation)] += n
        assert ours == answer[name]["debug"]
        assert sum(ours.values()) > 0


@pytest.mark.slow
def test_bytes_are_conserved(frameworks: list[Any]) -> None:
    for answer in frameworks:
        parameters = answer["bytes"]
        # DDP sends every parameter once when it is made, and every gradient once a step.
        assert ["broadcast", "0,1", parameters, 1] in answer["ddp made"]["counts"]
        assert answer["ddp"]["counts"] == [["all_reduce", "0,1", parameters, 1]]
        moved: Counter[str] = Counter()
        for operation, _, size, n in answer["fsdp2"]["counts"]:
            moved[base_operation(operation)] += size * n
        # FSDP2 gathers for both passes, and scatters each gradient once.
        assert moved == {"all_gather": 2 * parameters, "reduce_scatter": parameters}
        assert answer["tensor"]["counts"] == [["all_reduce", "0,1", 4 * 64 * 4, 1]]
        assert answer["compiled"]["counts"] == [["all_gather_into_tensor_coalesced", "0,1", 2 * 10 * 4, 1]]


@pytest.mark.slow
def test_a_pipeline_sends_what_its_other_stage_receives(frameworks: list[Any]) -> None:
    sent, received = (
        [
            Counter({size: n for operation, _, size, n in answer["pipeline"]["counts"] if operation == side})
            for answer in frameworks
        ]
        for side in ("send", "recv")
    )
    assert sent == received[::-1]
    # Two samples of 256 activations, thrice, and their gradients back.
    assert sent[0][2 * 256 * 4] == sent[1][2 * 256 * 4] == 3


@pytest.mark.slow
def test_four_ranks_in_halves_of_two_kinds_and_fsdp1(tmp_path: Path, warm: Path) -> None:
    answers = run_job("four", tmp_path, warm, ranks=4)
    parameters = 4 * (64 * 256 + 256)
    for rank, answer in enumerate(answers):
        row, column = ("0,1", "2,3")[rank // 2], ("0,2", "1,3")[rank % 2]
        message = ["recv" if rank % 2 else "send", "0-3", 28, 1]
        assert answer["groups"] == sorted([["all_reduce", row, 40, 1], ["all_reduce", column, 80, 2], message])
        # The outermost unit stays gathered between the passes; its gradient is scattered once.
        moved: Counter[str] = Counter()
        for operation, group, size, n in answer["fsdp1"]:
            assert group == "0-3"
            moved[base_operation(operation)] += size * n
        assert moved == {"all_gather": parameters, "reduce_scatter": parameters}
    report = report_on(tmp_path / "traces")
    assert report.problems == {} and report.unfinished == []
    merged = {
        row["operation"]: (row["merged"], row["calls"]) for row in report.operations if row["bytes"] in (40, 80)
    }
    assert all(both == calls for both, calls in merged.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "job"), [("deepspeed", "deepspeed_zero"), ("megatron.core", "megatron_tensor_parallel")]
)
def test_libraries_are_counted_as_pytorch_counts(package: str, job: str, tmp_path: Path, warm: Path) -> None:
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"needs {package}")
    for answer in run_job(job, tmp_path, warm):
        for part in [answer] if "debug" in answer else answer.values():
            ours: Counter[str] = Counter()
            for operation, _, _, n in part["counts"]:
                ours[base_operation(operation)] += n
            assert ours == part["debug"]
            assert sum(ours.values()) > 0


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> tuple[Report, Path]:
    folder = tmp_path_factory.mktemp("late")
    run_job("late", folder, warm)
    return report_on(folder / "traces"), folder / "traces"


def test_a_late_rank_shows_as_wait_and_not_as_transfer(late: tuple[Report, Path]) -> None:
    report, _ = late
    (reduced,) = [row for row in report.operations if row["operation"] == "all_reduce"]
    assert (reduced["calls"], reduced["merged"], reduced["bytes"]) == (10, 10, 64 << 20)
    # Rank 0 waited for the 0.4 s that rank 1 slept.
    assert reduced["wait_s"] > 0.35
    assert reduced["mean_skew_s"] * 10 / 2 > 0.35
    assert reduced["transfer_s"] + reduced["wait_s"] == pytest.approx(reduced["total_s"])
    slow, punctual = report.ranks[1], report.ranks[0]
    assert slow["lateness_s"] > max(0.35, punctual["lateness_s"])
    assert punctual["wait_s"] > max(0.35, slow["wait_s"])
    assert report.problems == {} and report.unfinished == [] and report.stuck == []


def test_transfer_is_alike_on_all_ranks(late: tuple[Report, Path]) -> None:
    from echograph.profiler.comms.readers import find_sources
    from echograph.profiler.comms.report import Merge, wait_and_transfer

    merge = Merge(find_sources(late[1])[0])
    transfers: dict[int, list[float]] = {}
    for batch in merge.batches():
        for row, moved in enumerate(wait_and_transfer(batch)[1]):
            if merge.signatures[batch.kind[row]].bytes:
                transfers.setdefault(int(batch.sequence[row]), []).append(moved)
    assert len(transfers) == 5
    # Of two ranks on one loaded machine one may be woken late, now and then: the middle one is what counts.
    apart = sorted(abs(a - b) / max(a, b) for a, b in transfers.values())
    assert apart[2] < 0.05


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    run_job("killed", folder, warm, check=False)
    return folder


@pytest.mark.slow
def test_of_a_killed_rank_what_it_did_is_reported(killed: Path) -> None:
    report = report_on(killed / "traces")
    (reduced,) = [row for row in report.operations if row["operation"] == "all_reduce"]
    assert reduced["merged"] == 6
    assert [file["complete"] for file in report.files] == [True, False]
    assert report.problems["files without an end: the run was killed, or goes on"] == 1


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("stuck")
    return run_job("stuck", folder, warm), folder


@pytest.mark.slow
def test_the_watchdog_says_who_is_missing_and_stops_nothing(stuck: tuple[list[Any], Path]) -> None:
    answers, folder = stuck
    assert answers == [[2.0] * 10] * 2
    said = [line for line in (folder / "stuck.0.log").read_text().splitlines() if "has not ended" in line]
    assert len(said) == 1
    assert "rank 0: all_reduce 1 of 0,1 (40 bytes, workers.py:" in said[0]
    assert "arrived: 0; not arrived: 1" in said[0]
    assert "has not ended" not in (folder / "stuck.1.log").read_text()
    report = report_on(folder / "traces")
    assert [(s["rank"], s["sequence"], s["missing"]) for s in report.stuck] == [(0, 1, [1])]
    # It did end after all.
    assert report.unfinished == []
    assert report.ranks[0]["wait_s"] > 2


@pytest.mark.slow
def test_a_script_that_knows_of_no_tracer_is_traced_from_outside(tmp_path: Path) -> None:
    import sys

    from echograph.profiler.comms.launch import run_traced

    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden_one_ran = True\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys; assert sys.hidden_one_ran\n"
        "import torch.distributed as dist, torch\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(10)); sys.exit(7)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        assert run_traced([sys.executable, str(script)], tmp_path / "out" / "trace.jsonl", 60)[0] == 7
    report = report_on(tmp_path / "out")
    assert [(row["operation"], row["bytes"]) for row in report.operations] == [("all_reduce", 40)]
    assert report.files[0]["complete"]
