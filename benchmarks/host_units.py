"""What the units of a host's work take on this processor, in which `echoc capture --measure-host` counts.

python -m benchmarks.host_units [--rounds N]

Each unit is timed on its own, on real tensors so small that arithmetic takes next to nothing, without a capture:

    instruction   of the interpreter, over ten pieces of Python of the standard library's kind
    module        a call of torch.nn.Module beyond its instructions
    operator      a call of PyTorch that allocates, sets up loops and computes: addition, softmax, normalisation
    view          a call that makes another handle of memory
    gradient      what autograd adds to a call that it takes note of
    node          what a backward pass takes for a node beyond the node's operators
    function      a node that is written in Python, forward and backward, beyond its instructions and operators
    alone         what an operator takes more when it is called by itself, as `echoprof ops` does
    batch         taking a batch from a worker process of a loader, on one thread, beside its tensors
    handed_over   a tensor of it, whose memory is opened here
    hashed        a byte of weights as fp32: cast from bf16, and hashed (SHA-1), 16 MiB in a call

Of all rounds the least counts: nobody disturbed it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import inspect
import json
import logging
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Run = Callable[[], Any]


def least(run: Run, rounds: int, calls: int = 200) -> float:
    """Seconds of a call, without the loop around it."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        for _ in range(calls):
            run()
        found.append((time.perf_counter_ns() - began) / calls)
    return min(found) * 1e-9


def instructions(run: Run) -> int:
    """Instructions of the interpreter that a call takes."""
    count = 0

    def local(_frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def called(frame: Any, _event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(called)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


# -- pieces of Python ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _context() -> Iterator[None]:
    yield


@dataclasses.dataclass
class _Settings:
    size: int = 1
    rate: float = 2.0
    name: str = "x"


def _contexts() -> None:
    for _ in range(20):
        with _context(), contextlib.ExitStack() as stack:
            stack.enter_context(_context())


def _settings() -> None:
    for _ in range(30):
        made = dataclasses.replace(_Settings(size=3), rate=4.0)
        getattr(made, "none", None)
        isinstance(made, _Settings)
        sorted([3, 1, 2])


def _numbers() -> None:
    total, kept = 0, {}
    for i in range(100):
        if i % 3 == 0:
            kept[i] = total
        total = min(total + 2 * i, 10**6)


def _records() -> None:
    log = logging.getLogger("benchmarks.host_units")
    for _ in range(20):
        log.debug("step %s", 1)


class _Tree(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.below = nn.ModuleList([_Tree(depth - 1) for _ in range(3)] if depth else [])

    def forward(self, given: Any) -> Any:
        for module in self.below:
            given = module(given)
        return given


_TREE = _Tree(3)
PIECES: tuple[Run, ...] = (
    _contexts,
    _settings,
    _numbers,
    _records,
    lambda: list(_TREE.named_parameters()),
    lambda: json.JSONEncoder(indent=1).encode({"a": [1, 2, {"b": [3.0] * 5}] * 5}),
    lambda: inspect.signature(_settings),
    lambda: copy.deepcopy({"a": [1, 2, {"b": (3, 4)}], "c": [[1], [2]]}),
    lambda: textwrap.fill("hello world " * 30, 40),
    lambda: statistics.median([3, 1, 2, 4]),
)


# -- units ---------------------------------------------------------------------------------------------------


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


def _backward(step: Callable[[Tensor], Tensor], start: Tensor, rounds: int) -> float:
    """Seconds that a backward pass takes for one of many equal steps."""

    def of(count: int) -> float:
        found = []
        for _ in range(rounds):
            end = start
            for _ in range(count):
                end = step(end)
            seed = torch.ones_like(end)
            began = time.perf_counter_ns()
            torch.autograd.grad(end, start, seed)
            found.append(time.perf_counter_ns() - began)
        return min(found) * 1e-9

    return (of(200) - of(50)) / 150


class _Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, tensors: int, count: int) -> None:
        self.tensors, self.count = tensors, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, _: int) -> dict[str, Tensor]:
        return {str(name): torch.zeros(8) for name in range(self.tensors)}


def _taken(tensors: int, rounds: int) -> float:
    """Seconds of this thread for a batch that a worker process has made."""
    found = []
    for _ in DataLoader(_Samples(tensors, rounds + 8), num_workers=1):
        found.append(time.thread_time())
        time.sleep(0.01)  # until the next one waits
    return min(b - a for a, b in pairwise(found[4:]))


def measure(rounds: int) -> dict[str, float]:
    """Seconds of each unit."""
    loop = least(lambda: None, rounds)

    def of(run: Run) -> float:
        return least(run, rounds) - loop

    plain, other, scale = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8)
    taken = torch.ones(4, 8, requires_grad=True)
    kernels: tuple[tuple[Run, Run, Run], ...] = (
        (lambda: torch.add(plain, other), lambda: torch.add(taken, other),
         lambda: torch.ops.aten.add.Tensor(plain, other)),
        (lambda: torch.softmax(plain, -1), lambda: torch.softmax(taken, -1),
         lambda: torch.ops.aten._softmax.default(plain, -1, False)),
        (lambda: torch.layer_norm(plain, (8,), scale, scale), lambda: torch.layer_norm(taken, (8,), scale, scale),
         lambda: torch.ops.aten.native_layer_norm.default(plain, (8,), scale, scale, 1e-5)),
    )  # fmt: skip
    views: tuple[tuple[Run, Run], ...] = (
        (lambda: plain.view(8, 4), lambda: taken.view(8, 4)),
        (lambda: plain.transpose(0, 1), lambda: taken.transpose(0, 1)),
    )
    with torch.no_grad():
        calls = [of(run) for run, _, _ in kernels]
        seen = [of(run) for run, _ in views]
        with torch._C._AutoDispatchBelowAutograd():
            alone = [of(run) for _, _, run in kernels]
    noted = [of(run) for _, run, _ in kernels] + [of(run) for _, run in views]
    found = {"instruction_s": statistics.mean(of(piece) / instructions(piece) for piece in PIECES)}

    def tree() -> Any:
        return _TREE(1)

    found["module_s"] = max(0.0, of(tree) - instructions(tree) * found["instruction_s"]) / 40
    found["operator_s"] = statistics.mean(calls)
    found["view_s"] = statistics.mean(seen)
    found["gradient_s"] = statistics.mean(b - a for a, b in zip([*calls, *seen], noted, strict=True))
    times = _backward(lambda t: t * other, taken, rounds) - calls[0]
    shapes = _backward(lambda t: t.view(8, 4), taken, rounds) - seen[0]
    found["node_s"] = (times + shapes) / 2
    apply = of(lambda: _Doubled.apply(plain)) + _backward(_Doubled.apply, taken, rounds)
    own = (
        2 * calls[0] + found["node_s"] + found["instruction_s"] * (instructions(lambda: _Doubled.apply(plain)) + 4)
    )
    found["function_s"] = max(0.0, apply - own)
    one, many = (_taken(tensors, rounds) for tensors in (1, 9))
    found["handed_over_s"] = (many - one) / 8
    found["batch_s"] = one - found["handed_over_s"]
    weights = torch.zeros(2**22, dtype=torch.bfloat16)
    found["hashed_s"] = least(lambda: hashlib.sha1(weights.float().numpy()).digest(), 8, calls=1) / 2**24
    found["alone_s"] = statistics.mean(b - a for a, b in zip(calls, alone, strict=True))
    return found


def main() -> None:
    """Prints them as `profiler/devices/host_work.toml` has them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_units")
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, seconds in measure(given.rounds).items():
        print(f"{name} = {seconds:.3g}")


if __name__ == "__main__":
    main()
