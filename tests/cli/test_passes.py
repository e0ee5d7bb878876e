"""`--passes`: the passes of a plan said themselves, and those of a stranger, whose file is all that is new."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echograph.ir import serde
from echograph.ir.types import OpKind

STRANGER = '''
"""When gradient buckets are reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from echograph.ir.graph import JobGraph, Program
from echograph.ir.types import OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOrder:
    """Holds the reduction of a gradient bucket back until some of the following buckets are full, too.

    Attributes:
        hold: how many.
    """

    name: ClassVar[str] = "bucket_order"

    hold: int = 1

    def __call__(self, graph: JobGraph) -> JobGraph:
        """The job with its reductions later among the calls of its programs, in their order."""
        return replace(graph, programs=tuple(self._held(graph, program) for program in graph.programs))

    def _held(self, graph: JobGraph, program: Program) -> Program:
        calls, ops = program.calls, graph.ops
        alone = (calls[:, 2] - calls[:, 1] == 1) & (ops.kind[calls[:, 1]] == OpKind.COLLECTIVE)
        when = np.arange(len(calls))
        reductions = np.flatnonzero(alone)
        later = np.append(reductions[self.hold :], np.repeat(reductions[-1:], self.hold))
        when[reductions] = later[: len(reductions)]
        return replace(program, calls=calls[np.argsort(when, kind="stable")])
'''
LIST = (
    "data_parallel{replicas=8,bucket_bytes=20000,first_bucket_bytes=4000,gradient_as_bucket_view=true} "
    "my_passes.bucket_order:BucketOrder"
)


def reductions(path: Path) -> list[int]:
    """Which calls of the first program of a job are a collective alone."""
    job = serde.load(path)
    spans = job.programs[0].calls[:, 1:3].tolist()
    return [n for n, (begin, end) in enumerate(spans) if [*job.ops.kind[begin:end]] == [OpKind.COLLECTIVE]]


def test_a_strangers_pass_runs_from_its_own_file(
    cli, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_passes"
    package.mkdir()
    (package / "bucket_order.py").write_text(STRANGER)
    done = subprocess.run(
        [sys.executable, "-m", "echograph", "echosim", "run", graph, "--passes", LIST],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step time" in done.stdout
    monkeypatch.syspath_prepend(tmp_path)
    held = {}
    for option in ("{hold=0}", "", "{hold=99}"):
        job = tmp_path / "job.pb"
        assert cli("echoc", "lower", graph, "--passes", LIST + option, "-o", job).status == 0
        assert serde.load(job).passes == tuple((LIST + option).split())
        held[option] = reductions(job)
    first, *_, last = held["{hold=0}"]
    assert first < held[""][0] < last
    assert held["{hold=99}"] == list(range(last - len(held[""]) + 1, last + 1))


def test_passes_said_themselves_are_those_of_the_plan(cli, graph: Path, tmp_path: Path) -> None:
    plan = ("--gpus", 16, "--tp", 2, "--pp", 2, "--recompute", "full", "--global-batch", 32)
    assert cli("echoc", "lower", graph, *plan, "-o", tmp_path / "job.pb").status == 0
    said = " ".join(serde.load(tmp_path / "job.pb").passes)
    listed = cli("echosim", "run", graph, "--passes", said, "--json").json()
    planned = cli("echosim", "run", graph, *plan, "--json").json()
    assert listed["step_time_s"] == planned["step_time_s"]
    assert listed["memory"] == planned["memory"]
    assert listed["plan"]["passes"] == said
    for key in ("gpus", "tp", "pp", "dp", "mesh", "micro_batch"):
        assert listed["plan"][key] == planned["plan"][key]


def test_passes_stand_in_plan_files_and_take_jobs(cli, graph: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("passes = 'fuse data_parallel{replicas=4}'\n")
    job, wide = tmp_path / "job.pb", tmp_path / "wide.pb"
    assert cli("echoc", "lower", graph, "--plan", tmp_path / "plan.toml", "-o", job).status == 0
    assert cli("echoc", "lower", job, "--passes", "resize_axes{sizes=(dp:8)}", "-o", wide).status == 0
    assert serde.load(wide).passes == ("fuse", "data_parallel{replicas=4}", "resize_axes{sizes=(dp:8)}")
    assert cli("echosim", "run", wide, "--json").json()["gpus"] == 8


def test_lowering_writes_what_the_passes_leave(cli, graph: Path, tmp_path: Path) -> None:
    outcome = cli("echoc", "lower", graph, "--passes", "fuse", "-o", tmp_path / "fused.pb")
    assert outcome.status == 0
    assert "operations" in outcome.out
    assert cli("echosim", "run", tmp_path / "fused.pb", "--gpus", 8).status == 0


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--passes", "fuse"), 1, "leave a step graph: end them with one such as data_parallel"),
        (("--passes", "fuse", "--tp", 2), 2, "--passes: is the whole list: leave --tp out"),
        (("--passes", "fuze"), 2, "unknown pass 'fuze': did you mean 'fuse'?"),
        (("--passes", "data_parallel{replicas=2} fuse"), 1, "fuse: takes a step graph, and has a job graph here"),
    ],
)
def test_wrong_passes_are_refused_in_one_line(
    cli, graph: Path, options: tuple[object, ...], status: int, words: str
) -> None:
    outcome = cli("echosim", "run", graph, *options)
    assert outcome.status == status, outcome.err
    assert words in outcome.err
    assert outcome.err.count("\n") == 1
