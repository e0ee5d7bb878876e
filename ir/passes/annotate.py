"""Durations on operations: put there, joined from a measured profile by signature, dropped for communications."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from math import sqrt
from operator import mul
from typing import ClassVar, TypeVar

import numpy as np

from echograph.ir.columns import NONE, Float32, Int64, Ragged, UInt8
from echograph.ir.graph import Graph
from echograph.ir.profile import Measurement, Profile, Signature, signatures
from echograph.ir.types import COMMUNICATIONS, OpKind, Source

G = TypeVar("G", bound=Graph)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Annotate:
    """Adds one duration to each operation that has none for the device yet.

    Attributes:
        device: the device that the durations are of.
        picoseconds: int64 array, one a row of the operation table; -1 adds nothing.
        source: uint8 array of `types.Source` values.
        spread: float32 array of relative standard errors.
        samples: int64 array of measurements behind each.
    """

    name: ClassVar[str] = "annotate"

    device: str
    picoseconds: Int64
    source: UInt8
    spread: Float32
    samples: Int64

    def __call__(self, graph: G) -> G:
        """The graph with the durations."""
        ops = graph.ops
        known, _, _ = ops.duration_on(self.device)
        rows = np.flatnonzero((self.picoseconds != NONE) & (known == NONE))
        if not len(rows):
            return graph
        strings = ops.strings if self.device in ops.strings else (*ops.strings, self.device)
        lengths = ops.duration.lengths.copy()
        lengths[rows] += 1
        at = ops.duration.offsets[rows + 1]
        table = replace(
            ops,
            strings=strings,
            duration=Ragged(
                np.concatenate([[0], np.cumsum(lengths)]),
                np.insert(ops.duration.values, at, self.picoseconds[rows]),
            ),
            duration_device=np.insert(ops.duration_device, at, strings.index(self.device)),
            duration_source=np.insert(ops.duration_source, at, self.source[rows]),
            duration_samples=np.insert(ops.duration_samples, at, self.samples[rows]),
            duration_spread=np.insert(ops.duration_spread, at, self.spread[rows]),
        )
        return replace(graph, ops=table, tensors=replace(graph.tensors, strings=strings))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetCommunication:
    """Drops what a graph says of the time of communications, so that a cluster's model says it."""

    name: ClassVar[str] = "forget_communication"

    def __call__(self, graph: G) -> G:
        """The graph without durations of collectives, sends and receives."""
        ops = graph.ops
        dropped = np.isin(ops.kind, COMMUNICATIONS)
        kept = ~dropped[ops.duration.rows]
        lengths = np.where(dropped, 0, ops.duration.lengths)
        table = replace(
            ops,
            duration=Ragged(np.concatenate([[0], np.cumsum(lengths)]), ops.duration.values[kept]),
            duration_device=ops.duration_device[kept],
            duration_source=ops.duration_source[kept],
            duration_samples=ops.duration_samples[kept],
            duration_spread=ops.duration_spread[kept],
        )
        return replace(graph, ops=table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What a join found, in operations that the graph runs (a repeated one as often as it runs).

    Attributes:
        measured: operations with a measured duration.
        free: views, which a device does not see.
        missing: device operations without a measured duration.
        other: communications and host work, which a profile of a device does not hold.
        busy_ps: the measured durations, as often as their operations run.
        missing_operators: of the missing ones, most frequent first.
        unmatched: measurements that no operation of the graph has the signature of.
    """

    measured: int
    free: int
    missing: int
    other: int
    busy_ps: int
    missing_operators: tuple[tuple[str, int], ...]
    unmatched: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDuration:
    """The duration of a signature.

    Attributes:
        picoseconds: the median of a measurement; of several invocations that a graph cannot tell apart, their
            mean, each counted as often as the measured step runs it.
        samples: measurements behind it.
        spread: relative standard error.
    """

    picoseconds: int
    samples: int
    spread: float


def join(graph: Graph, profile: Profile, device: str = "") -> tuple[Annotate, Coverage]:
    """The pass that puts a profile's durations on a graph, and what it covers.

    Args:
        graph: a step or a job.
        profile: measured.
        device: name for the durations; that of the profile if empty.
    """
    values = by_signature(profile)
    count = len(graph.ops)
    picoseconds, samples = np.full(count, NONE, np.int64), np.zeros(count, np.int64)
    spread: Float32 = np.zeros(count, np.float32)
    found: set[Signature] = set()
    known = list(signatures(graph))
    for row, signature in enumerate(known):
        value = None if signature is None else values.get(signature)
        if signature is not None and value is not None:
            found.add(signature)
            picoseconds[row], samples[row], spread[row] = value.picoseconds, value.samples, value.spread
    annotate = Annotate(
        device=device or profile.environment.device,
        picoseconds=picoseconds,
        source=np.full(count, Source.MEASURED, np.uint8),
        spread=spread,
        samples=samples,
    )
    unmatched = tuple(m for m in profile.measurements if m.signature not in found)
    return annotate, _coverage(graph, picoseconds, unmatched)


def by_signature(profile: Profile) -> dict[Signature, MeasuredDuration]:
    """The durations that a profile has, one for each signature."""
    groups: dict[Signature, list[Measurement]] = defaultdict(list)
    for measurement in profile.measurements:
        groups[measurement.signature].append(measurement)
    return {signature: _value(group) for signature, group in groups.items()}


def _value(group: list[Measurement]) -> MeasuredDuration:
    weights = [max(1, m.runs) for m in group]
    whole = sum(weights)
    total = sum(m.median_picoseconds * w for m, w in zip(group, weights, strict=True))
    error = sqrt(sum((m.spread * m.median_picoseconds * w) ** 2 for m, w in zip(group, weights, strict=True)))
    return MeasuredDuration(
        picoseconds=round(Fraction(total, whole)),
        samples=sum(m.samples for m in group),
        spread=error / total if total else 0.0,
    )


def _coverage(graph: Graph, picoseconds: Int64, unmatched: tuple[Measurement, ...]) -> Coverage:
    runs, measured = graph.run_counts(), picoseconds != NONE
    ops = graph.ops
    views = ops.is_view & (ops.kind == OpKind.COMPUTE)
    other = np.isin(ops.kind, (*COMMUNICATIONS, OpKind.HOST))
    missing = ~(measured | views | other)
    names: Counter[str] = Counter()
    for row in np.flatnonzero(missing).tolist():
        names[ops.strings[ops.name[row]]] += int(runs[row])
    return Coverage(
        measured=int(runs[measured].sum()),
        free=int(runs[views].sum()),
        missing=int(runs[missing].sum()),
        other=int(runs[other].sum()),
        busy_ps=sum(map(mul, picoseconds[measured].tolist(), runs[measured].tolist())),
        missing_operators=tuple(names.most_common()),
        unmatched=unmatched,
    )
