"""Attention whose gradients are added up in one order: which libraries have it, and how long it takes."""

from __future__ import annotations

import pytest

from echograph.profiler.costs import attention_backward, load_device
from echograph.profiler.costs.deterministic import is_possible


def seconds(device: str, kernel: str, *, deterministic: bool, batch: int = 2, heads: int = 16) -> float:
    profile = load_device(device)
    cost = attention_backward(
        profile, batch=batch, heads=heads, seq=8192, head_dim=128, kernel=kernel, deterministic=deterministic
    )
    return float(cost.seconds)


def test_flash_attention_2_is_near_what_was_measured() -> None:
    """Dao-AILab/flash-attention, pull request 1893: 8.279 ms on H100."""
    assert seconds("h100-sxm", "flash2", deterministic=True) == pytest.approx(8.279e-3, rel=0.1)


def test_thread_blocks_that_fill_the_device_wait_for_no_second_one() -> None:
    """108 heads: one thread block a head and SM, and one gradient, in fp32, which is filled."""
    sheet = load_device("a100-sxm-80").datasheet
    heads = sheet.sm_count
    free, fixed = (
        seconds("a100-sxm-80", "flash2", deterministic=order, batch=1, heads=heads) for order in (False, True)
    )
    assert fixed == pytest.approx(free + 4 * heads * 8192 * 128 / sheet.memory_bandwidth_bytes_per_s)
    one_more = seconds("a100-sxm-80", "flash2", deterministic=True, batch=1, heads=heads + 1)
    assert one_more > 1.9 * fixed


@pytest.mark.parametrize(("device", "kernel"), [("h100-sxm", "cudnn"), ("gb200", "cudnn"), ("h100-sxm", "flash3")])
def test_an_order_takes_longer(device: str, kernel: str) -> None:
    assert seconds(device, kernel, deterministic=True) > 1.05 * seconds(device, kernel, deterministic=False)


@pytest.mark.parametrize(
    ("kernel", "architecture", "dropout", "deterministic", "possible"),
    [
        ("cudnn", "hopper", 0.1, True, True),
        ("cudnn", "blackwell", 0.1, True, False),
        ("cudnn", "blackwell", 0.0, True, True),
        ("cudnn", "blackwell", 0.1, False, True),
        ("cudnn", "ampere", 0.0, True, False),
        ("cudnn", "blackwell-rtx", 0.0, True, False),
        ("flash3", "hopper", 0.1, False, False),
        ("flash4", "blackwell", 0.0, True, True),
        ("flash2", "blackwell", 0.1, True, True),
    ],
)
def test_libraries_lack_some(
    kernel: str, architecture: str, dropout: float, deterministic: bool, possible: bool
) -> None:
    assert is_possible(kernel, architecture, dropout, deterministic) is possible
