"""`echoprof record -- PROGRAM`: the program is its own, and what it leaves can be read."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from recorded_jobs import PROGRAMS, metadata, record, tool

pytestmark = pytest.mark.torch

SMALL = ("--layers", 1, "--width", 64, "--length", 32)


def test_output_and_exit_code_are_the_programs_own(tmp_path: Path) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    done = tool("echoprof", "record", "--dir", tmp_path / "r", "--", sys.executable, "-c", script, check=False)
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert done.stderr.splitlines()[0] == "err"
    assert "nothing recorded: no process came to step 9" in done.stderr
    assert not (tmp_path / "r").exists()


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    done = tool("echoprof", "record", "--dir", tmp_path / "r", "--", "no-such-program", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["echoprof: cannot run 'no-such-program': No such file or directory"]
    done = tool("echoprof", "record", "--start-step", 3, "--end-step", 3, "--", "true", check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_byteprofiles_variables_record_a_job(tmp_path: Path) -> None:
    variables = {
        "BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "2", "BYTEPS_TRACE_END_STEP": "4",
        "BYTEPS_TRACE_DIR": str(tmp_path / "byteps"),
    }  # fmt: skip
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    tool("echoprof", "record", "--", *launch, PROGRAMS / "ddp.py", *SMALL, "--steps", 5, **variables)
    for rank in (0, 1):
        said = metadata(tmp_path / "byteps", rank)
        assert said["complete"] and (said["start_step"], said["end_step"], said["world_size"]) == (2, 4, 2)


@pytest.mark.slow
def test_a_job_that_fails_leaves_files_that_can_be_read(tmp_path: Path) -> None:
    arguments = (*SMALL, "--steps", 9, "--fail-at", 4)
    done = record(tmp_path, PROGRAMS / "ddp.py", *arguments, steps=(2, 8), check=False)
    assert done.returncode == 1 and "the script fails here" in done.stderr
    for rank in (0, 1):
        said = metadata(tmp_path, rank)
        assert not said["complete"] and (said["start_step"], said["end_step"]) == (2, 8)
        lines = (tmp_path / str(rank) / "comms.jsonl").read_text().splitlines()
        assert all(json.loads(line) for line in lines)
    # The rank that failed had reached its end in order.
    with gzip.open(tmp_path / "1" / "trace.json.gz") as stream:
        names = {event["name"] for event in json.load(stream)["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= names
