"""Torch's own pipelines on every stage, run live without ranks, and ours: the same passes, messages and FLOPs.

What differs, and why:

- Before the first micro-batch torch's stages agree in messages of 4 bytes whether shapes are known: left out.
- Torch joins a send and a receive into one NCCL call (`batch_isend_irecv`); ours are on streams of their own. The
  order in which they are issued is the same, and compared.
- The interleaved and zero-bubble schedules of torch post receives as early as the sender can have sent; ours are
  posted when they are needed. So with them what is received is compared peer by peer, the rest in its order.
- With split backward, torch's first stage leaves all of backward to its weight pass; ours splits its layers as it
  does those of other stages, since they are one block. Both run one after the other: their sum is compared. Where
  chunks turn back they do not, so there each pass's sum is, and the messages in their order; the order of passes
  is compared in `test_pipeline_schedules`.
- FLOPs are those of matrix products: torch's counter has no formula for the attention kernel that it runs here.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.pipeline.schedules import SPLIT, TURNING
from echograph.ir.types import OpKind, Phase
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

pytestmark = pytest.mark.torch

SEQUENCE = 16
AHEAD = ("interleaved", "zb-h1", "zb-v", "dualpipe-v")
"""Schedules whose receives torch posts early."""
Event = tuple[Any, ...]


def theirs(warm: Path, plan: dict[str, Any]) -> list[list[Event]]:
    """What torch does on each stage."""
    script = Path(__file__).with_name("torch_pipelining.py")
    done = subprocess.run(
        [warm / "python", script, json.dumps(plan)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stages = [[tuple(event) for event in json.loads(line)] for line in done.stdout.splitlines()]
    return [[event for event in events if event[0] not in ("send", "recv") or event[2] > 4] for events in stages]


@cache
def step(model: str, layers: int) -> StepGraph:
    name = "n_layer" if model == "gpt2" else "num_hidden_layers"
    return compile_entry(
        get_model(model).with_config(**{name: layers}), StepSpec(), batch_size=1, seq_len=SEQUENCE
    )


def ours(job: JobGraph, stage: int, stages: int) -> list[Event]:
    """What a program does: passes with their FLOPs, and messages."""
    found: list[Event] = []
    chunk = 0
    chunk_of: dict[tuple[int, int], int] = {}
    for block, begin, end, instance, micro_batch in job.programs[stage].calls.tolist():
        name = job.blocks[block].name
        if name.partition(".")[0] == "main":
            chunk = int(name.partition(".")[2] or 0) // stages
        chunk = chunk_of.setdefault((block, instance), chunk)  # weight passes may be of layers alone
        for row in range(begin, end):
            kind, phase = job.ops.kind[row], job.ops.phase[row]
            if kind in (OpKind.SEND, OpKind.RECV):
                peer, nbytes = stage + int(job.ops.peer[row]), int(job.ops.nbytes[row])
                found.append(("send" if kind == OpKind.SEND else "recv", peer, nbytes))
            elif phase in (Phase.FORWARD, Phase.BACKWARD) and job.ops.flops[row]:
                letter = "F" if phase == Phase.FORWARD else "B"
                product = job.strings[job.ops.name[row]] in ("aten.mm", "aten.addmm")
                found.append((letter, chunk, micro_batch, int(job.ops.flops[row]) if product else 0))
    return joined(found)


def joined(events: list[Event]) -> list[Event]:
    """Events with the operations of a pass added up; the halves of a split backward are both "B"."""
    found: list[Event] = []
    for key, group in groupby(events, key=lambda e: e if e[0] in ("send", "recv") else e[:3]):
        run = list(group)
        found += run if key[0] in ("send", "recv") else [(*key, sum(e[3] for e in run))]
    return found


def summed(events: list[Event]) -> Counter[Event]:
    """FLOPs of each pass, both halves of backward together."""
    found: Counter[Event] = Counter()
    for event in events:
        if event[0] != "send":
            found[event[:3]] += event[3]
    return found


def received(events: list[Event]) -> dict[int, list[int]]:
    """Bytes of what is received, by peer."""
    found: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event[0] == "recv":
            found[event[1]].append(event[2])
    return found


CASES = [
    ("gpt2", 4, "1f1b", 2, 1, 3, 64),
    pytest.param("gpt2", 8, "1f1b", 4, 1, 8, 64, marks=pytest.mark.slow),
    pytest.param("gpt2", 8, "gpipe", 4, 1, 6, 64, marks=pytest.mark.slow),
    pytest.param("gpt2", 16, "interleaved", 4, 2, 8, 1024, marks=pytest.mark.slow),
    pytest.param("gpt2", 8, "zb-h1", 4, 1, 8, 64, marks=pytest.mark.slow),
    pytest.param("gpt2", 16, "zb-h1", 8, 1, 10, 1024, marks=pytest.mark.slow),
    pytest.param("llama-3-8b", 16, "1f1b", 8, 1, 9, 1024, marks=pytest.mark.slow),
    pytest.param("llama-3-8b", 8, "zb-h1", 4, 1, 6, 64, marks=pytest.mark.slow),
    pytest.param("llama-3-8b", 16, "interleaved", 4, 2, 8, 64, marks=pytest.mark.slow),
    pytest.param("llama-3-8b", 4, "zb-v", 2, 2, 4, 8, marks=pytest.mark.slow),
    pytest.param("llama-3-8b", 8, "dualpipe-v", 4, 2, 9, 64, marks=pytest.mark.slow),
    pytest.param("llama-3-8b", 16, "zb-v", 4, 2, 9, 64, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "layers", "schedule", "stages", "chunks", "micro_batches", "world"), CASES)
def test_stages_do_what_those_of_torch_do(
    warm: Path, model: str, layers: int, schedule: str, stages: int, chunks: int, micro_batches: int, world: int
) -> None:
    plan = Pipeline(stages=stages, micro_batches=micro_batches, schedule=schedule, chunks=chunks)
    job = DataParallel(replicas=world // stages)(plan(step(model, layers)))
    assert job.world_size == world
    recorded = theirs(
        warm,
        {
            "model": model, "layers": layers, "schedule": schedule, "stages": stages, "chunks": chunks,
            "micro_batches": micro_batches, "world": world,
        },
    )  # fmt: skip
    for stage in range(stages):
        torch_does, we_do = recorded[stage], ours(job, stage, stages)
        letters = [event[0] for event in torch_does if event[0] in "FBIW"]
        assert ("W" in letters) == (schedule in SPLIT)
        torch_does = joined([("B", *e[1:]) if e[0] in "IW" else e for e in torch_does])
        if schedule in AHEAD:
            assert received(we_do) == received(torch_does)
            torch_does, we_do = ([e for e in events if e[0] != "recv"] for events in (torch_does, we_do))
        if schedule in TURNING:
            assert [e for e in we_do if e[0] == "send"] == [e for e in torch_does if e[0] == "send"]
            assert summed(we_do) == summed(torch_does)
        else:
            assert joined(we_do) == joined(torch_does)
