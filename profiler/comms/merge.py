"""Joins the ranks: the rows of one (channel, sequence) are one collective.

Files are read side by side, the one that is furthest behind first, so that what waits for its other ranks stays
small, however long the job ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echograph.ir.comms.reader import NO_TIME, CallRows, CallSource
from echograph.ir.comms.record import UNKNOWN, What
from echograph.profiler.comms.bandwidth import family

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MAX_WAITING = 1 << 19
_RANK = re.compile("[0-9]{1,9}")
BATCH = 1 << 17
_TOGETHER = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "monitored_barrier"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of some calls, one array a column; the rows of one call stand together.

    Attributes:
        kind: index into `Merge.whats`.
        source: index into the sources.
        sequence: number in the channel.
        start: nanoseconds of the wall clock; of the first source's host, where clocks could be compared.
        end: likewise, `NO_TIME` where not known.
        wait: when the caller first waited, likewise; -1 where not known.
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
    whole: Flags
    unfinished: bool = False


class Merge:
    """The calls of some sources.

    Attributes:
        sources: as given.
        whats: what calls have in common, over all sources; the `id` means nothing.
        offsets: nanoseconds that a host's clock is ahead of the first one's, where there are several hosts.
        unmatched: rows whose other ranks were not found, though their files are there.
    """

    def __init__(self, sources: Sequence[CallSource]) -> None:
        self.sources = sources
        self.whats: list[What] = []
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

    def _keep_open(self, source: int, rows: CallRows, open_ended: Flags) -> None:
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
        """A source's descriptions as indices into `whats`."""
        table, whats = self._tables[source], self.sources[source].whats
        if len(table) < len(whats) or (table < 0).any():
            found = [-1 if what is None else self._intern(what) for what in whats]
            table = self._tables[source] = np.array(found, dtype=np.int64)
            self._channel_of = np.array([self._channel(what) for what in self.whats], dtype=np.int64)
        return table

    def _intern(self, what: What) -> int:
        key = (
            what.op, what.group, what.channel, what.bytes, what.shapes, what.tensors, what.dtype,
            what.asynchronous, what.phase, what.module, what.site, what.api, what.device, what.stream,
            what.input_bytes, what.output_bytes,
        )  # fmt: skip
        index = self._ids.setdefault(key, len(self.whats))
        if index == len(self.whats):
            self.whats.append(what)
        return index

    def _channel(self, what: What) -> int:
        index = self._channels.setdefault(what.channel, len(self._channels))
        if index == len(self._expected):
            self._expected.append(self._members(what))
        return index

    def _members(self, what: What) -> int:
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
            together = np.array([family(what.op) in _TOGETHER for what in self.whats])[kind] & (end >= 0)
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
