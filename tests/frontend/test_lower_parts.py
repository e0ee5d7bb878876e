"""Parts of one buffer, written one after the other: who reads a part waits for its write, not a neighbour's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from echograph.frontend.pytorch.lower import lower  # noqa: E402
from echograph.frontend.pytorch.spec import StepSpec  # noqa: E402

pytestmark = pytest.mark.torch


class Parts(torch.nn.Module):
    """Keeps two sums in one buffer, as frameworks keep gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("flat", torch.zeros(16))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            first, second = self.flat[:8], self.flat[8:]
            self.flat[:8].add_(1)
            self.flat[8:].mul_(2)
            read = first.exp() + second.sin()
        return (self.linear(x) + read).sum()


def test_a_part_waits_for_its_own_write_alone(capture_step: Any) -> None:
    captured = capture_step(lambda: (Parts(), (torch.zeros(4, 8),), lambda output: output), dtype="fp32")
    graph = lower(captured, StepSpec(dtype="fp32"), name="parts")
    ops = {op.name: (i, op) for i, op in enumerate(graph.ops)}
    (added, _), (multiplied, second) = ops["aten.add_"], ops["aten.mul_"]
    assert added not in second.deps
    assert tuple(ops["aten.exp"][1].deps) == (added,)
    assert tuple(ops["aten.sin"][1].deps) == (multiplied,)
