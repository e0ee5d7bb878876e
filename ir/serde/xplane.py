"""What XLA's profiler writes, from bytes (`proto/xplane.proto`) to columns of events."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from echograph.errors import FormatError
from echograph.ir.columns import Int64
from echograph.proto import xplane_pb2 as pb

NONE = -1
_SIZE = re.compile(r"\bsize:(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaneLine:
    """A stream of a device, a thread of the host, or what the profiler derived of them; columns of its events.

    Attributes:
        name: what it is called.
        number: of the stream or thread.
        start_ns: nanoseconds at which its offsets count 0.
        names: a text each.
        offset_ps: int64 [n], picoseconds since `start_ns`.
        duration_ps: int64 [n], picoseconds.
        correlation: int64 [n], what a call shares with what it launched, or -1.
        nbytes: int64 [n], that a copy moved, or -1.
        step: int64 [n], number of the step that it marks, or -1.
    """

    name: str
    number: int
    start_ns: int
    names: Sequence[str]
    offset_ps: Int64
    duration_ps: Int64
    correlation: Int64
    nbytes: Int64
    step: Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plane:
    """A device, the host, or what is known of the profile.

    Attributes:
        name: "/device:GPU:0", "/host:CPU", ...
        lines: what ran.
        facts: what is said of it, by name: texts and whole numbers.
    """

    name: str
    lines: Sequence[PlaneLine]
    facts: Mapping[str, str | int]


def decode_planes(data: bytes) -> list[Plane]:
    """The planes of an XSpace.

    Raises:
        FormatError: the bytes are no such message, or are cut off.
    """
    try:
        return [_plane(plane) for plane in pb.Space.FromString(data).planes]
    except (DecodeError, OverflowError) as error:
        line = " ".join(str(error).split())[:120]
        raise FormatError(f"no XPlane of XLA's profiler, or truncated ({line})") from None


def _plane(plane: pb.Plane) -> Plane:
    called = {number: meta.display_name or meta.name for number, meta in plane.event_metadata.items()}
    stats = {number: meta.name for number, meta in plane.stat_metadata.items()}
    facts = {stats.get(stat.metadata_id, ""): _value(stat, stats) for stat in plane.stats}
    return Plane(
        name=plane.name,
        lines=[_line(line, called, stats) for line in plane.lines],
        facts={name: value for name, value in facts.items() if isinstance(value, str | int)},
    )


def _line(line: pb.Line, called: Mapping[int, str], stats: Mapping[int, str]) -> PlaneLine:
    count = len(line.events)
    correlation, nbytes, step = np.full((3, count), NONE, np.int64)
    wanted = {n: name for n, name in stats.items() if name in ("correlation_id", "memcpy_details", "step_num")}
    for place, event in enumerate(line.events):
        for stat in event.stats:
            name = wanted.get(stat.metadata_id)
            if name is None:
                continue
            value = _value(stat, stats)
            if name == "memcpy_details":
                said = _SIZE.search(str(value))
                nbytes[place] = int(said[1]) if said else NONE
            elif isinstance(value, int) and 0 <= value < 2**63:
                (correlation if name == "correlation_id" else step)[place] = value
    return PlaneLine(
        name=line.display_name or line.name,
        number=(line.display_id or line.id) & (2**62 - 1),
        start_ns=line.timestamp_ns,
        names=[called.get(event.metadata_id) or f"event {event.metadata_id}" for event in line.events],
        offset_ps=np.fromiter((event.offset_ps for event in line.events), np.int64, count),
        duration_ps=np.fromiter((event.duration_ps for event in line.events), np.int64, count),
        correlation=correlation,
        nbytes=nbytes,
        step=step,
    )


def _value(stat: pb.Stat, stats: Mapping[int, str]) -> str | int | float | bytes | None:
    """What a statistic says; a text may be that of another name."""
    kind = stat.WhichOneof("value")
    if kind == "ref_value":
        return stats.get(stat.ref_value, "")
    value: str | int | float | bytes | None = getattr(stat, kind) if kind else None
    return value
