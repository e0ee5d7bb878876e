"""What the allocator held when, from the trace itself or from PyTorch's own memory timeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from echograph.errors import DataError, UsageError
from echograph.ir.files import read_unpacked
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.analyses.work import US
from echograph.profiler.traces.events import whole_events
from echograph.profiler.traces.memory_snapshot import WHAT, device_memories, read_snapshot, snapshot_place
from echograph.profiler.traces.trace import LONGEST_US, Trace, TraceSet

TITLES = ("rank", "ts", "device", "change_bytes", "allocated_bytes", "reserved_bytes")
# What `torch.profiler` sorts memory into, in the order of its numbers.
CATEGORIES = (
    "parameter",
    "optimizer_state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd_detail",
    "unknown",
)
# c10's device types that have an allocator with a name that people know.
_DEVICES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 19: "mtia"}
_MAX_BYTES = 2**31
_NS_PER_US = 1000


class _Said(NamedTuple):
    ts: float
    device: str
    change: int
    allocated: int | None
    reserved: int | None


class _Arguments(msgspec.Struct, gc=False):
    """What an allocator says in a profile."""

    change: int = msgspec.field(name="Bytes")
    type: int = msgspec.field(default=0, name="Device Type")
    number: int = msgspec.field(default=-1, name="Device Id")
    allocated: int | None = msgspec.field(default=None, name="Total Allocated")
    reserved: int | None = msgspec.field(default=None, name="Total Reserved")


class _Memory(msgspec.Struct, gc=False):
    ts: int | float
    args: _Arguments


def memory_timeline(traces: TraceSet) -> AnswerTable:
    """What the allocator of each device held, whenever that changed.

    It is what a profile with `profile_memory=True` says, or a memory snapshot
    (`torch.cuda.memory._dump_snapshot`), of which what tensors hold is in blocks of 512 bytes, and times count
    from the first entry.

    Columns: `rank`; `ts` microseconds since the first event of the job; `device` ("cuda:1", "cpu");
    `change_bytes` what was allocated, or freed if negative; `allocated_bytes` what tensors held then;
    `reserved_bytes` what the allocator had of the device. By time, rank by rank; files that say less leave the
    last two empty.

    Args:
        traces: the job's; their files are still where they were.

    Raises:
        InputError: a file is gone.
    """
    rows: list[tuple[Any, ...]] = []
    notes = list(traces.notes)
    for rank, trace in traces.items():
        if trace.header.get("format") == WHAT:
            rows += [(rank, *said) for said in _snapped(trace)]
            continue
        end = int(trace.end.max()) if len(trace) else 0
        found = list(_said(trace))
        if broken := found.count(None):
            notes.append(
                f"rank {rank}: {broken} records of memory have no time or are no numbers: they are left out"
            )
        own = sorted((said for said in found if said and said.ts <= end), key=lambda said: said.ts)
        if not own and not broken:
            notes.append(trace.without("memory in its profile", "profile with profile_memory=True"))
        rows += [(rank, said.ts / US, *said[1:]) for said in own]
    return from_rows(TITLES, rows, notes)


def _snapped(trace: Trace) -> Iterator[_Said]:
    """What a snapshot says of each device, by time."""
    for one in device_memories(read_snapshot(Path(trace.path))):
        first = int(one.time_us[0]) if len(one.time_us) else 0
        columns = (one.time_us - first, one.change, one.allocated, one.reserved)
        for ts, change, allocated, reserved in zip(*(column.tolist() for column in columns), strict=True):
            yield _Said(float(ts), f"cuda:{one.device}", change, allocated, reserved)


class PredictedMemory(NamedTuple):
    """What a prediction says of a rank's memory, bytes.

    Attributes:
        peak: the most that is allocated at one time.
        reserved: the most that the allocator has of the device; None where it was not worked out.
    """

    peak: int
    reserved: int | None


def memory_peaks(traces: TraceSet, *, predicted: PredictedMemory | None = None) -> AnswerTable:
    """The most memory that each device's allocator held, beside our prediction of it.

    Columns: `rank`; `device`; `quantity`: "allocated" by tensors, "reserved" of the device; `measured_bytes`, the
    most; `at(us)`, when that was, as in `memory-timeline`; `predicted_bytes` and `ratio` of measured to predicted,
    empty without a prediction. What was allocated before the profile began counts where the profile says so.

    Args:
        traces: the job's; their files are still where they were.
        predicted: of a rank; on the command line, the result of `echosim run --output`.

    Raises:
        InputError: a file is gone.
    """
    answer = memory_timeline(traces)
    notes = list(answer.notes)
    most: dict[tuple[int, str, str], tuple[int, float]] = {}
    for row in answer.records():
        for quantity in ("allocated", "reserved"):
            nbytes, key = row[f"{quantity}_bytes"], (row["rank"], row["device"], quantity)
            if nbytes is not None and (key not in most or nbytes > most[key][0]):
                most[key] = nbytes, row["ts"]
    if most and predicted is None:
        notes.append("memory-peaks: name our prediction (--option predicted=RESULT.json of echosim run --output)")
    rows = []
    for (rank, device, quantity), (nbytes, at) in most.items():
        said = (predicted.peak if quantity == "allocated" else predicted.reserved) if predicted else None
        expected = None if device.startswith("cpu") else said
        rows.append((rank, device, quantity, nbytes, at, expected, nbytes / expected if expected else None))
    titles = ("rank", "device", "quantity", "measured_bytes", "at(us)", "predicted_bytes", "ratio")
    return from_rows(titles, rows, notes)


def memory_holders(traces: TraceSet, *, stack: bool = False, top: int = 0) -> AnswerTable:
    """What held memory when most was allocated, by where it was allocated; of memory snapshots.

    Columns: `rank`; `device`; `place`: the innermost line of Python outside PyTorch under which it was allocated,
    or with `stack` all lines, empty where the history does not know; `bytes` alive at the peak; `count` of
    blocks; `percent` of the peak. The largest first.

    Args:
        traces: memory snapshots; their files are still where they were.
        stack: whole stacks.
        top: only so many places of each device; 0 names all.

    Raises:
        InputError: a file is gone.
    """
    rows, notes = [], list(traces.notes)
    for rank, trace in traces.items():
        if trace.header.get("format") != WHAT:
            notes.append(f"rank {rank}: no memory snapshot: torch.cuda.memory._dump_snapshot() writes one")
            continue
        for one in device_memories(read_snapshot(Path(trace.path))):
            held: dict[str, list[int]] = {}
            for nbytes, frames in one.alive:
                said = snapshot_place(frames)
                held.setdefault(said.stack if stack else said.line, []).append(nbytes)
            whole = sum(map(sum, held.values()))
            largest = sorted(held.items(), key=lambda item: (-sum(item[1]), item[0]))
            for where, sizes in largest[: top or None]:
                share = round(100 * sum(sizes) / whole, 2) if whole else 0.0
                rows.append((rank, f"cuda:{one.device}", where, sum(sizes), len(sizes), share))
    return from_rows(("rank", "device", "place", "bytes", "count", "percent"), rows, notes)


def _said(trace: Trace) -> Iterator[_Said | None]:
    """What the allocator said, in the order of the file; None where that is no record of memory."""
    # Newer files say whether memory was profiled; they need not be read for nothing.
    if trace.header.get("profile_memory") == 0:
        return
    ranks = trace.header.get("processRanks") or {}
    for _, event in whole_events(Path(trace.path)) if trace.has_file else ():
        if event.get("name") != "[memory]" or ranks.get(str(event.get("pid")), trace.rank) != trace.rank:
            continue
        try:
            said = msgspec.convert(event, _Memory, strict=False)
        except msgspec.ValidationError:
            yield None
            continue
        args, ts = said.args, said.ts
        if not abs(ts) < LONGEST_US * 2**19:
            yield None
            continue
        device = _DEVICES.get(args.type, f"type {args.type}")
        yield _Said(
            ts=int(ts) * US + round((ts - int(ts)) * US) - trace.origin,
            device=f"{device}:{args.number}" if args.number >= 0 else device,
            change=args.change,
            allocated=args.allocated,
            reserved=args.reserved,
        )


def memory_categories(traces: TraceSet, *, file: str = "") -> AnswerTable:
    """What the memory of one device was for, whenever that changed, from PyTorch's memory timeline.

    The file is what `torch.profiler.profile.export_memory_timeline` writes to a name that ends in `.raw.json.gz`.

    Columns: `ts` microseconds since its first event (0 for what was there before); bytes of each of the eight
    categories of `torch.profiler`: `parameter`, `optimizer_state`, `input`, `temporary`, `activation`, `gradient`,
    `autograd_detail`, `unknown`; `total`. One row a moment.

    Args:
        traces: the job's; nothing of them is used but their notes.
        file: the memory timeline.

    Raises:
        UsageError: no file is named.
        InputError: it cannot be read.
        DataError: it is no such timeline.
    """
    if not file:
        raise UsageError("memory-categories: name the file, for instance --option file=memory.raw.json.gz")
    events = _raw_events(Path(file))
    time, _, size, category = events.T if len(events) else np.zeros((4, 0), np.int64)
    first = int(time[time >= 0].min(initial=np.iinfo(np.int64).max))
    time = np.where(time < 0, 0, time - first)
    order = np.argsort(time, kind="stable")
    change = np.zeros((len(time), len(CATEGORIES)), np.int64)
    change[np.arange(len(time)), category[order]] = size[order]
    held, time = np.cumsum(change, axis=0), time[order]
    last = np.flatnonzero(np.append(time[1:] != time[:-1], [True])[: len(time)])
    columns: dict[str, Any] = {"ts": time[last] / _NS_PER_US}
    columns |= {name: held[last, at] for at, name in enumerate(CATEGORIES)}
    columns["total"] = held[last].sum(axis=1)
    return AnswerTable(columns=columns, notes=traces.notes)


def _raw_events(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Time (ns, -1 for before the profile), action, bytes and category of each change."""
    raw = read_unpacked(path, "give the file of export_memory_timeline", _MAX_BYTES)
    try:
        rows = msgspec.json.decode(raw, type=list[tuple[int, int, int, int]])
        events = np.array(rows, np.int64).reshape(-1, 4)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(
            f"{path}: no memory timeline as export_memory_timeline writes .raw.json.gz ({error})"
        ) from None
    if len(events) and not 0 <= events[:, 3].min() <= events[:, 3].max() < len(CATEGORIES):
        raise DataError(f"{path}: a category beyond 0 to {len(CATEGORIES) - 1}: of another version of PyTorch")
    return events
