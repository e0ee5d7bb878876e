"""A step of megatron-core, run live without ranks, and ours: what each micro-batch computes and communicates.

Llama-3-8B's shape with two layers a stage: tensor-parallel over 8 ranks with sequence parallelism, 4 stages of
1F1B with 8 micro-batches, and the distributed optimizer over 32 ranks, 1,024 in all. The first, a middle and the
last stage are equal in passes, messages, matrix products and collectives, but for what `differences` lists. Not
compared are attention's own products, which megatron-core computes unfused without Transformer Engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import JobGraph, StepGraph
from echograph.models import get_model
from echograph.simulator.clusters import load_cluster
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the [megatron] extra"),
]

WORLD, TENSOR, STAGES, MICRO_BATCHES = 1024, 8, 4, 8
LAYERS, HIDDEN, CHANNELS, HEADS, KV_HEADS, POSITIONS = 8, 4096, 14336, 32, 8, 8192
VOCABULARY = 129_024
"""Llama's 128,256 tokens, padded so that each rank has a multiple of 128."""
COMPARED = (0, 1, STAGES - 1)
LAST = MICRO_BATCHES - 1
Work = Counter[tuple[Any, ...]]


# -- theirs --------------------------------------------------------------------------------------------------


@cache
def recorded(gather_ahead: bool) -> dict[int, list[list[Any]]]:
    """What megatron-core does on the stages, in a process of its own since it makes default process groups."""
    case = {
        "world": WORLD, "tensor": TENSOR, "stages": STAGES, "micro_batches": MICRO_BATCHES, "layers": LAYERS,
        "hidden": HIDDEN, "channels": CHANNELS, "heads": HEADS, "kv_heads": KV_HEADS, "positions": POSITIONS,
        "vocabulary": VOCABULARY, "overlap_param_gather": gather_ahead, "record": COMPARED,
    }  # fmt: skip
    program = Path(__file__).with_name("torch_megatron.py")
    command = [sys.executable, str(program), json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(COMPARED, map(json.loads, done.stdout.splitlines()), strict=True))


# -- ours ----------------------------------------------------------------------------------------------------


@cache
def step() -> StepGraph:
    entry = get_model("llama-3-8b").with_config(num_hidden_layers=LAYERS)
    return compile_entry(entry, StepSpec(clip_grad_norm=1.0), batch_size=1, seq_len=POSITIONS)


def planned(gather_ahead: bool) -> JobGraph:
    """The same plan in our words; gradients add up in fp32, as with `grad_reduce_in_fp32`."""
    plan = Plan(
        gpus=WORLD, tp=TENSOR, pp=STAGES, sequence_parallel=True, zero=1, grad_dtype="fp32",
        global_batch=MICRO_BATCHES * WORLD // (TENSOR * STAGES), overlap_param_gather=gather_ahead,
    )  # fmt: skip
    return lower(step(), plan, load_cluster(plan.cluster))


def events(job: JobGraph, stage: int) -> list[list[Any]]:
    """What a stage does, as the recorder of theirs writes it."""
    found: list[list[Any]] = []
    for _, begin, end, _, micro_batch in job.programs[stage].calls.tolist():
        for op in job.ops[begin:end]:
            place = [-1, "step"] if op.phase == t.Phase.OPTIMIZER else [micro_batch, op.phase.name.lower()]
            match op:
                case t.Collective():
                    axes = list(job.groups[op.group].axes)
                    found.append([*place, op.collective.name, axes, op.bytes_per_rank, op.dtype.name])
                case t.Send() | t.Recv():
                    verb = "send" if isinstance(op, t.Send) else "recv"
                    found.append([-1, "messages", verb, stage + op.peer, op.nbytes])
                case t.Compute() if isinstance(op.attributes, t.Gemm):
                    a, b = (job.tensors.shape.row(i) for i in op.inputs[-2:])
                    found.append([*place, "product", *a, b[1]])
    return found


# -- comparison ----------------------------------------------------------------------------------------------

FUSED = {
    (HEADS + 2 * KV_HEADS) * 128 // TENSOR: [HEADS * 128 // TENSOR, *2 * [KV_HEADS * 128 // TENSOR]],
    2 * CHANNELS // TENSOR: 2 * [CHANNELS // TENSOR],
}
"""Outputs of what Megatron has in one matrix (queries, keys and values; gate and up), and of the parts."""


def products(found: list[list[Any]]) -> Work:
    """Matrix products by micro-batch, pass and extents; of fused matrices, those of the parts."""
    counted: Work = Counter()
    for *place, what, m, k, n in (e for e in found if e[2] == "product"):
        fused = next((x for x in (m, k, n) if x in FUSED), 0)
        for part in FUSED.get(fused, [0]):
            counted[*place, what, *(part if x == fused else x for x in (m, k, n))] += 1
    return counted


def collectives(found: list[list[Any]]) -> Work:
    """Collectives by micro-batch (-1: the step), pass, kind, axes, bytes and type."""
    return Counter(
        (*place, what, tuple(axes), nbytes, dtype)
        for *place, what, axes, nbytes, dtype in (e for e in found if e[2] not in ("product", "send", "recv"))
    )


def differences(stage: int, gather_ahead: bool) -> Work:
    """What we communicate more often than megatron-core does, or (negative) less often.

    - Gradients of norms, of which sequence parallelism leaves each rank a summand: Megatron adds them up once a
      step, all in one buffer (`finalize_model_grads`); here each is where it is made, in each micro-batch.
    - The norm by which gradients are clipped is one number: Megatron adds it up over all ranks at once, here it
      goes along one axis of the mesh after the other.
    - The first stage's gradients are in two buckets; the first is full with a feed-forward matrix of the first
      layer, in which Megatron has gate and up together. So half of that is in its first bucket, in our second.
      Those of parameters are the same.
    """
    found: Work = Counter()
    norms = 2 * LAYERS // STAGES + (stage == STAGES - 1)
    for micro_batch in range(MICRO_BATCHES):
        found[micro_batch, "backward", "ALL_REDUCE", ("tp",), HIDDEN * 2, "BF16"] = norms
    found[-1, "step", "ALL_REDUCE", ("tp",), norms * HIDDEN * 4, "FP32"] = -1
    for axes, count in {("pp", "dp", "tp"): -1, ("pp",): 1, ("dp",): 1, ("tp",): 1}.items():
        found[-1, "step", "ALL_REDUCE", axes, 4, "FP32"] = count
    if stage == 0:
        gathered = (0, "forward") if gather_ahead else (-1, "step")
        matrix = CHANNELS // TENSOR * HIDDEN
        attention = (2 * HEADS + 2 * KV_HEADS) * 128 // TENSOR * HIDDEN
        layer = attention + 3 * matrix + 2 * HIDDEN
        first, rest = layer + 2 * matrix, VOCABULARY // TENSOR * HIDDEN + layer - 2 * matrix
        for kind, place, dtype in (
            ("REDUCE_SCATTER", (LAST, "backward"), t.DType.FP32), ("ALL_GATHER", gathered, t.DType.BF16)
        ):  # fmt: skip
            for elements, count in ((first, 1), (rest, 1), (first + matrix, -1), (rest - matrix, -1)):
                found[*place, kind, ("dp",), dtype.nbytes(elements), dtype.name] = count
    return found


def passes(found: list[list[Any]]) -> list[tuple[int, str]]:
    """Forward and backward passes of micro-batches, in order."""
    computed = ((e[0], e[1]) for e in found if e[2] == "product" and e[0] >= 0)
    return [place for place, _ in groupby(computed)]


def between_shares(found: list[list[Any]]) -> list[list[Any]]:
    """Collectives of activations over tensor-parallel ranks, in order; not those of norms' gradients."""
    return [e for e in found if e[0] >= 0 and e[3] == ["tp"] and e[4] != HIDDEN * 2]


def messages(found: list[list[Any]]) -> dict[tuple[str, int], list[int]]:
    """Bytes of messages by direction and peer, in order."""
    ordered: dict[tuple[str, int], list[int]] = {}
    for _, _, verb, peer, nbytes in (e for e in found if e[2] in ("send", "recv")):
        ordered.setdefault((verb, peer), []).append(nbytes)
    return ordered


@pytest.mark.parametrize("gather_ahead", [False, True])
def test_stages_do_what_those_of_megatron_core_do(gather_ahead: bool) -> None:
    job, theirs = planned(gather_ahead), recorded(gather_ahead)
    for stage in COMPARED:
        mine = events(job, stage)
        assert passes(mine) == passes(theirs[stage])
        assert messages(mine) == messages(theirs[stage])
        assert between_shares(mine) == between_shares(theirs[stage])
        assert products(mine) == products(theirs[stage])
        communicated = collectives(mine)
        communicated.subtract(differences(stage, gather_ahead))
        assert communicated == collectives(theirs[stage])
