"""Traces small enough to compute answers by hand."""

from __future__ import annotations

import gzip
import json
from itertools import count
from pathlib import Path
from typing import Any

from echograph.profiler.traces import Trace, TraceSet, read_trace

Event = dict[str, Any]


def operator(name: str, ts: float, dur: float, *, tid: int = 1, **args: Any) -> Event:
    """An operator on the host."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": args}


def call(ts: float, dur: float, correlation: int, name: str = "cudaLaunchKernel", *, tid: int = 1) -> Event:
    """A call to the runtime."""
    return operator(name, ts, dur, tid=tid, correlation=correlation) | {"cat": "cuda_runtime"}


def work(
    name: str, ts: float, dur: float, correlation: int = -1, *, stream: int = 7, cat: str = "kernel", **args: Any
) -> Event:
    """A kernel, or what else its category says, on device 0."""
    args |= {"stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float) -> Event:
    """A profiler step."""
    return operator(f"ProfilerStep#{number}", ts, dur) | {"cat": "user_annotation"}


def launched(name: str, launch: float, start: float, dur: float, correlation: int, **args: Any) -> list[Event]:
    """A call of one microsecond and the kernel that it launched."""
    return [call(launch, 1, correlation), work(name, start, dur, correlation, **args)]


def write(
    path: Path, events: list[Event], *, rank: int | None = 0, indent: int | None = None, **header: Any
) -> Path:
    """A trace file, gzipped where its name says so."""
    if rank is not None:
        header = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}} | header
    text = json.dumps(header | {"traceEvents": events}, indent=indent)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def trace(folder: Path, events: list[Event], rank: int = 0) -> Trace:
    """One rank's trace, read back from a file."""
    return read_trace(write(folder / f"rank{rank}.json", events, rank=rank))


def job(folder: Path, *ranks: list[Event]) -> TraceSet:
    """The traces of some ranks."""
    return TraceSet({rank: trace(folder, events, rank) for rank, events in zip(count(), ranks, strict=False)})
