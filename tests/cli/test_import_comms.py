"""A trace of collectives through the commands: imported, replayed, on another network and on more ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echograph.ir.comms.record import FORMAT, CallSignature, GroupLine, HeaderLine, RecordLine, encode

ROWS = [[0, 0, 0, 0, 400_000, 0], [0, 1, 1_000_000, 0, 400_000, 0]]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two ranks that reduce 1 MiB in 400 us, work 600 us, and reduce again."""
    folder = tmp_path / "traces"
    folder.mkdir()
    what = CallSignature(
        id=0, op="all_reduce", group="0,1", channel="0,1", bytes=1 << 20, input_bytes=0, output_bytes=0
    )
    for rank in range(2):
        header = HeaderLine(format=FORMAT, version=(1, 0), rank=rank, world=2, host="here")
        said: list[RecordLine] = [header, GroupLine(name="0,1", ranks=(0, 1)), what]
        lines = [*map(encode, said), *(json.dumps(row).encode() + b"\n" for row in ROWS)]
        (folder / f"trace.{rank}.jsonl").write_bytes(b"".join(lines))
    return folder


def test_a_trace_is_replayed_elsewhere(cli: Callable[..., Any], traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.pb"
    summary = cli("echoc", "import", "comms", traces, "-o", path, "--json").json()
    assert (summary["level"], summary["ranks"], summary["operations"]) == ("job", 2, 6)
    assert [note.partition(",")[0] for note in summary["notes"]] == ["the job is the whole trace"]
    asked: tuple[list[str], ...] = ([], ["--model-communication"], ["--gpus", "8"], ["--scale", "comm=0.5"])
    here, modelled, eight, half = (cli("echosim", "run", path, "--json", *options).json() for options in asked)
    assert [result["gpus"] for result in (here, modelled, eight, half)] == [2, 2, 8, 2]
    # 1.4 ms, and what the host of the cluster takes to issue a call.
    assert here["step_time_s"] == pytest.approx(1.4e-3, rel=0.02)
    assert half["step_time_s"] == pytest.approx(here["step_time_s"] - 400e-6)
    assert 600e-6 < modelled["step_time_s"] < eight["step_time_s"] < half["step_time_s"]
    assert here["durations"]["imported"] == 1.0
    assert modelled["durations"]["fitted"] > 0


def test_a_plan_for_a_trace_is_refused(cli: Callable[..., Any], traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.pb"
    assert cli("echoc", "import", "comms", traces, "-o", path).status == 0
    refused = cli("echosim", "run", path, "--gpus", "8", "--tp", "2")
    assert refused.status == 2
    assert "a job graph has its plan already" in refused.err
    (traces / "trace.1.jsonl").unlink()
    missing = cli("echoc", "import", "comms", traces, "-o", path)
    assert missing.status == 1
    assert "of 2 ranks those of 1 are missing" in missing.err
