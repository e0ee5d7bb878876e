"""Every model of the zoo, as it is, compiles, folds, comes back from other forms, and simulates."""

from __future__ import annotations

import pytest
from graph_forms import check_forms

from echograph.frontend.pytorch.spec import StepSpec
from echograph.models import get_model, model_names
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.summary import model_row, summarize

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("name", model_names())
def test_compiles_and_simulates(name: str) -> None:
    entry = get_model(name)
    graph = compile_entry(entry, StepSpec(), batch_size=1)
    shown = summarize(graph)
    assert shown["parameters"] == entry.parameters
    listed = model_row(entry)["flops_per_sample"]
    assert {k: shown["flops"][k] for k in listed} == pytest.approx(listed, rel=0.01)
    assert len(graph.blocks) > 1
    assert len(graph.ops) < 2_000
    check_forms(graph)
    record = predict(graph, Plan(gpus=8))[0].to_json()
    assert 0 < record["step_time_s"] < 100
    assert 0 < record["mfu"] < 0.8
    buffers = record["memory"]["at_peak_bytes"]["buffer"]
    sent = record["collectives"]["dp"]["bytes_per_rank"]
    assert 0 <= sent - 2 * entry.parameters <= buffers, "every gradient once, and buffers at most"
    stored = f"{len(graph.ops):>5} of {graph.unfolded_ops:>6} operations stored"
    print(f"{name:<26} {stored}, {record['step_time_s'] * 1e3:>10.3f} ms")
