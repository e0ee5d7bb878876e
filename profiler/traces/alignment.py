"""One clock for all ranks of a job, found from the collectives that they ran together.

As dPRO does, the clock of each rank is moved so that what must be simultaneous is: a collective cannot end on any
rank before the last one has begun it, and its ranks end it at nearly the same moment. Each rank but the first gets
an offset and a drift; the squares of what the ends of collectives then differ by are least, on that condition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from echograph.ir.columns import Float64, Int64
from echograph.profiler.traces.collectives import MatchedCollective, collectives_of_job
from echograph.profiler.traces.trace import Trace, TraceSet

# Crystals of computers are within this of each other (relative, one sigma); a drift is not fitted beyond what the
# collectives say against it, or the noise of a trace of milliseconds would be taken for one.
_DRIFT = 1e-4
# Picoseconds by which profilers' stamps of one moment differ at least.
_NOISE_PS = 1e6
_ROUNDS = 50
_HEAVY = 1e3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankClock:
    """What a rank's times are corrected by: `time + offset_ps + drift * time`.

    Attributes:
        offset_ps: picoseconds, at the origin of the traces.
        drift: seconds to add a second.
    """

    offset_ps: float = 0.0
    drift: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobClocks:
    """The clocks of a job.

    Attributes:
        clocks: by rank; the first rank's is the reference. Ranks that share no collective with it have none.
        collectives: how many collectives of several ranks they come from.
        residual_ps: root mean square, in picoseconds, of how far the ends of one collective differ between ranks
            once the clocks are aligned.
        before_ps: the same figure before they are aligned.
        apart: collectives that one rank would have ended before another began them, with aligned clocks.
        apart_before: as many with the clocks as they were; 0: the clocks do not contradict one another.
        notes: what could not be told, one line each.
    """

    clocks: Mapping[int, RankClock]
    collectives: int
    residual_ps: float
    before_ps: float
    apart: int
    apart_before: int = 0
    notes: tuple[str, ...] = ()


def align(
    traces: TraceSet, known: tuple[Sequence[MatchedCollective], Sequence[str]] | None = None
) -> tuple[TraceSet, JobClocks]:
    """The traces on the clock of their first rank, and how well that is known.

    Args:
        traces: the job's.
        known: their collectives and what was not matched; None: their files are read again for it.
    """
    matched, notes = collectives_of_job(traces) if known is None else known
    found = clocks(traces, matched, notes)
    moved = {rank: on_clock(trace, found.clocks.get(rank, RankClock())) for rank, trace in traces.items()}
    first = min(moved)
    said = (*moved[first].notes, *_said(found))
    moved[first] = dataclasses.replace(moved[first], notes=said)
    return traces.replaced(moved), found


def on_clock(trace: Trace, clock: RankClock) -> Trace:
    """A trace with its times as another clock has them."""
    start, end = (_moved(times, clock) for times in (trace.start, trace.end))
    return dataclasses.replace(trace, start=start, duration=np.maximum(end - start, 0))


def clocks(traces: TraceSet, matched: Sequence[MatchedCollective], notes: Sequence[str] = ()) -> JobClocks:
    """Offsets and drifts from collectives that are known to be the same.

    Args:
        traces: the job's.
        matched: its collectives.
        notes: what was not matched.
    """
    ranks = list(traces)
    reached = _reached(ranks, matched)
    used = [one for one in matched if set(one.calls) <= reached]
    alone = [rank for rank in ranks if rank not in reached]
    said = list(notes)
    if len(ranks) > 1 and alone:
        names = ", ".join(map(str, alone[:8]))
        said.append(
            f"clocks of ranks {names} are as they were: no matched collective joins them to rank {ranks[0]}"
        )
    fit = _Fit(traces, sorted(reached), used)
    before = fit.residual(fit.nothing)
    if not used:
        own = {rank: RankClock() for rank in reached}
        return JobClocks(clocks=own, collectives=0, residual_ps=0.0, before_ps=0.0, apart=0, notes=tuple(said))
    values = fit.solve()
    return JobClocks(
        clocks=fit.clocks(values),
        collectives=len(used),
        residual_ps=fit.residual(values),
        before_ps=before,
        apart=fit.apart(values),
        apart_before=fit.apart(fit.nothing),
        notes=tuple(said),
    )


def _moved(times: Int64, clock: RankClock) -> Int64:
    moved: Int64 = times + np.rint(clock.offset_ps + clock.drift * times).astype(np.int64)
    return moved


def _reached(ranks: Sequence[int], matched: Sequence[MatchedCollective]) -> set[int]:
    """Ranks that collectives join to the first one, if through others."""
    reached, before = {ranks[0]}, 0
    while len(reached) > before:
        before = len(reached)
        for one in matched:
            if reached & set(one.calls):
                reached |= set(one.calls)
    return reached


def _said(found: JobClocks) -> tuple[str, ...]:
    if not found.collectives:
        return found.notes
    line = (
        f"clocks aligned by {found.collectives} collectives: "
        f"their ends differ by {found.residual_ps / 1e6:.1f} us "
        f"(root mean square; {found.before_ps / 1e6:.1f} us before)"
    )
    apart = f"{found.apart} collectives end on a rank before another has begun them" if found.apart else ""
    return (line, *filter(None, (apart,)), *found.notes)


class _Fit:
    """Least squares over offsets and drifts of all ranks but the first, and the mean end of each collective.

    Unknown are, for each rank but the first, an offset and a drift (over the span, so that both are picoseconds).
    A row of `one` and `other` is a call and another of its collective.
    """

    def __init__(self, traces: TraceSet, ranks: Sequence[int], matched: Sequence[MatchedCollective]) -> None:
        self.ranks = ranks
        place = {rank: at for at, rank in enumerate(ranks)}
        calls = [
            (number, rank, call.row) for number, one in enumerate(matched) for rank, call in one.calls.items()
        ]
        self.collective = np.array([number for number, _, _ in calls], np.int64)
        self.rank = np.array([place[rank] for _, rank, _ in calls], np.int64)
        self.start = np.array([traces[rank].start[row] for _, rank, row in calls], np.float64)
        took = np.array([traces[rank].duration[row] for _, rank, row in calls], np.float64)
        self.end = self.start + took
        self.middle = float(self.end.mean()) if calls else 0.0
        self.span = max(float(np.ptp(self.end)), 1.0) if calls else 1.0
        self.nothing = np.zeros(2 * len(ranks))

    def solve(self) -> Float64:
        """Offset at the middle and drift over half the span, of each rank, in picoseconds."""
        design = self._moves(self.end)
        count = np.bincount(self.collective)
        means = np.zeros((len(count), design.shape[1]))
        np.add.at(means, self.collective, design)
        mean_end = np.bincount(self.collective, self.end) / count
        rows = design - (means / count[:, None])[self.collective]
        wanted = mean_end[self.collective] - self.end
        values = self._least(rows, wanted, self._noise(rows, wanted))
        return self._within(rows, wanted, values)

    def _noise(self, rows: Float64, wanted: Float64) -> float:
        """How exact the ends are, from what offsets alone leave of them."""
        offsets = rows.copy()
        offsets[:, 1::2] = 0.0
        left = wanted - offsets @ self._least(offsets, wanted, _NOISE_PS)
        return max(_NOISE_PS, 1.4826 * float(np.median(np.abs(left))))

    def _least(
        self, rows: Float64, wanted: Float64, noise: float, heavy: tuple[Float64, Float64] | None = None
    ) -> Float64:
        """Iterated least squares, in which what is far off weighs by its root (a rank held up while it ended)."""
        drifts = np.arange(1, len(self.nothing), 2)
        prior = np.zeros((len(drifts), len(self.nothing)))
        prior[np.arange(len(drifts)), drifts] = noise / (_DRIFT * self.span / 2)
        weight = np.ones(len(wanted))
        values = self.nothing
        for _ in range(_ROUNDS):
            parts = [rows * weight[:, None], prior, *([heavy[0]] if heavy else [])]
            aims = [wanted * weight, np.zeros(len(drifts)), *([heavy[1]] if heavy else [])]
            found = np.zeros_like(self.nothing)
            found[2:] = np.linalg.lstsq(np.concatenate(parts)[:, 2:], np.concatenate(aims), rcond=None)[0]
            weight = 1 / np.sqrt(np.maximum(1.0, np.abs(wanted - rows @ found) / (2 * noise)))
            if np.abs(found - values).max() < 1.0:
                return found
            values = found
        return values

    def _within(self, rows: Float64, wanted: Float64, values: Float64) -> Float64:
        """The values moved until no collective ends before its last rank has begun it, as far as that goes."""
        noise, held = self._noise(rows, wanted), np.zeros((0, 2), np.int64)
        for _ in range(_ROUNDS):
            late = self._violations(values)
            known = set(map(tuple, held.tolist()))
            fresh = [pair for pair in map(tuple, late.tolist()) if pair not in known]
            if not fresh:
                return values
            held = np.concatenate([held, np.array(fresh, np.int64)])
            ends, starts = self._moves(self.end)[held[:, 0]], self._moves(self.start)[held[:, 1]]
            aim = self.start[held[:, 1]] - self.end[held[:, 0]]
            values = self._least(rows, wanted, noise, (_HEAVY * (ends - starts), _HEAVY * aim))
        return values

    def _violations(self, values: Float64) -> Int64:
        """Pairs of calls of one collective of which the first ends before the second begins."""
        start, end = (times + self._moves(times) @ values for times in (self.start, self.end))
        order = np.lexsort((start, self.collective))
        last = order[np.concatenate([self.collective[order][1:] != self.collective[order][:-1], [True]])]
        latest = last[self.collective]
        # A collective has no duration to speak of beyond the noise of what stamps it.
        late = np.flatnonzero(end < start[latest] - 1.0)
        return np.stack([late, latest[late]], axis=1)

    def _moves(self, times: Float64) -> Float64:
        """How each unknown moves each call's time."""
        moves = np.zeros((len(times), 2 * len(self.ranks)))
        at = np.arange(len(times))
        moves[at, 2 * self.rank] = 1.0
        moves[at, 2 * self.rank + 1] = (times - self.middle) / (self.span / 2)
        moves[:, :2] = 0.0
        return moves

    def residual(self, values: Float64) -> float:
        """Root mean square of the distances of ends from their collective's mean end."""
        if not len(self.end):
            return 0.0
        end = self.end - self.middle + self._moves(self.end) @ values
        mean = np.bincount(self.collective, end) / np.bincount(self.collective)
        return float(np.sqrt(np.mean((end - mean[self.collective]) ** 2)))

    def apart(self, values: Float64) -> int:
        """Meetings that do not overlap."""
        return len(set(self.collective[self._violations(values)[:, 0]].tolist()))

    def clocks(self, values: Float64) -> dict[int, RankClock]:
        """The values as clocks."""
        drift = values[1::2] / (self.span / 2)
        offset = values[::2] - drift * self.middle
        return {
            rank: RankClock(offset_ps=float(offset[at]), drift=float(drift[at]))
            for at, rank in enumerate(self.ranks)
        }
