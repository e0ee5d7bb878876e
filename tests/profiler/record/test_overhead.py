"""What recording costs: what counts as what, the arithmetic, and the measuring in a process like any other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.profiler.record.overhead import (
    BACKWARD,
    EVALUATES,
    FORWARD,
    NESTED,
    NODE,
    OPERATOR,
    UPDATE,
    counted_as,
    measure_overhead,
    two_kinds,
)


def test_what_operators_count_as() -> None:
    assert counted_as("aten::linear", None) == OPERATOR
    assert counted_as("aten::addmm", "aten::linear") == NESTED
    assert counted_as(f"{EVALUATES}MulBackward0", None) == NODE
    # The function of a node counts with the node; what it calls is called by compiled code.
    assert counted_as("MulBackward0", f"{EVALUATES}MulBackward0") is None
    assert counted_as("aten::mul", "MulBackward0") == NESTED
    # A function in Python, and hooks on gradients, call from Python.
    assert counted_as("_ScaleBackward", f"{EVALUATES}_ScaleBackward") is None
    assert counted_as("aten::mul", "_ScaleBackward") == OPERATOR
    assert counted_as("aten::copy_", f"{EVALUATES}torch::autograd::AccumulateGrad") == OPERATOR


cost = st.floats(0, 1e-3)


@given(nested=cost, more=cost)
def test_two_costs_come_back_from_the_two_parts(nested: float, more: float) -> None:
    operator = nested + more
    counts = {FORWARD: {OPERATOR: 48, NESTED: 245}, UPDATE: {OPERATOR: 5, NESTED: 240}}
    adds = {part: of[OPERATOR] * operator + of[NESTED] * nested for part, of in counts.items()}
    assert two_kinds(adds, counts) == (pytest.approx(operator, abs=1e-9), pytest.approx(nested, abs=1e-9))


@given(forward=st.floats(-1e-3, 1e-3), update=st.floats(-1e-3, 1e-3))
def test_no_cost_is_below_zero(forward: float, update: float) -> None:
    counts = {FORWARD: {OPERATOR: 48, NESTED: 245}, UPDATE: {OPERATOR: 5, NESTED: 240}}
    operator, nested = two_kinds({FORWARD: forward, UPDATE: update}, counts)
    assert operator >= nested >= 0


@pytest.mark.torch
def test_measuring_leaves_the_process_as_it_was() -> None:
    torch = pytest.importorskip("torch", reason="needs the [torch] extra")
    from torch.nn.modules import module
    from torch.optim import optimizer

    from echograph.profiler.comms.tracer import shared_capture

    state = torch.random.get_rng_state()
    with torch.no_grad():
        found = measure_overhead(shapes=True, collectives=True)
    assert found is not None and found.how
    # Microseconds, not milliseconds, whatever else the machine does.
    assert 0 <= found.nested_s < 1e-3 and 0 <= found.operator_s < 1e-3 and 0 <= found.node_s < 1e-3
    assert found.collective_s is None or found.issue_s > 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.autograd.profiler._is_profiler_enabled and not shared_capture().listening
    assert not optimizer._global_optimizer_pre_hooks and not module._has_any_global_hook()


@pytest.mark.torch
def test_what_others_look_at_is_left_alone() -> None:
    torch = pytest.importorskip("torch", reason="needs the [torch] extra")
    from torch.nn.modules import module

    with torch.profiler.profile():
        assert measure_overhead(shapes=False, collectives=False) is None
    seen = []
    handle = module.register_module_forward_hook(lambda *call: seen.append(call))
    try:
        assert measure_overhead(shapes=False, collectives=False) is None
    finally:
        handle.remove()
    assert not seen


@pytest.mark.torch
def test_operators_of_a_step_are_counted_as_the_trace_has_them() -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    from echograph.profiler.record import overhead

    found = overhead.sampled(shapes=False, collectives=False)
    assert len(found.free) == len(found.hooked) == len(found.profiled) == overhead.STEPS
    # Every parameter's gradient is accumulated by a node, and every linear layer has one.
    parameters = overhead.BLOCKS * 12
    assert found.counts[BACKWARD][NODE] > parameters + 4 * overhead.BLOCKS
    assert not found.counts[FORWARD][NODE] and not found.counts[UPDATE][NODE]
    # An update of all parameters at once is few calls, which go through the parameters themselves.
    assert found.counts[UPDATE][OPERATOR] < 12 < parameters <= found.counts[UPDATE][NESTED]
    assert found.modules == overhead.BLOCKS * 7 and not found.calls
