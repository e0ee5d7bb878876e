"""`echoprof comms` and `echoprof collectives` as a user meets them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echograph.ir.comms.record import FORMAT, CallSignature, EndLine, GroupLine, HeaderLine, encode
from echograph.profiler.comms.tracer import files_of
from echograph.profiler.fit.fabric import read_nccl_tests

BIN = Path(sys.executable).parent
SIZES = [4096, 8192, 16384]


def echoprof(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "echoprof"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        objects = [
            HeaderLine(format=FORMAT, version=(1, 0), rank=rank, world=2),
            GroupLine(name="0,1", ranks=(0, 1)),
            CallSignature(
                id=0, op="all_reduce", group="0,1", channel="0,1", bytes=4096, input_bytes=4096, output_bytes=4096
            ),
        ]
        row = json.dumps([0, 0, 10**18 + rank * 10**6, 0, 5 * 10**6 - rank * 10**6, 0]).encode() + b"\n"
        (folder / f"trace.{rank}.jsonl").write_bytes(
            b"".join(map(encode, objects)) + row + encode(EndLine(calls=1))
        )
    return folder


def test_a_report_in_every_form(traces: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("csv", "html", "chrome")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    done = echoprof("comms", "report", traces, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 calls on 2 ranks in 1 group;")
    (row,) = csv.DictReader(files["csv"].open())
    assert (row["operation"], row["calls"], float(row["wait_s"])) == ("all_reduce", "2", pytest.approx(1e-3))
    assert len([e for e in json.loads(files["chrome"].read_text())["traceEvents"] if e["ph"] == "X"]) == 2
    assert files["html"].read_text().startswith("<!doctype html>")
    told = json.loads(echoprof("comms", "report", traces, "--json").stdout)
    assert (told["calls"], told["operations"][0]["transfer_s"]) == (2, pytest.approx(8e-3))


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("comms", "report", "nowhere"), 1, "nowhere: no such file or folder"),
        (("comms", "--", "no-such-program"), 2, "cannot run 'no-such-program'"),
        (("comms", "--timeout", "0", "--", "true"), 2, "--timeout: 0"),
        (("comms", "--timeout", "nan", "--", "true"), 2, "--timeout: nan"),
        (("collectives", "--ops", "all_redcue"), 2, "did you mean 'all_reduce'?"),
        (("collectives", "--sizes", "1M:1K"), 2, "--sizes: '1M:1K'"),
        (("collectives", "--sizes", "many"), 2, "--sizes: 'many'"),
        (("collectives",), 2, "torchrun"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], status: int, said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [BIN / "echoprof", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_program_runs_to_its_own_exit_status(tmp_path: Path) -> None:
    done = echoprof(
        "comms", "-o", tmp_path / "t" / "trace.jsonl", "--", sys.executable, "-c", "print(1); raise SystemExit(7)"
    )
    assert (done.returncode, done.stdout) == (7, "1\n")
    assert done.stderr == "nothing traced: no process began a collective\n"


def test_where_traces_lie_is_said(tmp_path: Path) -> None:
    for name in ("trace[1].0.jsonl", "trace[1].restart1.0.jsonl", "trace1.0.jsonl", "other.0.jsonl"):
        (tmp_path / name).touch()
    done = echoprof("comms", "-o", tmp_path / "trace[1].jsonl", "--", "true")
    assert done.stderr == "nothing traced: no process began a collective\n", "those are of a run before"
    again = f"open({str(tmp_path / 'trace[1].0.jsonl')!r}, 'w').write('again')"
    done = echoprof("comms", "-o", tmp_path / "trace[1].jsonl", "--", sys.executable, "-c", again)
    assert done.stderr == f"traced into {tmp_path}: echoprof comms report {tmp_path}\n"
    assert [path.name for path in files_of(tmp_path / "trace[1].jsonl")] == [
        "trace[1].0.jsonl",
        "trace[1].restart1.0.jsonl",
    ]
    everything = sorted(path.name for path in tmp_path.iterdir())
    assert [path.name for path in files_of(tmp_path / "{rank}.0.jsonl")] == everything


@pytest.mark.torch
@pytest.mark.slow
def test_measured_collectives_are_read_back_as_nccl_tests_output(tmp_path: Path) -> None:
    ops = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,reduce,send_recv"
    words = [
        "collectives",
        "--sizes",
        "4K:16K",
        "--ops",
        ops,
        "--budget",
        "0.01",
        "-o",
        tmp_path / "logs",
        "--json",
    ]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    shared = {**os.environ, **address, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [BIN / "echoprof", *map(str, words)],
            stdout=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    records = json.loads(told[0])
    assert told[1] == ""
    for name in ops.split(","):
        rows = read_nccl_tests(tmp_path / "logs" / f"{name}.log")
        ours = [record for record in records if record["operation"] == name]
        found = [(row.kind, row.ranks, row.nodes, row.size_bytes) for row in rows]
        assert found == [(name, 2, 1, size) for size in SIZES]
        seconds = [pytest.approx(record["seconds"], rel=1e-3, abs=1e-8) for record in ours]
        assert [row.seconds for row in rows] == seconds
