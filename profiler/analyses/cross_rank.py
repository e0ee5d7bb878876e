"""The critical path of a job: through the threads, streams and collectives of all its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from echograph.errors import UsageError
from echograph.profiler.analyses.table import Table, from_rows
from echograph.profiler.analyses.work import US, Kind, kind_of_name
from echograph.profiler.replay.job import JobPieces, Together, job_pieces
from echograph.profiler.replay.pieces import Piece, Work
from echograph.profiler.replay.rank import LAUNCH
from echograph.profiler.replay.walk import GAP, START
from echograph.profiler.traces.trace import NONE, TraceSet

_TITLES = ("rank", "line", "name", "bound_by", "start(us)", "duration(us)", "waited_for")
_BOUND = {GAP: "host_gap", LAUNCH: "launch", START: "not_traced"}


class _Part(NamedTuple):
    """A piece on the path, and the time of it that is on the path."""

    rank: int
    piece: Piece
    begin: int
    end: int
    waited: int


def cross_rank_critical_path(traces: TraceSet, *, step: int = NONE) -> Table:
    """The chain of work, over all ranks, that ended last: had any of it been shorter, the job had been.

    It is followed back from the end: from each piece of work to the one that ended last of those that it had to
    wait for, and from a collective to the rank that began it last. The ranks' clocks are aligned first where
    they contradict one another.

    Columns, in order of time: `rank`; `line`, a thread or a stream; `name` of the operator; `bound_by`: `compute`,
    `communication`, `memory`, `host`, `host_gap` between operators, `launch` from when work could have begun to
    when it did, `not_traced` before a rank's first event; `start(us)` since the first event of the job;
    `duration(us)` on the path; `waited_for`: of a collective that another rank began last, that rank, where the
    path goes on; or empty.

    Args:
        traces: the job's.
        step: the number of a profiler step; -1 for all that was traced.

    Raises:
        UsageError: no rank has that step.
        InputError: a trace's file is gone.
    """
    job = job_pieces(traces)
    rows = []
    for part in _path(job, step):
        bound = _bound_by(part.piece)
        spent = (part.begin / US, (part.end - part.begin) / US)
        waited = f"rank {part.waited}" if part.waited != NONE else ""
        rows.append((part.rank, part.piece.line, part.piece.name, bound, *spent, waited))
    return from_rows(_TITLES, rows, job.notes)


def cross_rank_critical_path_summary(traces: TraceSet, *, step: int = NONE) -> Table:
    """What the critical path of the job is spent on, rank by rank.

    Columns: `rank`; `bound_by`, as for the path; `duration(us)` on it; `percentage` of its length.

    Args:
        traces: the job's.
        step: the number of a profiler step; -1 for all that was traced.

    Raises:
        UsageError: no rank has that step.
        InputError: a trace's file is gone.
    """
    job = job_pieces(traces)
    spent: dict[tuple[int, str], int] = defaultdict(int)
    for part in _path(job, step):
        spent[part.rank, _bound_by(part.piece)] += part.end - part.begin
    whole = max(1, sum(spent.values()))
    order = sorted(spent.items(), key=lambda item: -item[1])
    rows = [(rank, bound, time / US, 100 * time / whole) for (rank, bound), time in order if time]
    return from_rows(("rank", "bound_by", "duration(us)", "percentage"), rows, job.notes)


def _path(job: JobPieces, step: int) -> list[_Part]:
    """The path, first part first; each begins when the one before it ends."""
    rank_of = {id(piece): rank for rank, order in job.of_rank.items() for piece in order}
    together = {id(piece): one for one in job.together for piece in one.pieces.values()}
    before = _before(job)
    begin, piece = _window(job, step)
    found: list[_Part] = []
    now = piece.end
    while piece is not None and now > begin:
        rank, waited = rank_of[id(piece)], NONE
        start, one = piece.start, together.get(id(piece))
        if one is not None and one.begun < piece.end:
            start = max(start, one.begun)
            waited = one.last if one.last != rank else NONE
        # Where pieces overlap by what clocks differ, time is counted once.
        start = max(begin, min(start, now))
        if now > start:
            found.append(_Part(rank, piece, start, now, waited))
        now = start
        piece = _cause(piece, one, before)  # type: ignore[assignment]
    return found[::-1]


def _before(job: JobPieces) -> dict[int, Piece]:
    """For each piece the one before it on its line."""
    found: dict[int, Piece] = {}
    for order in job.of_rank.values():
        last: dict[str, Piece] = {}
        for piece in order:
            if piece.line in last:
                found[id(piece)] = last[piece.line]
            last[piece.line] = piece
    return found


def _cause(piece: Piece, one: Together | None, before: Mapping[int, Piece]) -> Piece | None:
    """What ended last of that which a piece, or its collective's last rank, waited for."""
    if one is not None:
        piece = one.pieces[one.last]
    previous = before.get(id(piece))
    causes = [*piece.after, *([previous] if previous is not None else [])]
    return max(causes, key=lambda other: other.end, default=None)


def _window(job: JobPieces, step: int) -> tuple[int, Piece]:
    """When the path begins, and the piece that it ends with."""
    pieces = [piece for order in job.of_rank.values() for piece in order]
    if step == NONE:
        first = min(piece.end for piece in pieces if piece.name == START)
        return first, max(pieces, key=lambda piece: piece.end)
    marks = [piece for piece in pieces if piece.name == f"ProfilerStep#{step}"]
    ends = [piece for piece in marks if piece.step != NONE]
    if not ends:
        numbers = {piece.name.partition("#")[2] for piece in pieces if piece.name.startswith("ProfilerStep#")}
        known = ", ".join(sorted(numbers, key=int)) or "none"
        raise UsageError(f"step {step}: no rank has it; the traces have {known}")
    return min(piece.start for piece in marks), max(ends, key=lambda piece: piece.end)


def _bound_by(piece: Piece) -> str:
    match piece.work:
        case Work.HOST:
            return _BOUND.get(piece.name, "host")
        case Work.COLLECTIVE | Work.MESSAGE:
            return "communication"
        case Work.COPY:
            return "memory"
        case Work.COMPUTE:
            memory = kind_of_name(piece.name) == Kind.MEMORY
            return "memory" if memory else "communication" if piece.call is not None else "compute"
