"""What `docs/ir.md` says and what `echosim` does are one step time, to the picosecond, on every kind of plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from interpreter import WaitForEver, step_time_ps
from random_jobs import RandomJob
from small_models import CONFIGS

from echograph.cli.app import run
from echograph.errors import DeadlockError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import serde
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph, StepGraph
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, CopyDirection, DType, Phase, Source, TensorRole
from echograph.profiler.costs import load_device
from echograph.simulator.clusters import load_cluster
from echograph.simulator.simulate import simulate
from echograph.workflow.compile import compile as compile_model
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower, predict
from echograph.workflow.system import System, annotate, host_of

CLUSTER, SEQUENCE = "dgx-h100", 1024
WIDE = {
    "hidden_size": 2048, "n_embd": 2048, "intermediate_size": 8192, "vocab_size": 50304,
    "max_position_embeddings": SEQUENCE, "n_positions": SEQUENCE,
}  # fmt: skip
"""Wide enough that the device is busy and not the host alone; the size of a tensor costs nothing here."""

FOREVER = -1
Options = dict[str, Any]
FAST: tuple[tuple[str, Options], ...] = (
    ("tied", {"gpus": 8, "pp": 4, "stage_layers": "0,1,1,2"}),
    ("tied", {"gpus": 6, "pp": 3, "stage_layers": "1,1,2", "global_batch": 12, "schedule": "gpipe"}),
    ("tied", {"gpus": 8, "pp": 4, "zero": 1, "stage_layers": "0,1,1,2"}),
    ("tied", {"gpus": 4, "pp": 2, "global_batch": 16}),
    ("gpt2", {"gpus": 2}),
    ("gpt2", {"gpus": 2, "tp": 2}),
    ("gpt2", {"gpus": 4, "tp": 2, "pp": 2, "sequence_parallel": True}),
    ("gpt2", {"gpus": 4, "pp": 2, "vpp": 2}),
    ("gpt2", {"gpus": 4, "pp": 4, "schedule": "zb-h1"}),
    ("gpt2", {"gpus": 4, "pp": 2, "schedule": "gpipe"}),
    ("gpt2", {"gpus": 4, "zero": 1, "overlap_param_gather": True}),
    ("gpt2", {"gpus": 4, "pp": 2, "zero": 2}),
    ("gpt2", {"gpus": 4, "zero": 3}),
    ("gpt2", {"gpus": 4, "zero": 3, "hsdp_replicas": 2}),
    ("gpt2", {"gpus": 2, "recompute": "full"}),
    ("gpt2", {"gpus": 2, "tp": 2, "recompute": "selective"}),
    ("llama", {"gpus": 2, "cp": 2}),
    ("llama", {"gpus": 2, "cp": 2, "cp_method": "all-to-all"}),
    ("mixtral", {"gpus": 2, "ep": 2}),
    ("mixtral", {"gpus": 4, "ep": 2, "pp": 2}),
)  # fmt: skip
SLOW: tuple[tuple[str, Options], ...] = (
    ("tied", {"gpus": 8, "pp": 4, "schedule": "zb-h1", "stage_layers": "0,1,1,2"}),
    ("tied", {"gpus": 8, "pp": 4, "schedule": "zb-h1", "zero": 1, "global_batch": 32}),
    ("tied", {"gpus": 8, "pp": 2, "vpp": 2, "global_batch": 32}),
    ("tied", {"gpus": 8, "pp": 4, "zero": 2, "global_batch": 32}),
    ("tied", {"gpus": 8, "pp": 4, "zero": 3, "global_batch": 32}),
    ("tied", {"gpus": 16, "pp": 4, "zero": 3, "hsdp_replicas": 2, "global_batch": 32}),
    ("tied", {"gpus": 16, "pp": 4, "tp": 2, "global_batch": 32}),
    ("tied", {"gpus": 16, "pp": 4, "tp": 2, "sequence_parallel": True, "zero": 1, "stage_layers": "1,1,1,1"}),
    ("tied", {"gpus": 16, "pp": 4, "cp": 2, "global_batch": 32}),
    ("tied", {"gpus": 8, "pp": 4, "recompute": "full", "stage_layers": "0,1,1,2"}),
    ("tied", {"gpus": 8, "pp": 4, "precision": "fp8", "stage_layers": "0,1,1,2"}),
    ("tied", {"gpus": 8, "pp": 4, "mesh_order": "tp-cp-ep-pp-dp", "stage_layers": "0,1,1,2"}),
    ("tied", {"gpus": 4, "tp": 4}),
    ("tied", {"gpus": 4, "zero": 1, "global_batch": 32}),
    ("tied", {"gpus": 4, "zero": 3, "global_batch": 32}),
    ("gpt2", {"gpus": 16, "tp": 2, "pp": 2, "sequence_parallel": True, "global_batch": 32}),
    ("gpt2", {"gpus": 8, "pp": 2, "vpp": 2, "global_batch": 64, "zero": 1}),
    ("gpt2", {"gpus": 8, "pp": 4, "schedule": "zb-h1", "global_batch": 32}),
    ("gpt2", {"gpus": 8, "pp": 4, "schedule": "gpipe", "global_batch": 32}),
    ("gpt2", {"gpus": 8, "pp": 2, "zero": 2, "global_batch": 32}),
    ("gpt2", {"gpus": 8, "zero": 2, "overlap_param_gather": True, "global_batch": 64}),
    ("gpt2", {"gpus": 8, "zero": 1, "overlap_grad_reduce": False, "global_batch": 64}),
    ("gpt2", {"gpus": 8, "loss": "fused"}),
    ("gpt2", {"gpus": 8, "grad_dtype": "fp32", "global_batch": 32}),
    ("gpt2", {"gpus": 8, "precision": "fp8"}),
    ("gpt2", {"gpus": 8, "precision": "mxfp8", "tp": 2}),
    ("gpt2", {"gpus": 8, "recompute": "2", "global_batch": 32}),
    ("llama", {"gpus": 8, "tp": 4, "pp": 2, "global_batch": 16}),
    ("llama", {"gpus": 8, "tp": 4, "sequence_parallel": True, "recompute": "selective-op"}),
    ("llama", {"gpus": 8, "cp": 2, "tp": 2, "global_batch": 16}),
    ("llama", {"gpus": 8, "cp": 4, "global_batch": 16}),
    ("llama", {"gpus": 8, "cp": 2, "pp": 2, "zero": 1, "global_batch": 16}),
    ("llama", {"gpus": 8, "cp": 2, "cp_method": "all-to-all", "tp": 2, "global_batch": 16}),
    ("llama", {"gpus": 8, "cp": 2, "zero": 3, "global_batch": 16}),
    ("llama", {"gpus": 8, "zero": 3, "hsdp_replicas": 4, "global_batch": 32}),
    ("llama", {"gpus": 8, "zero": 3, "reshard_after_forward": False, "global_batch": 32}),
    ("llama", {"gpus": 8, "zero": 3, "recompute": "full", "global_batch": 32}),
    ("llama", {"gpus": 8, "zero": 3, "tp": 2, "pp": 2, "global_batch": 32}),
    ("mixtral", {"gpus": 8, "ep": 4, "pp": 2, "global_batch": 32}),
    ("mixtral", {"gpus": 8, "ep": 2, "tp": 2, "sequence_parallel": True, "global_batch": 16}),
    ("mixtral", {"gpus": 8, "ep": 2, "zero": 1, "global_batch": 32}),
    ("mixtral", {"gpus": 8, "ep": 2, "zero": 3, "global_batch": 32}),
    ("mixtral", {"gpus": 8, "ep": 2, "cp": 2, "global_batch": 16}),
    ("mixtral", {"gpus": 8, "ep": 4, "capacity_factor": 1.25}),
)  # fmt: skip


@cache
def step(name: str) -> StepGraph:
    """The folded step of a small deep and wide model, two samples a micro-batch."""
    config = CONFIGS["gpt2" if name == "tied" else name]
    config = config | {key: value for key, value in WIDE.items() if key in config}
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(config | {"tie_word_embeddings": name == "tied"}))
        return compile_model(str(path), StepSpec(), batch_size=2, seq_len=SEQUENCE)


def both(job: JobGraph, folder: Path, seed: int | None = None) -> tuple[int, int]:
    """The step by the interpreter and by echosim, of a job with the cluster's durations; `FOREVER` if it hangs.

    Args:
        job: the job.
        folder: where its file goes.
        seed: of random factors on all durations but the host's, so that other operations are critical; the
            communications' are then said to be imported, which echosim takes as they are.
    """
    system = System(CLUSTER)
    timed, where = annotate(job, system), system.cluster
    if seed is None:
        theirs = predict(job, Plan(cluster=CLUSTER))[0].step_ps
    else:
        ops = timed.ops
        host = np.array([timed.strings[name].endswith("/host") for name in ops.duration_device])
        factor = np.where(host, 1, np.exp(np.random.default_rng(seed).normal(0, 2, len(host))))
        communicates = np.isin(ops.kind, COMMUNICATIONS)[ops.duration.rows]
        source = np.where(communicates & ~host, Source.IMPORTED, ops.duration_source).astype(np.uint8)
        values = np.rint(ops.duration.values * factor).astype(np.int64)
        timed = replace(
            timed, ops=replace(ops, duration=replace(ops.duration, values=values), duration_source=source)
        )
        device = load_device(where.device)
        cluster = replace(load_cluster(CLUSTER), device=device.name)
        try:
            theirs = simulate(timed, cluster, host_of(device), memory=False).step_ps
        except DeadlockError:
            theirs = FOREVER
    path = folder / "job.pb"
    serde.save(timed, path)
    try:
        return step_time_ps(path, where.device, where.name), theirs
    except WaitForEver:
        return FOREVER, theirs


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model", "plan"),
    [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
    ids=lambda one: one if isinstance(one, str) else " ".join(f"{k}={v}" for k, v in one.items()),
)
def test_the_page_and_echosim_agree(model: str, plan: Options, tmp_path: Path) -> None:
    said, theirs = both(lower(step(model), Plan(cluster=CLUSTER, **plan)), tmp_path)
    assert said == theirs


@pytest.mark.torch
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize(("model", "plan"), FAST[::4])
def test_so_they_do_whatever_the_durations(model: str, plan: Options, seed: int, tmp_path: Path) -> None:
    said, theirs = both(lower(step(model), Plan(cluster=CLUSTER, **plan)), tmp_path, seed)
    assert said == theirs


def mixed_job(seed: int) -> JobGraph:
    """Three ranks of one role: kernels, work of the host, copies, collectives and rings of messages, with `deps`.

    They are on random streams, and run in two micro-batches, each without some operations that others name.
    """
    random, builder = Random(seed), GraphBuilder(name="mixed", streams=("compute", "copies", "comm", "out", "in"))
    builder.mesh = (Axis(name="dp", size=3),)
    group = builder.group("dp", axes=("dp",))
    ends, state = [0], builder.tensor("state", (4,), DType.FP32, TensorRole.BUFFER)
    for number in range(40):
        count = builder.op_count()
        common: Options = {
            "phase": Phase.FORWARD, "deps": random.sample(range(count), min(count, random.choice((0, 1, 1, 3))))
        }  # fmt: skip
        kind = random.choice(("kernel", "kernel", "view", "host", "copy", "collective", "ring"))
        if kind == "ring":
            peer, tag = random.choice((1, 2, -1)), random.randrange(2)
            about = {"group": group, "tag": tag, "nbytes": 1 << 20, **common}
            builder.send("send", peer=peer, stream=3, **about)
            builder.recv("receive", peer=-peer, stream=4, **about)
        elif kind == "collective":
            builder.collective("reduce", CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=1 << 22,
                               dtype=DType.FP32, stream=2, **common)  # fmt: skip
        elif kind == "copy":
            builder.copy("copy", CopyDirection.HOST_TO_DEVICE, nbytes=1 << 24, stream=1, **common)
        elif kind == "host":
            made = builder.tensor("seen", (4,), DType.FP32, TensorRole.BUFFER)
            builder.host("look", inputs=(state,), outputs=(made,), stream=random.randrange(3), **common)
            state = made
        else:
            made = builder.tensor("state", (4,), DType.FP32, TensorRole.BUFFER, alias_of=state)
            work = 0 if kind == "view" else random.randrange(1 << 36)
            builder.compute(
                "mul", inputs=(state,), outputs=(made,), flops=work, stream=random.randrange(3), **common
            )
            state = made
        if number % 8 == 7:
            ends.append(builder.op_count())
    parts = list(pairwise(ends))
    calls = [(0, begin, end, 0, 0) for begin, end in parts]
    later = [(0, begin, end, 0, 1) for begin, end in parts if random.random() < 0.7]
    builder.program(calls + later, role="replica")
    return builder.build(JobGraph)


@pytest.mark.parametrize("seed", range(20))
def test_host_work_copies_rings_and_dependencies(seed: int, tmp_path: Path) -> None:
    said, theirs = both(mixed_job(seed), tmp_path, seed)
    assert said == theirs


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("stages", [2, 3])
def test_jobs_that_list_their_ranks(seed: int, stages: int, tmp_path: Path) -> None:
    said, theirs = both(RandomJob(seed, stages).build(), tmp_path, seed)
    assert said == theirs


@pytest.mark.torch
def test_the_commands_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(name: str, *arguments: object) -> Any:
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments), "--cluster", CLUSTER, "--json"])
        with pytest.raises(SystemExit) as done:
            run(import_module(f"echograph.cli.{name}").app, name)
        assert done.value.code == 0
        return json.loads(capsys.readouterr().out)

    job, timed = tmp_path / "job.pb", tmp_path / "timed.pb"
    serde.save(lower(step("tied"), Plan(gpus=8, pp=4, cluster=CLUSTER)), job)
    names = said("echoc", "annotate", job, "-o", timed)["durations"]
    mine = step_time_ps(timed, names["device"]["name"], names["network"]["name"])
    for path in (job, timed):
        assert round(said("echosim", "run", path)["step_time_s"] * 1e12) == mine
