"""Kernels that drop what they make: instructions of their random numbers, and what was measured of attention."""

from __future__ import annotations

import pytest

from echograph.ir.types import Compute, DType, Phase, Tensor, TensorRole
from echograph.profiler.costs import attention_backward, attention_forward, load_device
from echograph.profiler.costs.dropout import BACKWARD, FORWARD, PER_CLOCK, drawn_seconds
from echograph.profiler.costs.estimate import cost_of

SHAPE = {"batch": 4, "heads": 16, "seq": 8192, "head_dim": 128}


def test_it_adds_its_instructions() -> None:
    """Half of 4 x 16 x 8,192 x 8,192 scores under a causal mask."""
    device = load_device("a100-sxm-80")
    rate = PER_CLOCK * device.datasheet.sm_count * device.datasheet.clock_hz
    for cost, instructions in ((attention_forward, FORWARD), (attention_backward, BACKWARD)):
        more = float(cost(device, **SHAPE, dropout=True).seconds - cost(device, **SHAPE).seconds)
        assert more == pytest.approx(4 * 16 * 8192**2 / 2 * instructions / rate)
        assert cost(device, **SHAPE, dropout=True).source == "analytical"


def test_flash_attention_4_is_near_what_was_measured() -> None:
    """Dao-AILab/flash-attention, pull request 2597, GB200: 75 to 85 % of the rate forward, 60 to 70 % backward."""
    device = load_device("gb200")
    forward, backward = (
        [float(cost(device, **SHAPE, kernel="flash4", dropout=dropped).seconds) for dropped in (False, True)]
        for cost in (attention_forward, attention_backward)
    )
    measured = forward[0] / 0.8 + backward[0] / 0.65
    assert forward[1] + backward[1] == pytest.approx(measured, rel=0.15)


def test_an_order_holds_up_what_draws_numbers_as_well() -> None:
    """FlashAttention-2's thread blocks wait for each other, whatever they do."""
    device = load_device("h100-sxm")
    times = {
        (dropped, order): float(
            attention_backward(device, **SHAPE, kernel="flash2", dropout=dropped, deterministic=order).seconds
        )
        for dropped in (False, True)
        for order in (False, True)
    }
    free, fixed = (times[True, order] - times[False, order] for order in (False, True))
    assert fixed > free > 0


@pytest.mark.parametrize(("device", "drawing"), [("gb200", True), ("a100-sxm-40", False)])
def test_a_compiled_kernel_moves_memory_while_it_draws(device: str, drawing: bool) -> None:
    """Of 4 million elements: x, a residual, a result and a mask, 7 bytes each."""
    elements, profile = 2**22, load_device(device)
    made = Tensor(id=0, name="out", shape=(elements,), dtype=DType.BF16, role=TensorRole.ACTIVATION)

    def seconds(name: str) -> float:
        op = Compute(
            id=0, name=name, phase=Phase.FORWARD, outputs=(0,), bytes_read=4 * elements, bytes_written=3 * elements
        )
        return float(cost_of(op, ([made, made], [made]), profile).seconds)

    drawn, plain = drawn_seconds(profile.datasheet, elements), seconds("compiled.add")
    assert seconds("compiled.dropout_add") == pytest.approx(max(drawn, plain))
    assert (drawn > plain) is drawing
