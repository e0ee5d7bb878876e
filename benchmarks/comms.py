"""What tracing collectives costs: a call on a backend that moves nothing, and a DDP step of GPT-2 on two ranks.

python -m benchmarks.comms [--steps 20] [--layers 12]

The bare round trip is a kernel in the dispatcher that only passes the call down: what PyTorch itself takes for a
call to be seen at all. Turns with and without alternate, so that whatever else the machine does falls on both
alike. A call is given in processor time of the thread that makes it, a step in seconds of the clock and of the
processor, the thread that writes included; all are medians.
Of collective_trace, with which one might compare, no package was found to install: nothing of it is run here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import echograph

CALLS = 2000
TURNS = 15


def main() -> None:
    """Prints the cost of a call, then that of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each kind")
    parser.add_argument("--layers", type=int, default=12, help="of the GPT-2")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank >= 0:
        step_of_a_rank(arguments.rank, arguments.folder, arguments.steps, arguments.layers)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        calls(Path(folder))
        command = [sys.executable, "-m", "benchmarks.comms", "--folder", folder, "--steps", str(arguments.steps)]
        ranks = [
            subprocess.Popen([*command, "--layers", str(arguments.layers), "--rank", str(rank)])
            for rank in range(2)
        ]
        if any(rank.wait() for rank in ranks):
            raise RuntimeError("a rank failed")


def calls(folder: Path) -> None:
    """Microseconds that a call takes more while it is traced, by kind of call."""
    import torch
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    data = torch.ones(1024)
    kinds: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(data),
        "all_reduce, asynchronous": lambda: dist.all_reduce(data, async_op=True).wait(),
        "send": lambda: dist.send(data, 1),
    }
    for name, call in kinds.items():
        plain, traced = alternate(
            lambda call=call: repeat(call),  # type: ignore[misc]
            TURNS,
            lambda: echograph.trace_collectives(folder / "calls.jsonl"),
        )
        print(
            f"{name:26}{plain * 1e6:8.1f} us{traced * 1e6:8.1f} us traced: {(traced - plain) * 1e6:6.1f} us a call"
        )
    plain, passed = alternate(lambda: repeat(kinds["all_reduce"]), TURNS, bare)
    print(f"{'all_reduce':26}{plain * 1e6:8.1f} us{passed * 1e6:8.1f} us passed down by a bare kernel")
    dist.destroy_process_group()


@contextmanager
def bare() -> Iterator[None]:
    """A kernel that hands all-reduces down and does nothing else."""
    import torch

    below: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch: Any = torch.ops.c10d.allreduce_.default._handle.redispatch_boxed
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(
        "allreduce_", lambda keys, *given: redispatch(keys & below, *given), "BackendSelect", with_keyset=True
    )
    yield
    library._destroy()


def repeat(call: Callable[[], Any]) -> float:
    """Seconds of the processor that one call takes, the mean of many."""
    for _ in range(50):
        call()
    began = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - began) / CALLS


def alternate(
    timed: Callable[[], float], turns: int, traced: Callable[[], AbstractContextManager[Any]]
) -> tuple[float, float]:
    """Medians without and with what `traced` makes."""
    without, within = [], []
    timed()
    for _ in range(turns):
        without.append(timed())
        with traced():
            within.append(timed())
    return statistics.median(without), statistics.median(within)


def step_of_a_rank(rank: int, folder: Path, steps: int, layers: int) -> None:
    """Seconds of a step of GPT-2 under DDP, with and without the tracer."""
    import torch
    from torch import distributed as dist
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (1, 64))

    processor: list[float] = []

    def step() -> float:
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        processor.append(time.process_time() - busy)
        return time.perf_counter() - began

    plain, traced = alternate(step, steps, lambda: echograph.trace_collectives(folder / "steps.jsonl"))
    # The first was to warm up.
    busy, busy_traced = statistics.median(processor[1::2]), statistics.median(processor[2::2])
    if rank == 0:
        print(
            f"DDP step, GPT-2, {layers} layers: {plain:.3f} s, traced {traced:.3f} s, ratio {traced / plain:.4f}; "
            f"processor {busy:.3f} s, traced {busy_traced:.3f} s, ratio {busy_traced / busy:.4f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
