from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import torch
from families import shallow, sizes
from torch.autograd.graph import saved_tensors_hooks

from echograph.errors import PlanError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.extent import MicroBatch
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.fuse_loss import FuseLoss
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.types import Collective, Compute, DType
from echograph.ir.unfold import unfold
from echograph.models import get_model
from echograph.simulator.memory import memory
from echograph.workflow.compile import compile_entry

MODELS = ("gpt2", "llama-3.1-8b", "bert-base-uncased", "t5-small", "vit-b-16")


@cache
def step(name: str) -> StepGraph:
    return compile_entry(shallow(get_model(name), 2), StepSpec(dtype="bf16"), **sizes(name))


def operations(graph: StepGraph) -> list[Compute]:
    return [op for op in unfold(graph).ops if isinstance(op, Compute)]


def logits_of(graph: StepGraph) -> list[tuple[int, int]]:
    """Rows and classes of each loss."""
    softmax = (row for row, name in enumerate(graph.ops.name) if graph.strings[name] == "aten._log_softmax")
    shapes = (graph.tensors.shape.row(graph.ops.inputs.row(row)[0]) for row in softmax)
    return [(int(rows), int(classes)) for rows, classes in shapes]


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_reads_logits_and_writes_their_gradient_and_nothing_else_changes(name: str) -> None:
    before, after = step(name), FuseLoss()(step(name))
    sizes_of = logits_of(before)
    forward = [op for op in operations(after) if op.name == "fused.cross_entropy"]
    backward = [op for op in operations(after) if op.name == "fused.cross_entropy_backward"]
    read = sorted(rows * classes * 2 + rows * 8 for rows, classes in sizes_of)
    assert sorted(op.bytes_read for op in forward) == sorted(op.bytes_read for op in backward) == read
    assert sorted(op.bytes_written for op in forward) == sorted(4 * rows for rows, _ in sizes_of)
    assert sorted(op.bytes_written for op in backward) == sorted(2 * rows * classes for rows, classes in sizes_of)
    others = [op.name for op in operations(after) if not op.name.startswith("fused.")]
    kept = [op.name for op in operations(before)]
    for name_of in others:
        kept.remove(name_of)
    assert set(kept) <= {
        "aten._to_copy", "aten.view", "aten._log_softmax", "aten.nll_loss_forward", "aten.nll_loss_backward",
        "aten._log_softmax_backward_data",
    }  # fmt: skip
    assert sum(op.flops for op in operations(after)) == sum(op.flops for op in operations(before))
    elements = {rows * classes for rows, classes in sizes_of}
    assert not [
        t for t in after.tensors if t.dtype is DType.FP32 and t.nbytes // 4 in elements and not t.role.persistent
    ]


def test_a_long_vocabulary_costs_two_tensors_in_its_own_type_instead_of_three_in_fp32() -> None:
    """What torch saves for the backward of the eager loss is the oracle of the difference in what is kept."""
    graph = compile_entry(shallow(get_model("gpt2"), 2), StepSpec(dtype="bf16"), batch_size=8, seq_len=512)
    ((rows, classes),) = logits_of(graph)
    eager, fused = (
        memory(DataParallel(replicas=1, micro_batches=1)(one), 0, 2**40) for one in (graph, FuseLoss()(graph))
    )
    assert eager is not None and fused is not None
    saved: list[int] = []
    logits = torch.empty((rows, classes), dtype=torch.bfloat16, device="meta", requires_grad=True)
    with saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):  # type: ignore[func-returns-value]
        torch.nn.functional.cross_entropy(logits.float(), torch.zeros(rows, dtype=torch.int64, device="meta"))
    assert max(saved) == 4 * rows * classes
    # At the peak: the log-probabilities and two gradients of 4 bytes; or the logits and one gradient of 2.
    assert eager.peak_bytes - fused.peak_bytes == pytest.approx((3 * 4 - 2 * 2) * rows * classes, rel=0.01)


def test_it_goes_with_other_passes() -> None:
    graph = FuseLoss()(Recompute(policy="full")(MicroBatch(size=4)(step("llama-3.1-8b"))))
    assert logits_rows(graph) == 4 * 64
    for job in (
        Pipeline(stages=2, micro_batches=4)(graph),
        FullyShard(replicas=4, shard=4, micro_batches=2)(graph),
    ):
        names = [job.strings[n] for n in job.ops.name]
        assert names.count("fused.cross_entropy") >= 1
        assert names.count("fused.cross_entropy") == names.count("fused.cross_entropy_backward")


def logits_rows(graph: StepGraph) -> int:
    (row,) = (r for r, n in enumerate(graph.ops.name) if graph.strings[n] == "fused.cross_entropy")
    return int(graph.tensors.shape.row(graph.ops.outputs.row(row)[-1])[0])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2"])
def test_ranks_that_share_a_vocabulary_exchange_three_numbers_a_row(name: str) -> None:
    """Each reads its part of the logits twice and writes its gradient, in their own type."""
    shared = TensorParallel(size=2)(step(name))
    ours = FuseLoss()(shared)
    rows, classes = next(
        tuple(t.shape)
        for t in shared.tensors
        if t.dtype is DType.FP32 and len(t.shape) == 2 and t.shape[1] > 2**14
    )
    forward, backward = (op for op in operations(ours) if op.name.startswith("fused.cross_entropy"))
    logits, target = 2 * rows * classes, 8 * rows
    assert (forward.bytes_read, forward.bytes_written) == (logits + target, 3 * 4 * rows)
    assert (backward.bytes_read, backward.bytes_written) == (logits + target, logits)
    assert exchanged(shared) - exchanged(ours) == {4 * rows: 3}
    assert exchanged(ours) - exchanged(shared) == {3 * 4 * rows: 1}
    whole = [t for t in ours.tensors if t.dtype is DType.FP32 and t.nbytes == 4 * rows * classes]
    assert not [t for t in whole if not t.role.persistent]
    jobs = (Pipeline(stages=2, micro_batches=4)(ours), FullyShard(replicas=4, shard=4, micro_batches=2)(ours))
    assert all("fused.cross_entropy_backward" in [job.strings[n] for n in job.ops.name] for job in jobs)


def exchanged(graph: StepGraph) -> Counter[int]:
    """How many collectives of each size in bytes."""
    return Counter(op.bytes_per_rank for op in unfold(graph).ops if isinstance(op, Collective))


def test_no_loss_is_refused_in_one_line() -> None:
    with pytest.raises(PlanError, match="--loss fused") as error:
        FuseLoss()(FuseLoss()(step("llama-3.1-8b")))
    assert "\n" not in str(error.value)


def test_what_else_reads_the_probabilities_keeps_them() -> None:
    once = FuseLoss()(step("gpt2"))
    with pytest.raises(PlanError, match="no cross-entropy"):
        FuseLoss()(once)
