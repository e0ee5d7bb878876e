"""Joins the ranks' calls and adds them up: by operation and shape, by group, by phase, by rank.

The rows of one (channel, sequence) are one collective. Files are read side by side, the one that is furthest
behind first, so that what waits for its other ranks stays small, however long the job ran.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echograph.ir.comms.bandwidth import base_operation, bus_factor
from echograph.ir.comms.record import NO_TIME, UNKNOWN, CallRows, CallSignature, CallSource
from echograph.ir.tables import csv_text
from echograph.profiler.comms.readers import find_sources

Ints = NDArray[np.int64]
_Flags = NDArray[np.bool_]

MAX_WAITING = 1 << 19
_RANK = re.compile("[0-9]{1,9}")
BATCH = 1 << 17
_TOGETHER = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "monitored_barrier"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of some calls, one array a column; the rows of one call stand together.

    Attributes:
        kind: index into `Merge.signatures`.
        source: index into the sources.
        sequence: number in the channel.
        start: nanoseconds of the wall clock; of the first source's host, where clocks could be compared.
        end: nanoseconds of the same clock; `NO_TIME` where not known.
        wait: when the caller first waited, nanoseconds of the same clock; -1 where not known.
        duration: nanoseconds, -1 where not known.
        call: from 0, which rows are one call.
        whole: whether all ranks of the call are here.
        unfinished: whether the row is of a call that has not ended.
    """

    kind: Ints
    source: Ints
    sequence: Ints
    start: Ints
    end: Ints
    wait: Ints
    duration: Ints
    call: Ints
    whole: _Flags
    unfinished: bool = False


class Merge:
    """The calls of some sources.

    Attributes:
        sources: as given.
        signatures: what calls have in common, over all sources; the `id` means nothing.
        offsets: nanoseconds that a host's clock is ahead of the first one's, where there are several hosts.
        unmatched: rows whose other ranks were not found, though their files are there.
    """

    def __init__(self, sources: Sequence[CallSource]) -> None:
        self.sources = sources
        self.signatures: list[CallSignature] = []
        self.offsets: dict[str, float] = {}
        self.unmatched = 0
        self._ids: dict[tuple[Any, ...], int] = {}
        self._tables: list[Ints] = [np.empty(0, dtype=np.int64) for _ in sources]
        self._channels: dict[str, int] = {}
        self._channel_of = np.empty(0, dtype=np.int64)
        self._expected: list[int] = []
        self._waiting: CallRows = np.empty((0, 8), dtype=np.int64)
        self._match_at = BATCH
        self._open: dict[tuple[int, int, int], CallRows] = {}

    def batches(self) -> Iterator[Batch]:
        """All calls, some ten thousand at a time: first those whose ranks are all here, at last the others."""
        streams = {i: source.rows() for i, source in enumerate(self.sources)}
        reached = dict.fromkeys(streams, -1)
        while streams:
            behind = min(streams, key=lambda i: reached[i])
            rows = next(streams[behind], None)
            if rows is None:
                del streams[behind]
                continue
            if not len(rows):
                continue
            reached[behind] = max(reached[behind] + 1, int(rows[-1, 2]))
            yield from self._take(behind, rows)
        yield from self._match(last=True)
        if self._open:
            yield self._batch(np.concatenate(list(self._open.values())), whole=False, unfinished=True)

    def _take(self, source: int, rows: CallRows) -> Iterator[Batch]:
        kinds = self._kinds(source)[rows[:, 0]]
        added = np.column_stack(
            [self._channel_of[kinds], rows[:, 1], np.full(len(rows), source), kinds, rows[:, 2:]]
        )
        open_ended = added[:, 6] == UNKNOWN
        if self._open or open_ended.any():
            self._keep_open(source, added, open_ended)
            added = added[~open_ended]
        if self.sources[source].timed:
            self._waiting = np.concatenate([self._waiting, added])
            if len(self._waiting) > self._match_at:
                yield from self._match(last=False)
        elif len(added):
            yield self._batch(added, whole=False)

    def _keep_open(self, source: int, rows: CallRows, open_ended: _Flags) -> None:
        """Remembers the rows without an end, until the same call comes with one."""
        keys = (rows[:, 0] << 40) | rows[:, 1]
        known = [(channel << 40) | sequence for other, channel, sequence in self._open if other == source]
        for row in rows[np.isin(keys, np.r_[keys[open_ended], np.array(known, dtype=np.int64)])]:
            key = source, int(row[0]), int(row[1])
            if row[6] == UNKNOWN:
                self._open[key] = row[None]
            else:
                self._open.pop(key, None)

    def _match(self, *, last: bool) -> Iterator[Batch]:
        rows = self._waiting
        if not len(rows):
            return
        rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
        first = np.flatnonzero(np.r_[True, np.any(rows[1:, :2] != rows[:-1, :2], axis=1)])
        counts = np.diff(np.r_[first, len(rows)])
        whole = counts >= np.array(self._expected)[rows[first, 0]]
        ready = np.repeat(whole, counts)
        if ready.any():
            yield self._batch(rows[ready], whole=True)
        rest = rows[~ready]
        if last or len(rest) > MAX_WAITING:
            rest = rest[np.argsort(rest[:, 4], kind="stable")]
            given_up = len(rest) if last else len(rest) // 2
            self.unmatched += given_up
            if given_up:
                yield self._batch(rest[:given_up], whole=False)
            rest = rest[given_up:]
        self._waiting = rest
        self._match_at = BATCH + 2 * len(rest)

    def _batch(self, rows: CallRows, *, whole: bool, unfinished: bool = False) -> Batch:
        order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0])) if not whole else slice(None)
        rows = rows[order]
        call = np.cumsum(np.r_[False, np.any(rows[1:, :2] != rows[:-1, :2], axis=1)])
        source, kind, queued = rows[:, 2], rows[:, 3], rows[:, 4]
        ended = rows[:, 6] >= 0
        start = queued + np.maximum(rows[:, 5], 0)
        end = np.where(ended, queued + rows[:, 6], NO_TIME)
        wait = np.where(rows[:, 7] >= 0, queued + rows[:, 7], UNKNOWN)
        duration = np.where(ended, rows[:, 6] - np.maximum(rows[:, 5], 0), UNKNOWN)
        if whole:
            shift = self._shift(kind, source, call, end)
            start, end = start - shift, np.where(ended, end - shift, end)
            wait = np.where(wait >= 0, wait - shift, wait)
        complete = np.full(len(rows), whole) & ended
        if whole and not complete.all():
            all_ended = np.bincount(call, ~ended) == 0
            complete = all_ended[call]
        return Batch(
            kind=kind, source=source, sequence=rows[:, 1], start=start, end=end, wait=wait, duration=duration,
            call=call, whole=complete, unfinished=unfinished,
        )  # fmt: skip

    def _kinds(self, source: int) -> Ints:
        """A source's descriptions as indices into `signatures`."""
        table, signatures = self._tables[source], self.sources[source].signatures
        if len(table) < len(signatures) or (table < 0).any():
            found = [-1 if what is None else self._intern(what) for what in signatures]
            table = self._tables[source] = np.array(found, dtype=np.int64)
            self._channel_of = np.array([self._channel(what) for what in self.signatures], dtype=np.int64)
        return table

    def _intern(self, what: CallSignature) -> int:
        key = (
            what.op, what.group, what.channel, what.bytes, what.shapes, what.tensors, what.dtype,
            what.asynchronous, what.phase, what.module, what.site, what.api, what.device, what.stream,
            what.input_bytes, what.output_bytes,
        )  # fmt: skip
        index = self._ids.setdefault(key, len(self.signatures))
        if index == len(self.signatures):
            self.signatures.append(what)
        return index

    def _channel(self, what: CallSignature) -> int:
        index = self._channels.setdefault(what.channel, len(self._channels))
        if index == len(self._expected):
            self._expected.append(self._members(what))
        return index

    def _members(self, what: CallSignature) -> int:
        """How many files a call of this channel stands in."""
        here = {source.rank for source in self.sources if source.timed}
        if what.channel != what.group:
            ends = what.channel.rpartition(":")[2].partition("/")[0].partition(">")
            return max(1, sum(bool(_RANK.fullmatch(end)) and int(end) in here for end in (ends[0], ends[2])))
        ranks = next((s.groups[what.group] for s in self.sources if s.groups.get(what.group)), ())
        return max(1, len(here & set(ranks))) if ranks else len(here)

    def _shift(self, kind: Ints, source: Ints, call: Ints, end: Ints) -> Ints:
        """Nanoseconds to take from each row, so that hosts agree on when what ends together has ended."""
        hosts = [each.host for each in self.sources]
        if len(set(hosts)) < 2:
            return np.zeros(len(kind), dtype=np.int64)
        if not self.offsets:
            waits = np.array([base_operation(what.op) in _TOGETHER for what in self.signatures])
            together = waits[kind] & (end >= 0)
            reference = np.full(int(call.max()) + 1, np.nan)
            of_first = together & np.array([host == hosts[0] for host in hosts])[source]
            reference[call[of_first]] = end[of_first]
            for host in sorted(set(hosts)):
                mine = together & np.array([other == host for other in hosts])[source]
                ahead = end[mine] - reference[call[mine]]
                ahead = ahead[~np.isnan(ahead)]
                self.offsets[host] = float(np.median(ahead)) if len(ahead) else 0.0
            self.offsets[hosts[0]] = 0.0
        return np.array([round(self.offsets[host]) for host in hosts], dtype=np.int64)[source]


# Columns of a row of sums. Times are seconds.
SUMS = ("calls", "timed", "time", "merged", "wait", "transfer", "known", "exposed", "unfinished")
_CALLS, _TIMED, _TIME, _MERGED, _WAIT, _TRANSFER, _KNOWN, _EXPOSED, _UNFINISHED = range(len(SUMS))
MAX_LISTED = 100

Sink = Callable[[Batch, Merge], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a trace says, ready to be shown; times are seconds.

    Attributes:
        files: one record a file: path, format, rank, host, problems, whether its run ended in order.
        calls: calls on all ranks.
        operations: one record an operation, shape and dtype.
        groups: one record a group.
        phases: one record a phase.
        ranks: one record a rank.
        unfinished: calls that did not end, at most 100.
        stuck: what watchdogs reported.
        skipped: files that were passed over, and why.
        problems: what could not be read or matched, and how often.
        clock_offsets: seconds that each host's clock was found to be ahead of the first one's.
    """

    files: list[dict[str, Any]]
    calls: int
    operations: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    phases: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    unfinished: list[dict[str, Any]] = field(default_factory=list)
    stuck: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: dict[str, int] = field(default_factory=dict)
    clock_offsets: dict[str, float] = field(default_factory=dict)

    def operations_csv(self) -> str:
        """The table of operations as comma-separated values with a line of titles."""
        titles = list(self.operations[0]) if self.operations else ["operation"]
        return csv_text(titles, ([row[title] for title in titles] for row in self.operations))

    def troubles(self) -> list[str]:
        """What did not end and what could not be read, a line each; clocks that were put right."""
        lines = [
            f"stuck: rank {s['rank']}, {s['operation']} {s['sequence']} of {s['channel']}, {s['seconds']:g} s; "
            f"not arrived: {', '.join(map(str, s['missing'])) or 'nobody'}"
            for s in self.stuck
        ]
        for call in self.unfinished:
            site = f" ({call['site']})" if call["site"] else ""
            lines.append(
                f"no end: rank {call['rank']}, {call['operation']} {call['sequence']} of {call['channel']}{site}"
            )
        lines += [
            f"clock of {host}: {offset * 1e3:+.3f} ms, taken off" for host, offset in self.clock_offsets.items()
        ]
        lines += [f"note: {count} {problem}" for problem, count in self.problems.items()]
        return lines + [f"passed over: {line}" for line in self.skipped]


def report_on(path: Path, sinks: Iterable[Sink] = ()) -> Report:
    """Reads a file or a folder of traces once, and adds up.

    Memory does not grow with the number of calls.

    Args:
        path: file or folder.
        sinks: also given every batch of calls.

    Raises:
        InputError: there is no trace to read.
    """
    sources, skipped = find_sources(path)
    merge = Merge(sources)
    sums = _Sums(len(sources))
    for batch in merge.batches():
        sums.add(batch, merge)
        for sink in sinks:
            sink(batch, merge)
    problems: Counter[str] = Counter()
    for source in sources:
        problems.update(source.problems)
    if merge.unmatched:
        problems["calls of which not all ranks were found"] = merge.unmatched
    if dropped := sum(source.dropped for source in sources):
        problems["calls that the tracer could not write"] = dropped
    if unknown := _of_unknown_groups(sums, merge):
        problems["calls of groups whose ranks are not said: bus bandwidth as of all files"] = unknown
    if cut := sum(not source.complete for source in sources):
        problems["files without an end: the run was killed, or goes on"] = cut
    if skipped:
        problems["files passed over"] = len(skipped)
    return Report(
        files=[_file(source) for source in sources],
        calls=int(sums.by_kind[:, _CALLS].sum()),
        operations=list(_operations(sums, merge)),
        groups=list(_by(sums, merge, lambda what: what.group)),
        phases=list(_by(sums, merge, lambda what: what.phase or "not known")),
        ranks=list(_ranks(sums, merge)),
        unfinished=sums.unfinished,
        stuck=[_stuck(source.rank, line) for source in sources for line in source.stuck],
        skipped=skipped,
        problems=dict(problems),
        clock_offsets={host: offset * 1e-9 for host, offset in merge.offsets.items()},
    )


class _Sums:
    def __init__(self, sources: int) -> None:
        self.by_kind = np.zeros((0, len(SUMS)))
        self.extremes = np.zeros((0, 2))
        self.skew = np.zeros(0)
        self.by_source = np.zeros((sources, len(SUMS)))
        self.late = np.zeros((sources, 2))
        self.unfinished: list[dict[str, Any]] = []

    def add(self, batch: Batch, merge: Merge) -> None:
        self._grow(len(merge.signatures))
        values = _columns(batch)
        for column in range(len(SUMS)):
            self.by_kind[:, column] += np.bincount(batch.kind, values[column], len(self.by_kind))
            self.by_source[:, column] += np.bincount(batch.source, values[column], len(self.by_source))
        timed = batch.duration >= 0
        seconds = batch.duration[timed] * 1e-9
        np.minimum.at(self.extremes[:, 0], batch.kind[timed], seconds)
        np.maximum.at(self.extremes[:, 1], batch.kind[timed], seconds)
        self._lateness(batch)
        if batch.unfinished:
            rows = zip(batch.kind, batch.source, batch.sequence, strict=True)
            for kind, source, sequence in list(rows)[: MAX_LISTED - len(self.unfinished)]:
                what = merge.signatures[kind]
                self.unfinished.append(
                    {
                        "rank": merge.sources[source].rank,
                        "operation": what.op,
                        "channel": what.channel,
                        "sequence": int(sequence),
                        "bytes": what.bytes,
                        "site": what.site,
                    }
                )

    def _lateness(self, batch: Batch) -> None:
        """Who came last to each whole call of several ranks, and by how much after the first."""
        if not batch.whole.any():
            return
        rows = np.flatnonzero(batch.whole)
        start, call = batch.start[rows], batch.call[rows]
        first = np.flatnonzero(np.r_[True, call[1:] != call[:-1]])
        counts = np.diff(np.r_[first, len(call)])
        behind = start - np.repeat(np.minimum.reduceat(start, first), counts)
        last = np.repeat(np.maximum.reduceat(behind, first), counts)
        slowest = (behind == last) & np.repeat(counts > 1, counts)
        self.late[:, 0] += np.bincount(batch.source[rows][slowest], minlength=len(self.late))
        self.late[:, 1] += np.bincount(batch.source[rows][slowest], last[slowest] * 1e-9, len(self.late))
        self.skew += np.bincount(batch.kind[rows], last * 1e-9, len(self.skew))

    def _grow(self, kinds: int) -> None:
        more = kinds - len(self.by_kind)
        if more > 0:
            self.by_kind = np.vstack([self.by_kind, np.zeros((more, len(SUMS)))])
            self.extremes = np.vstack([self.extremes, np.tile([np.inf, 0.0], (more, 1))])
            self.skew = np.r_[self.skew, np.zeros(more)]


def wait_and_transfer(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Nanoseconds of each row before and after the last rank has come; zero where not all ranks are here."""
    wait, transfer = np.zeros(len(batch.kind)), np.zeros(len(batch.kind))
    rows = np.flatnonzero(batch.whole)
    if len(rows):
        call = batch.call[rows]
        first = np.flatnonzero(np.r_[True, call[1:] != call[:-1]])
        last = np.maximum.reduceat(batch.start[rows], first)
        last = np.repeat(last, np.diff(np.r_[first, len(call)]))
        last = np.clip(last, batch.start[rows], np.maximum(batch.start[rows], batch.end[rows]))
        wait[rows], transfer[rows] = last - batch.start[rows], batch.end[rows] - last
    return wait, np.maximum(transfer, 0)


def _columns(batch: Batch) -> list[np.ndarray]:
    wait, transfer = wait_and_transfer(batch)
    timed = batch.duration >= 0
    known = timed & (batch.wait >= 0)
    exposed = np.where(known, np.maximum(batch.end - np.maximum(batch.wait, batch.start), 0), 0)
    ones = np.ones(len(batch.kind))
    return [
        ones,
        timed * 1.0,
        np.where(timed, batch.duration, 0) * 1e-9,
        batch.whole * 1.0,
        wait * 1e-9,
        transfer * 1e-9,
        np.where(known, batch.duration, 0) * 1e-9,
        exposed * 1e-9,
        ones * batch.unfinished,
    ]


def _operations(sums: _Sums, merge: Merge) -> Iterator[dict[str, Any]]:
    def key(what: CallSignature) -> tuple[Any, ...]:
        return what.op, what.shapes, what.tensors, what.dtype, what.bytes

    ranks = _ranks_of_groups(merge)
    grouped: dict[tuple[Any, ...], list[int]] = {}
    for index, what in enumerate(merge.signatures[: len(sums.by_kind)]):
        grouped.setdefault(key(what), []).append(index)
    for indices in grouped.values():
        what = merge.signatures[indices[0]]
        total = sums.by_kind[indices].sum(axis=0)
        # Ranks of one group's size share a bandwidth; groups of several sizes are weighted by their calls.
        sizes = np.array([len(ranks.get(merge.signatures[i].group, ())) or len(merge.sources) for i in indices])
        factor = np.average(
            [bus_factor(what.op, int(size)) for size in sizes],
            weights=np.maximum(sums.by_kind[indices, _CALLS], 1e-9),
        )
        per_call = _per_call(total)
        rate = what.bytes / per_call if per_call else 0.0
        yield {
            "operation": what.op,
            "shape": _shape(what),
            "dtype": what.dtype,
            "bytes": what.bytes,
            **_record(total),
            "min_s": float(sums.extremes[indices, 0].min()) if total[_TIMED] else 0.0,
            "max_s": float(sums.extremes[indices, 1].max()),
            "mean_skew_s": float(sums.skew[indices].sum() / total[_MERGED]) if total[_MERGED] else 0.0,
            "algbw_GBps": rate * 1e-9,
            "busbw_GBps": rate * float(factor) * 1e-9,
        }


def _ranks_of_groups(merge: Merge) -> dict[str, tuple[int, ...]]:
    return {name: ranks for source in merge.sources for name, ranks in source.groups.items()}


def _of_unknown_groups(sums: _Sums, merge: Merge) -> int:
    """How many calls are of groups of which no source says the ranks, on which their bus bandwidth depends."""
    ranks = _ranks_of_groups(merge)
    rows = [
        index
        for index, what in enumerate(merge.signatures[: len(sums.by_kind)])
        if not ranks.get(what.group) and bus_factor(what.op, 2) != bus_factor(what.op, 3)
    ]
    return int(sums.by_kind[rows, _CALLS].sum())


def _per_call(total: np.ndarray) -> float:
    """Seconds that moving a message took: without the wait for other ranks, where that is known."""
    if total[_MERGED]:
        return float(total[_TRANSFER] / total[_MERGED])
    return float(total[_TIME] / total[_TIMED]) if total[_TIMED] else 0.0


def _by(sums: _Sums, merge: Merge, name: Callable[[CallSignature], str]) -> Iterator[dict[str, Any]]:
    grouped: dict[str, list[int]] = {}
    for index, what in enumerate(merge.signatures[: len(sums.by_kind)]):
        grouped.setdefault(name(what), []).append(index)
    for label, indices in sorted(grouped.items()):
        yield {"name": label, **_record(sums.by_kind[indices].sum(axis=0))}


def _ranks(sums: _Sums, merge: Merge) -> Iterator[dict[str, Any]]:
    for index, source in enumerate(merge.sources):
        late = {"times_last": int(sums.late[index, 0]), "lateness_s": float(sums.late[index, 1])}
        yield {"rank": source.rank, **_record(sums.by_source[index]), **late}


def _record(total: np.ndarray) -> dict[str, Any]:
    return {
        "calls": int(total[_CALLS]),
        "unfinished": int(total[_UNFINISHED]),
        "total_s": float(total[_TIME]),
        "mean_s": float(total[_TIME] / total[_TIMED]) if total[_TIMED] else 0.0,
        "merged": int(total[_MERGED]),
        "wait_s": float(total[_WAIT]),
        "transfer_s": float(total[_TRANSFER]),
        "exposed_s": float(total[_EXPOSED]),
        "hidden_s": float(total[_KNOWN] - total[_EXPOSED]),
        "exposure_unknown_s": float(total[_TIME] - total[_KNOWN]),
    }


def _shape(what: CallSignature) -> str:
    if not what.shapes:
        return ""
    first = "x".join(map(str, what.shapes[0])) or "scalar"
    if what.tensors == 1:
        return first
    same = len(set(what.shapes)) == 1 and what.tensors <= len(what.shapes)
    return f"{what.tensors} of {first}" if same else f"{first} and {what.tensors - 1} more"


def _file(source: Any) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "format": source.kind,
        "rank": source.rank,
        "host": source.host,
        "complete": source.complete,
        "problems": dict(source.problems),
    }


def _stuck(rank: int, line: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "operation": line.op,
        "channel": line.channel,
        "sequence": line.sequence,
        "seconds": line.seconds,
        "arrived": list(line.arrived),
        "missing": list(line.missing),
        "unheard": list(line.unheard),
        "site": line.site,
    }
