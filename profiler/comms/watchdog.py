"""Reports collectives that do not end: which, for how long, and who has come. It never stops anything.

Who has come stands in the files of the other ranks: each writes beside its calls, once a second, how many it has
issued in each channel. So the watchdog sees the ranks whose files are in its folder: all of them on one machine or
on a shared file system, and else says whose it does not see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from echograph.ir.comms.record import DECODER, UNREADABLE, Beat, Stuck
from echograph.profiler.comms.call import Call

TAIL_BYTES = 1 << 20


class Watchdog:
    """Looks at the calls of one rank that have not ended.

    Args:
        path: where all ranks write, as it was asked for.
        rank: this rank.
        restart: which start of the job this is.
        timeout_s: seconds after which a call is reported, once.
    """

    def __init__(self, path: Path, rank: int, restart: int, timeout_s: float) -> None:
        self._path = path
        self._rank = rank
        self._restart = restart
        self._timeout_ns = int(timeout_s * 1e9)
        self._reported: set[tuple[str, int]] = set()

    def look(self, pending: Iterable[Call], now: int, read_events: Callable[[], None]) -> Iterator[Stuck]:
        """Reports on stderr, and as lines for the trace, the calls that are late and were not reported yet.

        Args:
            pending: calls that have not ended.
            now: nanoseconds of `perf_counter`.
            read_events: looks whether calls on devices have ended unseen.
        """
        late = [call for call in pending if now - call.queued > self._timeout_ns]
        late = [call for call in late if (call.kind.channel, call.sequence) not in self._reported]
        if late:
            read_events()
        for call in late:
            if call.end < 0:
                self._reported.add((call.kind.channel, call.sequence))
                stuck = self._describe(call, now)
                sys.stderr.write(_spell(self._rank, call, stuck))
                yield stuck

    def _describe(self, call: Call, now: int) -> Stuck:
        from echograph.profiler.comms.tracer import file_of

        arrived, missing, unheard = [], [], []
        for rank in call.group.ranks:
            if rank == self._rank:
                arrived.append(rank)
                continue
            if call.kind.peer >= 0 and rank != call.kind.peer:
                continue
            issued = last_beat(file_of(self._path, rank, self._restart))
            if issued is None:
                unheard.append(rank)
            elif issued.get(call.kind.channel, 0) > call.sequence:
                arrived.append(rank)
            else:
                missing.append(rank)
        return Stuck(
            op=call.kind.op,
            channel=call.kind.channel,
            sequence=call.sequence,
            seconds=round((now - call.queued) / 1e9, 1),
            arrived=tuple(arrived),
            missing=tuple(missing),
            unheard=tuple(unheard),
            site=call.kind.site,
        )


def last_beat(path: Path) -> dict[str, int] | None:
    """Calls that a rank has issued, by channel, as its file last says; None where it does not."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            lines = stream.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):
        if line.startswith(b"{"):
            try:
                found = DECODER.decode(line)
            except UNREADABLE:
                continue
            if isinstance(found, Beat):
                return found.issued
    return None


def _spell(rank: int, call: Call, stuck: Stuck) -> str:
    where = f", {stuck.site}" if stuck.site else ""
    who = [f"arrived: {_ranks(stuck.arrived)}"]
    who += [f"not arrived: {_ranks(stuck.missing)}"] if stuck.missing else []
    who += [f"their files are not here: {_ranks(stuck.unheard)}"] if stuck.unheard else []
    return (
        f"echograph: rank {rank}: {stuck.op} {stuck.sequence} of {stuck.channel} ({call.kind.bytes} bytes{where}) "
        f"has not ended after {stuck.seconds:g} s; {'; '.join(who)}\n"
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
