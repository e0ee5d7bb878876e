"""What tracing collectives costs: a call on a backend that moves nothing, and a DDP step of GPT-2 on two ranks.

python -m benchmarks.comms [--steps 20] [--layers 12] [--beside FOLDER]

The bare round trip is a kernel in the dispatcher that only passes the call down: what PyTorch itself takes for a
call to be seen at all. Turns of all ways alternate, so that whatever else the machine does falls on them alike. A
call is given in processor time of the thread that makes it and of the whole process, whose writing is then counted
as well; a step in seconds of the clock and of the processor. With `--beside` a copy of collective_trace that lies
in FOLDER is run as its users run it, writing to a file and not to the screen.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import echograph

CALLS = 1000
TURNS = 15
WRITTEN_S = 0.25


def main() -> None:
    """Prints the cost of a call, then that of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each kind, 0 for none")
    parser.add_argument("--beside", type=Path, help="folder with collective_trace, to be timed as well")
    parser.add_argument("--layers", type=int, default=12, help="of the GPT-2")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank >= 0:
        step_of_a_rank(arguments.rank, arguments.folder, arguments.steps, arguments.layers)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        calls(Path(folder), arguments.beside)
        if not arguments.steps:
            return
        command = [sys.executable, "-m", "benchmarks.comms", "--folder", folder, "--steps", str(arguments.steps)]
        ranks = [
            subprocess.Popen([*command, "--layers", str(arguments.layers), "--rank", str(rank)])
            for rank in range(2)
        ]
        if any(rank.wait() for rank in ranks):
            raise RuntimeError("a rank failed")


def calls(folder: Path, beside: Path | None) -> None:
    """Microseconds that a call takes more while it is traced, by kind of call and by who traces.

    Each way has a process of its own, since not all can be undone in one, and they take turns: whatever else the
    machine does falls on all alike.
    """
    ways = ["plain", "echograph", "bare", *(["collective_trace"] if beside else [])]
    spawn = multiprocessing.get_context("spawn")
    ends = {}
    for way in ways:
        ends[way], theirs = spawn.Pipe()
        spawn.Process(target=calls_of_a_way, args=(way, theirs, folder, beside), daemon=True).start()
    print(f"{'processor time a call, us':44}" + "".join(f"{way:>18}" for way in ways))
    for kind in KINDS:
        took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(TURNS):
            for way in ways:
                ends[way].send(kind)
                took[way].append(ends[way].recv())
        for at, clock in enumerate(("thread", "process")):
            for name, of in (("least", min), ("median", statistics.median)):
                found = {way: of([turn[at] * 1e6 for turn in turns]) for way, turns in took.items()}
                more = [found[way] - found["plain"] for way in ways[1:]]
                print(
                    f"{kind:26}{clock + ', ' + name:18}{found['plain']:18.1f}"
                    + "".join(f"{extra:+18.1f}" for extra in more)
                )
    for end in ends.values():
        end.send("")


KINDS = ("all_reduce", "all_reduce, asynchronous", "broadcast", "barrier", "send")


def calls_of_a_way(way: str, end: Any, folder: Path, beside: Path | None) -> None:
    """A process that answers the name of a kind of call with the seconds that one takes."""
    import torch
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.chdir(folder)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        if way == "collective_trace":
            # As its README asks: before any group is made. Its own file, and nothing on the screen.
            sys.path.insert(0, str(beside))
            importlib.import_module("collective_trace").trace_all_collectives(trace_file="theirs", verbose=False)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        if way == "echograph":
            echograph.trace_collectives(folder / "calls.jsonl")
        data = torch.ones(1024)
        # Looked up by name at each call, since a tracer may have put another function there.
        made: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(data),
            "all_reduce, asynchronous": lambda: dist.all_reduce(data, async_op=True).wait(),
            "broadcast": lambda: dist.broadcast(data, 0),
            "barrier": lambda: dist.barrier(),
            "send": lambda: dist.send(data, 1),
        }
        with bare() if way == "bare" else nullcontext():
            while kind := end.recv():
                end.send(repeat(made[kind]))


@contextmanager
def bare() -> Iterator[None]:
    """Kernels that hand calls down and do nothing else."""
    import torch

    below: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in ("allreduce_", "broadcast_", "barrier", "send"):
        redispatch: Any = getattr(torch.ops.c10d, name).default._handle.redispatch_boxed
        library.impl(
            name,
            lambda keys, *given, redispatch=redispatch: redispatch(keys & below, *given),
            "BackendSelect",
            with_keyset=True,
        )
    yield
    library._destroy()


def repeat(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the processor that one call takes, the mean of many: of this thread, and of all."""
    for _ in range(20):
        call()
    began, all_began = time.thread_time(), time.process_time()
    for _ in range(CALLS):
        call()
    own = time.thread_time() - began
    # What is written behind the caller's back belongs to the call.
    time.sleep(WRITTEN_S)
    return own / CALLS, (time.process_time() - all_began) / CALLS


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
