"""A simulator in another language, made from `docs/ir.md`, gives the step time of `echosim` to the picosecond."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance_graphs import GRAPHS
from js import READER, needs_npm
from small_models import small_step

from echograph.errors import DeadlockError
from echograph.ir import serde
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph
from echograph.ir.types import CollectiveKind, DType, OpKind, Source
from echograph.profiler.costs import load_device
from echograph.simulator.clusters import load_cluster
from echograph.simulator.simulate import simulate
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower, predict
from echograph.workflow.system import System, annotate, host_of

pytestmark = [pytest.mark.slow, pytest.mark.torch, needs_npm]

PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"gpus": 8}),
    ("llama", {"gpus": 1024, "tp": 4, "pp": 4, "global_batch": 512}),
    ("gpt2", {"gpus": 16, "tp": 2, "pp": 2, "sequence_parallel": True, "global_batch": 32}),
    ("gpt2", {"gpus": 16, "pp": 2, "vpp": 2, "global_batch": 64}),
    ("gpt2", {"gpus": 8, "pp": 4, "schedule": "zb-h1", "global_batch": 32}),
    ("gpt2", {"gpus": 16, "pp": 2, "zero": 2, "global_batch": 64}),
    ("llama", {"gpus": 16, "zero": 3, "hsdp_replicas": 2, "global_batch": 64}),
    ("llama", {"gpus": 8, "cp": 2, "tp": 2, "global_batch": 16}),
    ("mixtral", {"gpus": 16, "ep": 4, "pp": 2, "global_batch": 64}),
)


def run(reader: Path, job: JobGraph, device: str, cluster: str) -> subprocess.CompletedProcess[str]:
    path = reader / "job.pb"
    serde.save(job, path)
    return subprocess.run(
        ["node", "simulate.mjs", path, device, cluster], cwd=reader, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-a100"])
@pytest.mark.parametrize(("model", "plan"), PLANS, ids=lambda one: str(one) if isinstance(one, str) else None)
def test_its_step_is_echosims(model: str, plan: dict[str, Any], cluster: str, reader: Path) -> None:
    job = lower(small_step(model), Plan(cluster=cluster, **plan))
    system = System(cluster)
    timed, where = annotate(job, system), system.cluster
    done = run(reader, timed, where.device, where.name)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_ps"] == predict(job, Plan(cluster=cluster))[0].step_ps


def test_ends_of_roles_and_tasks_are_echosims(reader: Path) -> None:
    job = lower(small_step("gpt2"), Plan(gpus=8, pp=4, global_batch=32))
    system = System("dgx-h100")
    timed, where = annotate(job, system), system.cluster
    said = json.loads(run(reader, timed, where.device, where.name).stdout)
    result, _ = predict(job)
    ends = [int(result.timeline.end[result.timeline.program == n].max()) for n in range(len(job.programs))]
    assert [program["end_ps"] for program in said["programs"]] == ends
    assert [program["role"] for program in said["programs"]] == [program.role for program in job.programs]
    assert said["tasks"] == result.tasks


@pytest.mark.parametrize("seed", range(5))
def test_any_durations_will_do(seed: int, reader: Path) -> None:
    """With durations at random, which communication and the host dominate is another matter at every operation."""
    job = lower(small_step("llama"), Plan(gpus=16, tp=2, pp=2, vpp=2, global_batch=64))
    system = System("dgx-h100")
    timed, where = annotate(job, system), system.cluster
    ops, random = timed.ops, np.random.default_rng(seed)
    values = np.rint(ops.duration.values * np.exp(random.normal(0, 2, len(ops.duration.values)))).astype(np.int64)
    communicates = np.isin(ops.kind, (OpKind.COLLECTIVE, OpKind.SEND, OpKind.RECV))[ops.duration.rows]
    host = np.array([timed.strings[name].endswith("/host") for name in ops.duration_device])
    # What echosim knows of communication and of the host it works out anew, unless it was imported.
    values = np.where(host, ops.duration.values, values)
    source = np.where(communicates & ~host, Source.IMPORTED, ops.duration_source).astype(np.uint8)
    duration = replace(ops.duration, values=values)
    other = replace(timed, ops=replace(ops, duration=duration, duration_source=source))
    device = load_device(where.device)
    said = json.loads(run(reader, other, where.device, where.name).stdout)
    cluster = replace(load_cluster("dgx-h100"), device=device.name)
    assert said["step_ps"] == simulate(other, cluster, host_of(device), memory=False).step_ps


def test_a_job_of_listed_ranks(reader: Path) -> None:
    job = GRAPHS["ranks"]()
    assert isinstance(job, JobGraph)
    system = System("dgx-h100")
    timed, where = annotate(job, system), system.cluster
    done = run(reader, timed, where.device, where.name)
    assert json.loads(done.stdout)["step_ps"] == predict(job)[0].step_ps


def test_a_job_without_durations_is_refused(reader: Path) -> None:
    done = run(reader, lower(small_step("llama"), Plan(gpus=8)), "h100-sxm", "dgx-h100")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no duration: annotate the job first" in done.stderr


def test_a_deadlock_is_said(reader: Path) -> None:
    """Two ranks that come to two collectives in another order."""
    builder = GraphBuilder(name="deadlock")
    for name in ("one", "two", "one"):
        group = builder.group(name, ranks=(0, 1))
        builder.collective(name, CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=8, dtype=DType.FP32)
    builder.program([(0, 0, 2, 0, 0)], role="first", ranks=(0,))
    builder.program([(0, 1, 3, 0, 0)], role="second", ranks=(1,))
    system = System("dgx-h100")
    timed, where = annotate(builder.build(JobGraph), system), system.cluster
    with pytest.raises(DeadlockError):
        predict(timed)
    done = run(reader, timed, where.device, where.name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "deadlock: operation 0 (one) of first, operation 1 (two) of second wait for ever" in done.stderr


def test_it_stays_short() -> None:
    assert (
        len((Path(__file__).parents[2] / READER / "simulate.mjs").read_text(encoding="utf-8").splitlines()) < 200
    )
