"""Names, files and folders of ByteProfile and dPRO."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from profiled_jobs import (
    FW_A,
    FW_B,
    MESSAGES,
    NCCL,
    SERVER,
    byteprofile,
    complete,
    dpro_byteps,
    dpro_nccl,
    server_profile,
    sources,
    write,
)

from echograph.errors import DataError, InputError
from echograph.profiler.byteprofile.reader import (
    EventLabel,
    category_of,
    complete_events,
    events_of,
    find_job,
    gradient_names,
    joined,
    parse,
)
from echograph.profiler.byteprofile.report import statistics

US = 10**6


@pytest.mark.parametrize(
    ("name", "key", "expected", "shown"),
    [
        ("FW.conv0", "3", EventLabel("", "FW", "FW.conv0"), "FW.conv0"),
        ("Comm.conv.weight", "total", EventLabel("", "Comm", "Comm.conv.weight"), "Comm.conv.weight"),
        ("Comm.w.PUSH", "9", EventLabel("", "Comm", "Comm.w", "PUSH", "9"), "Comm.w.PUSH.9"),
        ("Comm.a.SUM", "total", EventLabel("", "Comm", "Comm.a.SUM"), "Comm.a.SUM"),
        ("Comm.PUSH", "total", EventLabel("", "Comm", "Comm.PUSH"), "Comm.PUSH"),
        ("rank0.BW.a", "0", EventLabel("rank0.", "BW", "BW.a"), "rank0.BW.a"),
        ("wk1.rank0.Comm.w.SUM", "9", EventLabel("wk1.rank0.", "Comm", "Comm.w", "SUM"), "wk1.rank0.Comm.w.SUM"),
        (
            "host0.rank1->Comm.1+2.SEND~>0_1_6_0",
            "0",
            EventLabel("host0.rank1->", "Comm", "Comm.1+2", "SEND", "0_1_6_0", "~>"),
            "host0.rank1->Comm.1+2.SEND~>0_1_6_0",
        ),
        ("Comm.1+2.QUEUE", "7", EventLabel("", "Comm", "Comm.1+2", "QUEUE"), "Comm.1+2.QUEUE"),
        ("UPDATE_CAL", "0", EventLabel("", "UPDATE", "UPDATE_CAL"), "UPDATE_CAL"),
        ("I/O_0", "0", EventLabel("", "I/O", "I/O_0"), "I/O_0"),
        ("STEP", "0", EventLabel("", "STEP", "STEP"), "STEP"),
        ("push-9", "9", EventLabel("", "push", "push-9"), "push-9"),
        ("aten::mm", "1", EventLabel("", "cpu_op", "aten::mm"), "aten::mm"),
    ],
)  # fmt: skip
def test_names_are_taken_apart(name: str, key: str, expected: EventLabel, shown: str) -> None:
    found = parse(name, "cpu_op", key)
    assert found == expected
    assert found.name == shown


def test_what_is_no_category_of_a_step_is_none() -> None:
    assert [category_of(name) for name in ("BWD", "Command", "STEPS", "FW", "OUTPUT0", "UPDATE_3")] == [
        "", "", "", "FW", "OUTPUT", "UPDATE",
    ]  # fmt: skip


def test_begin_and_end_are_paired_by_thread_and_name(tmp_path: Path) -> None:
    notes: list[str] = []
    path = server_profile(tmp_path / "server_profile.json")
    found = [(event["name"], event["ts"], event["dur"]) for event in complete_events(path, notes)]
    # The last begin that is open: 20 - 5, 30 - 0; one end and one begin stand alone.
    assert found == [("push-9", 5, 15), ("push-9", 0, 30), ("pull-9", 40, 7)]
    assert [note.partition(": ")[2] for note in notes] == [
        "1 events begin and do not end: they are left out",
        "1 events end and did not begin: they are left out",
    ]


def test_an_end_without_a_name_ends_the_last_begin(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"ph": "b", "name": "outer", "ts": 0, "pid": 1, "tid": 1, "args": {"a": 1}},
        {"ph": "b", "name": "inner", "ts": 2.5, "pid": 1, "tid": 1},
        {"ph": "e", "ts": 4, "pid": 1, "tid": 1, "args": {"b": 2}},
        {"ph": "e", "ts": 9, "pid": 1, "tid": 1, "args": {"b": 3}},
        {"ph": "X", "name": "no time", "ts": None, "dur": 3},
        {"ph": "i", "name": "instant", "ts": 3},
    ]
    notes: list[str] = []
    found = list(complete_events(write(tmp_path / "t.json", events), notes))
    assert [(e["name"], e["dur"], e["args"]) for e in found] == [
        ("inner", 1.5, {"b": 2}),
        ("outer", 9, {"a": 1, "b": 3}),
    ]
    assert notes == [f"{tmp_path / 't.json'}: 1 events have no time: they are left out"]


@pytest.mark.parametrize("older", [False, True])
def test_a_worker_has_its_gpus_in_order_whatever_the_folders_are_called(tmp_path: Path, older: bool) -> None:
    found = find_job(byteprofile(tmp_path / "worker", older=older, worker=3))
    assert [(gpu.worker, gpu.rank, gpu.folder.name) for gpu in found.gpus] == [
        (0, 0, "6_0" if older else "0"),
        (0, 1, "7_1" if older else "1"),
    ]
    assert found.workers == 1


@pytest.mark.parametrize("names", [("0_0", "1_1", "2_0", "3_1"), ("0_0", "0_1", "1_0", "1_1")])
def test_several_workers_in_one_older_folder_are_told_apart(
    worker: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    for number, name in enumerate(names):
        shutil.copytree(worker / str(number % 2), tmp_path / "all" / name)
    places = [(gpu.worker, gpu.rank) for gpu in find_job(tmp_path / "all").gpus]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_ten_gpus_are_in_the_order_of_their_numbers(worker: Path, tmp_path: Path) -> None:
    for number in range(11):
        shutil.copytree(worker / "0", tmp_path / "many" / str(number))
    assert [gpu.rank for gpu in find_job(tmp_path / "many").gpus] == list(range(11))


def test_a_folder_of_a_gpu_and_a_file_are_jobs_of_one(worker: Path) -> None:
    file = worker / "1" / "bps_trace_local_rank1_2step.json"
    for path in (worker / "1", file):
        found = find_job(path)
        assert [(gpu.rank, gpu.files) for gpu in found.gpus] == [(1, (file,))]
        assert all(not label.prefix for label in found.events().labels)


def test_of_several_final_traces_the_one_of_the_last_steps_counts(worker: Path) -> None:
    gpu = worker / "0"
    write(gpu / "bps_trace_local_rank0_10step.json", [complete("FW.z", 0, 7, "operator")])
    (label,) = find_job(gpu).events().labels
    assert label.operation == "FW.z"


def test_events_of_a_job_say_whose_they_are(job: Path) -> None:
    prefixes = {label.prefix for label in find_job(job).events().labels}
    assert prefixes == {f"wk{w}.rank{r}." for w in range(2) for r in range(2)}


def test_a_trace_of_dpro_is_made_of_its_files(tmp_path: Path) -> None:
    found = statistics(find_job(dpro_nccl(tmp_path / "trial") / "host1" / "0").events())
    averages = {label.name.removeprefix("host1.rank0->"): ps / US for label, ps in found.average_ps().items()}
    assert averages.pop("FW.a") == sum(FW_A) / 2
    assert averages.pop("FW.b") == FW_B
    assert {f"Comm.0+1.{part}": dur for part, dur in NCCL.items()}.items() <= averages.items()
    assert averages["Comm.0+1.SEND~>0_1_6_0"] == 11
    assert {label.prefix for label in found.labels} == {"host1.rank0->"}


def test_messages_and_servers_of_byteps_are_read(tmp_path: Path) -> None:
    found = find_job(dpro_byteps(tmp_path / "trial"))
    averages = {label.name: ps / US for label, ps in statistics(found.events()).average_ps().items()}
    for part, dur in MESSAGES.items():
        assert averages[f"worker_0->Comm.wa.{part}"] == averages[f"worker_1->Comm.wb.{part}~>PART1"] == dur
    for part, dur in SERVER.items():
        assert averages[f"server_0->Comm.wa.{part}"] == dur


def test_times_since_the_epoch_are_exact(tmp_path: Path) -> None:
    epoch = 1_700_000_000_000_000
    events = [complete("FW.a", epoch + at, 0.5, "operator") for at in (0, 7)]
    found = events_of(write(tmp_path / "t.json", events))
    assert found.start.tolist() == [0, 7 * US]
    assert found.origin == epoch * US
    later = events_of(write(tmp_path / "u.json", [complete("BW.a", epoch + 9, 1, "operator")]))
    assert joined([found, later]).start.tolist() == [0, 7 * US, 9 * US]


def test_clocks_that_have_nothing_in_common_are_noted(tmp_path: Path) -> None:
    far = [events_of(write(tmp_path / f"{at}.json", [complete("FW.a", at, 1, "operator")])) for at in (0, 10**16)]
    assert "clocks are more than 106 days apart" in joined(far).notes[0]


def test_lists_of_gradients(tmp_path: Path) -> None:
    gpu = sources(tmp_path / "0")
    assert gradient_names([tmp_path, gpu]) == ("wa", "wb")
    (gpu / "gradient_name_list.txt").write_text("wb\nwa\n\n")
    assert gradient_names([gpu]) == ("wb", "wa")
    (gpu / "gradient_name_list.txt").write_text("1 -> b\n0 -> a\n")
    assert gradient_names([gpu]) == ("a", "b")
    (gpu / "gradient_name_list.txt").unlink()
    write(gpu / "metadata.json", {"gradient_name_list": ["x", "y"]})
    assert gradient_names([gpu]) == ("x", "y")
    assert gradient_names([tmp_path]) == ()


def test_wrong_input_is_refused(tmp_path: Path, worker: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no trace in it"):
        find_job(tmp_path / "empty")
    with pytest.raises(InputError, match="no such file or folder"):
        find_job(tmp_path / "nowhere")
    shutil.copytree(worker / "1", worker / "gpu1")
    with pytest.raises(DataError, match="both of local rank 1"):
        find_job(worker)
    (tmp_path / "broken.json").write_text('{"traceEvents": [{"ph": "X", "name": }, {"ph": "X", "ts": 0}]}')
    with pytest.raises(DataError, match="is broken"):
        events_of(tmp_path / "broken.json")
    for ts, dur in (("soon", 1), (0, -1), (10**400, 1), (float("nan"), 1), (True, "x")):
        event = complete("FW.a", 0, 1, "operator") | {"ts": ts, "dur": dur}
        with pytest.raises(DataError, match="are no times in us"):
            events_of(write(tmp_path / "t.json", [event]))
    with pytest.raises(DataError, match="more than 106 days"):
        events_of(write(tmp_path / "t.json", [complete("FW.a", at, 1, "operator") for at in (0, 1e14)]))
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "gradient_name_list.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is no text"):
        gradient_names([tmp_path / "list"])


def test_pytorch_traces_have_the_ranks_that_they_say(tmp_path: Path) -> None:
    for name, rank in (("a", 1), ("b", 0)):
        kernel = complete("gemm", 5.125, 2.5 + rank, "kernel") | {"args": {"stream": 7}}
        trace = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": [kernel]}
        write(tmp_path / f"{name}.json.gz", trace)
    found = find_job(tmp_path)
    assert [(gpu.rank, gpu.files[0].name) for gpu in found.gpus] == [(0, "b.json.gz"), (1, "a.json.gz")]
    averages = {label.name: ps for label, ps in statistics(found.events()).average_ps().items()}
    assert averages == {"rank0.gemm": 2.5 * US, "rank1.gemm": 3.5 * US}
    assert {label.category for label in found.events().labels} == {"kernel"}


def test_ranks_in_one_simulated_trace_are_apart(tmp_path: Path) -> None:
    events = [complete("gemm", 0, 2 + pid, "kernel", pid=pid) for pid in (0, 1)]  # type: ignore[arg-type]
    path = write(tmp_path / "t.json", {"processRanks": {"0": 0, "1": 8}, "traceEvents": events})
    averages = {label.name: ps for label, ps in statistics(find_job(path).events()).average_ps().items()}
    assert averages == {"rank0.gemm": 2 * US, "rank8.gemm": 3 * US}
