from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

from echograph.errors import PlanError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.fuse_loss import FuseLoss
from echograph.ir.passes.logged_losses import LoggedLosses
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.types import Collective, Compute, DType, Phase, TensorRole
from echograph.ir.unfold import unfold
from echograph.models import get_model
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan, passes

BATCH, SEQUENCE = 2, 16
LOSS = ("aten._to_copy", "aten._log_softmax", "aten.nll_loss_forward")


@pytest.fixture(scope="module")
def step() -> StepGraph:
    entry = get_model("gpt2").with_config(n_layer=2, n_embd=64, n_head=2, vocab_size=512)
    return compile_entry(entry, StepSpec(dtype="bf16"), batch_size=BATCH, seq_len=SEQUENCE)


def operations(graph: StepGraph) -> list[Compute]:
    return [op for op in unfold(graph).ops if isinstance(op, Compute)]


def test_each_logged_loss_goes_over_the_logits_in_fp32_once_more_after_the_backward_pass(step: StepGraph) -> None:
    before, after = operations(step), operations(LoggedLosses(count=2)(step))
    more = Counter(op.name for op in after) - Counter(op.name for op in before)
    assert {name: more[name] for name in LOSS} == dict.fromkeys(LOSS, 2)
    assert more.keys() <= {*LOSS, "aten.view"}
    last = max(place for place, op in enumerate(after) if op.name == LOSS[-1])
    assert {op.phase for op in after[last + 1 :]} == {Phase.OPTIMIZER}
    moved = sum(op.bytes_read + op.bytes_written for op in after) - sum(
        op.bytes_read + op.bytes_written for op in before
    )
    rows = BATCH * SEQUENCE
    of_a_loss = 8 * rows + 8 * rows // 2 + 16  # classes, a probability of each, two numbers
    to_fp32, probabilities = (2 + 4) * 512 * rows, (4 + 4) * 512 * rows
    assert to_fp32 + probabilities < moved / 2 <= to_fp32 + probabilities + of_a_loss
    assert sum(op.flops for op in after) == sum(op.flops for op in before)


def test_the_loss_itself_can_be_fused_and_the_logged_ones_are_not(step: StepGraph) -> None:
    names = Counter(op.name for op in operations(FuseLoss()(LoggedLosses(count=2)(step))))
    assert (names["fused.cross_entropy"], names["aten._log_softmax"]) == (1, 2)


def test_ranks_that_share_the_vocabulary_share_the_logged_losses(step: StepGraph) -> None:
    plain, logged = (TensorParallel(size=2)(g) for g in (step, LoggedLosses(count=1)(step)))
    collectives = [sum(isinstance(op, Collective) for op in unfold(g).ops) for g in (plain, logged)]
    losses = [sum(op.name == "aten.gather" for op in operations(g)) for g in (plain, logged)]
    assert losses == [1, 2] and collectives[1] > collectives[0]


def test_the_last_stage_of_a_pipeline_logs(step: StepGraph) -> None:
    job = Pipeline(stages=2, micro_batches=4)(LoggedLosses(count=1)(step))
    ran = [
        {row for _, begin, end, _, _ in program.calls.tolist() for row in range(begin, end)}
        for program in job.programs
    ]
    losses = [sum(job.strings[job.ops.name[row]] == LOSS[-1] for row in rows) for rows in ran]
    assert losses == [0, 2]


def test_a_stack_that_logs_says_so_in_its_passes(step: StepGraph) -> None:
    from echograph.simulator.clusters import load_cluster

    made = passes(Plan(gpus=8, zero=3, stack="llm-foundry"), step.workload, load_cluster("dgx-h100"))
    assert LoggedLosses(count=2) in made
    assert any(isinstance(one, FullyShard) for one in made)


def test_a_step_without_a_cross_entropy_is_refused() -> None:
    builder = GraphBuilder()
    builder.tensor("x", (2,), DType.FP32, TensorRole.INPUT)
    builder.program([])
    with pytest.raises(PlanError, match="no cross-entropy"):
        LoggedLosses(count=1)(builder.build(StepGraph))
