"""What PyTorch's allocator did and held, from the snapshot that `torch.cuda.memory._dump_snapshot` pickles.

A snapshot is made of plain values alone; a pickle that has anything else is refused (`ir.plain_pickle`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Int64
from echograph.ir.files import read_unpacked
from echograph.ir.plain_pickle import plain_pickle
from echograph.profiler.traces.kineto import rank_of_name
from echograph.profiler.traces.rows import TraceRows
from echograph.profiler.traces.trace import Trace
from echograph.progress import Progress, silent

WHAT = "a memory snapshot of PyTorch"
MAX_BYTES = 2**31
BLOCK = 512
"""What the allocator rounds requests to (`c10::cuda::CUDACachingAllocator`, `kMinBlockSize`)."""
# What each action does to what tensors hold, and to what the allocator has of the device.
_TENSORS = {"alloc": 1, "free_requested": -1, "free": -1}
_DEVICE = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


# A device has no more; levels, which are sums of sizes, stay within 64 bits.
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**44)]


class Frame(msgspec.Struct, gc=False):
    """A line of a stack."""

    filename: str = ""
    line: int = 0
    name: str = ""


class Entry(msgspec.Struct, gc=False):
    """An action of the allocator."""

    action: str
    size: Size = 0
    addr: int = -1
    time_us: int | None = None
    frames: list[Frame] = []


class SnapshotBlock(msgspec.Struct, gc=False):
    """A piece of a segment."""

    size: Size
    state: str
    address: int = -1
    requested_size: Size | None = None
    frames: list[Frame] = []


class SnapshotSegment(msgspec.Struct, gc=False):
    """What the allocator has of a device in one piece."""

    total_size: Size
    blocks: list[SnapshotBlock]
    device: Annotated[int, msgspec.Meta(ge=0, le=2**10)] = 0


class Snapshot(msgspec.Struct, gc=False):
    """What the file holds, as far as it is read."""

    segments: list[SnapshotSegment]
    device_traces: list[list[Entry]] = []


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceMemory:
    """What the allocator of one device did.

    Attributes:
        device: its number.
        time_us: int64 [n], of each change, microseconds since 1970; its number where the file does not say when.
        timed: whether it does.
        change: int64 [n], bytes that tensors took, or gave back; 0 where a segment came or went.
        allocated: int64 [n], bytes that tensors held then, in blocks of 512.
        reserved: int64 [n], bytes that the allocator had of the device.
        peak: place of the entry with which most was allocated.
        alive: blocks alive then: bytes and stack, as far as the history knows them.
        out_of_memory: how often a request failed.
    """

    device: int
    time_us: Int64
    timed: bool
    change: Int64
    allocated: Int64
    reserved: Int64
    peak: int
    alive: list[tuple[int, list[Frame]]]
    out_of_memory: int


def read_memory(path: Path, progress: Progress = silent) -> Trace:
    """A snapshot as the trace of a rank: nothing ran in it, but memory was taken and given back.

    The rank is that of the file's name, or 0. The allocator's history is read again when it is asked for
    (`analyses.memory`), as that of a profile is.

    Args:
        path: the file.
        progress: told how far the reading is.

    Raises:
        InputError: as `read_snapshot`.
    """
    progress(f"reading {path.name}")
    found = list(device_memories(read_snapshot(path)))
    rows = TraceRows(path, WHAT)
    for one in found:
        of = f"{path}: device {one.device}"
        rows.notes += [f"{of} ran out of memory {one.out_of_memory} times"] * bool(one.out_of_memory)
        rows.notes += [] if one.timed else [f"{of}: its entries have no times: ts counts them"]
    if not any(len(one.change) for one in found):
        rows.notes.append(
            f"{path}: no history, only what is held: call torch.cuda.memory._record_memory_history()"
        )
    return rows.trace(rank_of_name(path))


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no snapshot, or is cut off; nothing of it was executed.
    """
    data = read_unpacked(path, "give the file of torch.cuda.memory._dump_snapshot", MAX_BYTES)
    try:
        return msgspec.convert(plain_pickle(data), Snapshot)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: no memory snapshot of PyTorch, or cut off: {why}") from None


def device_memories(snapshot: Snapshot) -> Iterator[DeviceMemory]:
    """What each device's allocator did; devices that did and hold nothing are left out."""
    several = max([len(snapshot.device_traces), *(segment.device + 1 for segment in snapshot.segments)], default=0)
    for device in range(several):
        entries = snapshot.device_traces[device] if device < len(snapshot.device_traces) else []
        segments = [segment for segment in snapshot.segments if segment.device == device]
        if entries or segments:
            yield _device(device, entries, segments)


def _device(device: int, entries: list[Entry], segments: list[SnapshotSegment]) -> DeviceMemory:
    """The history is cut off at its begin, if anywhere: levels count back from what is held at its end."""
    held = [block for segment in segments for block in segment.blocks if block.state == "active_allocated"]
    tensors, reserved = (_signed(entries, signs) for signs in (_TENSORS, _DEVICE))
    at_end = sum(map(_rounded, (_requested(block) for block in held)))
    kept = [place for place, entry in enumerate(entries) if entry.action in _TENSORS or entry.action in _DEVICE]
    allocated = at_end - (tensors.sum() - np.cumsum(tensors))
    has = sum(segment.total_size for segment in segments) - (reserved.sum() - np.cumsum(reserved))
    times = [entry.time_us for entry in entries]
    timed = None not in times
    peak = int(allocated.argmax()) if len(entries) else -1
    alive = _alive(entries, held, peak)
    return DeviceMemory(
        device=device,
        time_us=np.array([times[place] if timed else place for place in kept], np.int64),
        timed=timed,
        change=tensors[kept],
        allocated=allocated[kept],
        reserved=has[kept],
        peak=kept.index(peak) if peak in kept else -1,
        alive=alive,
        out_of_memory=sum(entry.action == "oom" for entry in entries),
    )


def _alive(entries: list[Entry], held: list[SnapshotBlock], peak: int) -> list[tuple[int, list[Frame]]]:
    """What is alive after the entry of the peak: what is held at the end, with all that followed undone."""
    alive = {block.address: (_rounded(_requested(block)), block.frames) for block in held}
    for entry in reversed(entries[peak + 1 :]):
        if entry.action == "alloc":
            alive.pop(entry.addr, None)
        elif entry.action in _TENSORS:
            alive[entry.addr] = (_rounded(entry.size), entry.frames)
    # A stack is that of the allocation, where the history has it: what frees says where it was freed.
    for entry in entries[: peak + 1]:
        if entry.action == "alloc" and entry.addr in alive:
            alive[entry.addr] = (alive[entry.addr][0], entry.frames)
    return list(alive.values())


def _signed(entries: list[Entry], signs: dict[str, int]) -> Int64:
    """Bytes by which each entry changes a level."""
    sizes = (_rounded(entry.size) if signs is _TENSORS else entry.size for entry in entries)
    found = (signs.get(entry.action, 0) * size for entry, size in zip(entries, sizes, strict=True))
    return np.fromiter(found, np.int64, len(entries))


def _requested(block: SnapshotBlock) -> int:
    return block.size if block.requested_size is None else block.requested_size


def _rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


class SnapshotPlace(NamedTuple):
    """Where an allocation was made, for people.

    Attributes:
        line: the innermost line of Python that is not of PyTorch, or of whatever there is.
        stack: all lines, innermost first.
    """

    line: str
    stack: str


def snapshot_place(frames: list[Frame]) -> SnapshotPlace:
    """Where an allocation was made, by its stack, innermost first."""
    python = [frame for frame in frames if frame.filename.endswith(".py")]
    own = [frame for frame in python if "/torch/" not in frame.filename]
    chosen = next(iter(own or python or frames), None)
    return SnapshotPlace(
        "" if chosen is None else _line(chosen), " < ".join(_line(frame) for frame in python or frames)
    )


def _line(frame: Frame) -> str:
    return f"{frame.filename}:{frame.line} {frame.name}" if frame.filename else frame.name
