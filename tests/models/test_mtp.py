"""Multi-token prediction: what further tokens add to a step."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from families import shallow

from echograph.errors import PlanError, UsageError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import Phase
from echograph.models import build, get_model
from echograph.models.mtp import add_further_tokens
from echograph.workflow.compile import compile_entry

pytestmark = pytest.mark.torch
LLAMA, NANO = "llama-3-8b", "nemotron-3-nano-30b-a3b"
WIDTH, INNER, KEYS, VOCABULARY = 4096, 14336, 1024, 128256
BATCH, LENGTH = 2, 64


def captured(name: str, layers: int, **options: object) -> StepGraph:
    entry = shallow(get_model(name), layers)
    return compile_entry(entry, StepSpec(**options), batch_size=BATCH, seq_len=LENGTH)  # type: ignore[arg-type]


def ran(graph: StepGraph) -> Counter[tuple[str, Phase]]:
    calls = [call for program in graph.programs for call in program.calls.tolist()]
    return Counter(
        (graph.ops[row].name, graph.ops[row].phase) for _, begin, end, _, _ in calls for row in range(begin, end)
    )


def test_a_further_token_costs_a_layer_a_join_and_a_head() -> None:
    """By hand: its products, three times for forward and backward, and its parameters beside the shared ones."""
    plain, one = captured(LLAMA, 4), captured(LLAMA, 4, mtp_num_layers=1)
    layer = 2 * WIDTH * (WIDTH + KEYS) + 3 * WIDTH * INNER
    join, norms = 2 * WIDTH * WIDTH, (3 + 2) * WIDTH
    assert one.workload.parameters - plain.workload.parameters == layer + join + norms
    products = [
        sum(op.flops for op in graph.ops if op.name == "aten.mm" and op.module.startswith(("mtp", "lm_head")))
        for graph in (plain, one)
    ]
    head = WIDTH * VOCABULARY
    assert products == [6 * BATCH * LENGTH * head, 6 * BATCH * LENGTH * (layer + join + 2 * head)]


def test_every_depth_has_a_loss_and_a_repeated_one_has_no_weights_of_its_own() -> None:
    two, repeated = (captured(LLAMA, 4, mtp_num_layers=2, mtp_use_repeated_layer=r) for r in (False, True))
    losses = [ran(graph)["aten._log_softmax", Phase.FORWARD] for graph in (two, repeated)]
    assert losses == [3, 3]
    one = captured(LLAMA, 4, mtp_num_layers=1)
    assert two.workload.parameters > repeated.workload.parameters == one.workload.parameters


def test_layers_are_of_the_kinds_that_a_configuration_asks_for(fake) -> None:
    with fake():
        model = build(get_model(NANO).with_config(num_hidden_layers=7), batch_size=1, seq_len=64).module
        add_further_tokens(model, 1, False)
    assert [layer.block_type for layer in model.mtp[0].layers] == ["full_attention", "moe"]
    with fake():
        model = build(get_model(NANO).with_config(num_hidden_layers=4), batch_size=1, seq_len=64).module
        with pytest.raises(PlanError, match="no layer is a full_attention"):
            add_further_tokens(model, 1, False)


def test_they_run_on_the_last_stage() -> None:
    step = captured(LLAMA, 4, mtp_num_layers=1)
    job = Pipeline(stages=2, micro_batches=2)(step)
    modules = []
    for program in job.programs:
        rows = [row for _, begin, end, _, _ in program.calls.tolist() for row in range(begin, end)]
        products = [op for op in (job.ops[row] for row in rows) if op.name == "aten.mm"]
        modules.append({op.module.partition(".")[0] for op in products})
    assert "mtp" not in modules[0] and "mtp" in modules[-1]


def test_what_has_no_head_is_refused(fake) -> None:
    with fake():
        model = build(shallow(get_model("bert-base-uncased"), 1), batch_size=1, seq_len=16).module
        with pytest.raises(UsageError, match="has no layers, last norm and head"):
            add_further_tokens(model, 1, False)
    with pytest.raises(UsageError, match="give 0 to 64"):
        StepSpec(mtp_num_layers=-1)


def test_a_capture_says_nothing_of_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(LLAMA, 2, mtp_num_layers=1)
