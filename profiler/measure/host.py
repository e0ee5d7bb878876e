"""What the host adds to an operation: an eager framework's bookkeeping, beyond running the operator itself.

Two modules of ordinary layers, so small that their arithmetic takes no time, are trained step by step; one has
views between its layers, the other has not. What their steps take beyond their operators, run on their own, is
the host's. No model's step time is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.profiler.measure.device import MeasuringDevice

_WIDTH = 8
_LAYERS = 24
_ROUNDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOverhead:
    """Seconds to issue an operation beyond running its operator, and to issue a view."""

    op_s: float
    view_s: float


class _Layer(nn.Module):
    """Layers whose steps dispatch a known kind of operator: with views between them, or without."""

    def __init__(self, views: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.act = nn.GELU()
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(x) * self.scale)
        if self.views:
            y = y.view(2, 2, _WIDTH).transpose(0, 1).transpose(0, 1).view(4, _WIDTH)
        out: Tensor = x + y
        return out


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that ran, with their arguments; and how many of them were views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[tuple[Any, Any, Any]] = []
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            self.views += func is not torch.ops.aten.detach.default
        else:
            self.work.append((func, args, kwargs or {}))
        return out


def measure_host(device: MeasuringDevice, rounds: int = _ROUNDS) -> EagerOverhead:
    """Measures the host that feeds a device.

    Where the host runs ahead, issuing is all that it does, the operators' own part included; where it computes
    itself, what the operators take alone is taken off.
    """
    modules = [nn.Sequential(*(_Layer(views) for _ in range(_LAYERS))).to(device.name) for views in (False, True)]
    counts, alone = [], []
    for module in modules:
        with _Seen() as seen:
            _step(module, device)
        counts.append((len(seen.work), seen.views))
        alone.append(seen.work)
    samples = []
    for _ in range(rounds):
        steps = [_timed(lambda m=m: _step(m, device), device) for m in modules]  # type: ignore[misc]
        own = [0.0 if device.runs_ahead else _timed(lambda w=w: _alone(w), device) for w in alone]  # type: ignore[misc]
        samples.append([step - kernels for step, kernels in zip(steps, own, strict=True)])
    first, second = (median(s[i] for s in samples) for i in range(2))
    return _solved(counts, (first, second))


def _solved(counts: list[tuple[int, int]], seconds: tuple[float, float]) -> EagerOverhead:
    """The two unknowns from two steps: seconds = operations * op_s + views * view_s."""
    (a, b), (c, d) = counts
    determinant = a * d - b * c
    op_s = (seconds[0] * d - b * seconds[1]) / determinant
    view_s = (a * seconds[1] - c * seconds[0]) / determinant
    return EagerOverhead(op_s=max(0.0, op_s), view_s=max(0.0, view_s))


def _step(module: nn.Module, device: MeasuringDevice) -> None:
    loss = module(torch.ones(4, _WIDTH, device=device.name)).sum()
    loss.backward()
    for parameter in module.parameters():
        parameter.grad = None


def _alone(work: list[tuple[Any, Any, Any]]) -> None:
    with _below_autograd():
        for func, args, kwargs in work:
            func(*args, **kwargs)


@contextmanager
def _below_autograd() -> Iterator[None]:
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def _timed(run: Callable[[], None], device: MeasuringDevice) -> float:
    device.synchronize()
    began = device.host_clock()
    run()
    return device.host_clock() - began
