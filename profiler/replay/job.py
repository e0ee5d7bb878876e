"""The pieces of all ranks of a job, on one clock, and which of them are one collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from echograph.errors import InputError
from echograph.profiler.replay.observing import Observed
from echograph.profiler.replay.pieces import Piece, Work
from echograph.profiler.replay.rank import rank_pieces
from echograph.profiler.traces.alignment import align, clocks
from echograph.profiler.traces.collectives import MESSAGES, Call, Meeting, meetings
from echograph.profiler.traces.trace import TraceSet
from echograph.progress import Progress, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """A collective of several ranks, or a message.

    Attributes:
        meeting: what it is.
        pieces: by rank.
    """

    meeting: Meeting
    pieces: Mapping[int, Piece]

    @property
    def begun(self) -> int:
        """When the last of its ranks had begun: from then on it takes what it takes, before that it waits."""
        return max(piece.start for piece in self.pieces.values())

    @property
    def last(self) -> int:
        """The rank that began last."""
        return max(self.pieces, key=lambda rank: (self.pieces[rank].start, -rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPieces:
    """A traced job in pieces.

    Attributes:
        traces: the traces, on one clock.
        of_rank: the pieces of each rank, each after all that it waits for.
        together: the collectives that several of the traced ranks ran.
        messages: the messages of which the sender and the receiver were traced.
        notes: what was taken for something, or could not be matched, a line each.
    """

    traces: TraceSet
    of_rank: Mapping[int, Sequence[Piece]]
    together: Sequence[Together]
    messages: Sequence[Together]
    notes: tuple[str, ...]


def job_pieces(
    traces: TraceSet, say: Progress = silent, seen: Mapping[int, Observed] = MappingProxyType({})
) -> JobPieces:
    """The pieces of a job.

    Clocks are aligned where they contradict one another: where a collective would have ended on one rank before
    another one had begun it.

    Args:
        traces: one a rank.
        say: told how far it is.
        seen: how ranks were observed, where what that cost is to be known.

    Raises:
        InputError: a trace's file is gone, or no trace has anything in it.
    """
    if not any(len(trace) for trace in traces.values()):
        raise InputError(f"{next(iter(traces.values())).path}: no complete event in it: nothing to replay")
    found = _on_their_clocks(traces, say, seen)
    if clocks(traces, [one.meeting for one in found.together]).apart_before:
        traces, fit = align(traces)
        say(f"clocks aligned to {fit.residual_ps / 1e6:.1f} us")
        found = _on_their_clocks(traces, say, seen)
    return found


def _on_their_clocks(traces: TraceSet, say: Progress, seen: Mapping[int, Observed]) -> JobPieces:
    of_rank, dropped = {}, 0
    for done, (rank, trace) in enumerate(traces.items()):
        say("going through the events of ranks", done, len(traces))
        of_rank[rank], against = rank_pieces(trace, seen.get(rank)).in_order()
        dropped += against
    of_call = {id(piece.call): piece for order in of_rank.values() for piece in order if piece.call is not None}
    met, notes = meetings({rank: [p.call for p in order if p.call is not None] for rank, order in of_rank.items()})
    together = [
        Together(meeting=one, pieces={rank: of_call[id(call)] for rank, call in one.calls.items()}) for one in met
    ]
    matched = {id(piece) for one in together for piece in one.pieces.values()}
    every = [piece for order in of_rank.values() for piece in order if piece.call is not None]
    unmatched = [piece for piece in every if piece.work is Work.COLLECTIVE and id(piece) not in matched]
    messages = _messages(of_rank)
    sent = [piece for piece in every if piece.call is not None and piece.call.kind in MESSAGES]
    if lone := sum(piece.work is not Work.MESSAGE for piece in sent):
        notes.append(f"{lone:,} sends and receives take what they took: ranks do not wait for each other there")
    if alone := sum(piece.call is not None and len(piece.call.ranks) != 1 for piece in unmatched):
        notes.append(
            f"{alone:,} collectives whose other ranks are not in the traces, or not known: as long as they took, "
            "with what they waited"
        )
    if dropped:
        notes.append(f"{dropped:,} waits left out: by the trace's clocks, what was waited for came later")
    return JobPieces(
        traces=traces,
        of_rank=of_rank,
        together=together,
        messages=messages,
        notes=tuple(dict.fromkeys((*traces.notes, *notes))),
    )


def _messages(of_rank: Mapping[int, Sequence[Piece]]) -> list[Together]:
    """The n-th send of a channel and its n-th receive, where there are as many of both."""
    ends: dict[str, dict[str, list[tuple[int, Piece, Call]]]] = defaultdict(lambda: {"send": [], "recv": []})
    for rank, order in of_rank.items():
        for piece in order:
            if piece.call is not None and piece.call.channel:
                ends[piece.call.channel][piece.call.kind].append((rank, piece, piece.call))
    found = []
    for of in ends.values():
        sends, receives = of["send"], of["recv"]
        if len(sends) != len(receives) or {rank for rank, *_ in sends} & {rank for rank, *_ in receives}:
            continue
        for number, pair in enumerate(zip(sends, receives, strict=True)):
            for _, piece, _ in pair:
                piece.work = Work.MESSAGE
            calls = {rank: call for rank, _, call in pair}
            met = Meeting(kind="send", group=pair[0][2].group, number=number, calls=calls)
            found.append(Together(meeting=met, pieces={rank: piece for rank, piece, _ in pair}))
    return found
