"""One rank's profile as columns, and the profiles of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.errors import UsageError
from echograph.ir.columns import Bools, Int32, Int64
from echograph.units import PS_PER_US

NONE = -1

# What Kineto calls the categories of work on a device, of calls to its runtime, and of operators; older versions
# had other names, which the reader translates (`categories`).
KERNELS = frozenset({"kernel"})
COPIES = frozenset({"gpu_memcpy"})
SETS = frozenset({"gpu_memset"})
DEVICE = KERNELS | COPIES | SETS | {"mtia_ccp_events"}
CALLS = frozenset(
    {
        "cuda_runtime",
        "cuda_driver",
        "hip_runtime",
        "mtia_runtime",
        "xpu_runtime",
        "xpu_driver",
        "privateuse1_runtime",
        "privateuse1_driver",
    }
)
OPERATORS = frozenset({"cpu_op"})
# What profilers show on a device's tracks though it only waits there; some carry no stream. The last is MTIA's.
WAITS = frozenset({"Event Sync", "Context Sync", "Stream Sync", "Stream Wait Event", "event_wait"})
# Times lie at most this far apart, and nothing takes longer: 50 days. Picoseconds are 64 bits.
LONGEST_US = 2**42
# Numbers of processes and threads are above this, be they negative, as some profilers write them.
TEXT = -(2**62)


COLUMNS = ("start", "duration", "name", "category", "pid", "tid", "stream", "correlation", "external_id", "index")
"""Fields of a trace that have a value for each row."""


class Values(NamedTuple):
    """An argument that some events have.

    Attributes:
        rows: the rows that have it, ascending.
        values: its value on each of them: numbers, or codes into the trace's strings for text.
    """

    rows: Int64
    values: npt.NDArray[Any]


class DeviceStream(NamedTuple):
    """A stream of a device; numbers of streams are those of their device.

    Attributes:
        device: `Trace.pid` of what runs on it.
        number: `Trace.stream`.
    """

    device: int
    number: int


def place_of_stream(streams: Sequence[DeviceStream], number: int, device: int) -> int:
    """The place of the stream with a number: on this device, or else on the first that has one; or -1."""
    named = [at for at, stream in enumerate(streams) if stream.number == number]
    return next(iter([at for at in named if streams[at].device == device] or named), NONE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The complete events of one rank, one row each, in the order of the file; columns have the same length.

    Attributes:
        rank: number of the rank.
        world_size: ranks of the job, or 0 when the file does not say.
        path: the file that it came from.
        origin: picoseconds of the file's clock at which `start` is 0.
        start: picoseconds since `origin`. Files carry whole microseconds or nanosecond decimals; both are exact.
        duration: picoseconds, >= 0.
        name: code into `strings`.
        category: code into `strings`.
        pid: process; for device work the device. A pid that is text is `TEXT` less the code of that text.
        tid: thread; for device work the stream. Texts are coded as in `pid`.
        stream: stream of work on a device and of calls that name one, or -1; see `streams`.
        correlation: what a call to the runtime shares with the work that it launched, or -1.
        external_id: the operator under which a call was made, or -1.
        index: position of the event among the file's; -1 where there is no file (a simulated step).
        strings: texts that codes stand for.
        arguments: further arguments by their name in the file (see `events.ARGUMENTS`).
        header: what the file says beside the events (`deviceProperties`, `distributedInfo`, ...); `format` is what
            a file is called that is not the profiler's JSON.
        notes: what is missing from the answer, one line each.
    """

    rank: int
    world_size: int
    path: str
    origin: int
    start: Int64
    duration: Int64
    name: Int32
    category: Int32
    pid: Int64
    tid: Int64
    stream: Int64
    correlation: Int64
    external_id: Int64
    index: Int64
    strings: tuple[str, ...]
    arguments: Mapping[str, Values] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Int64:
        """Picoseconds since `origin` at which each event ends."""
        return self.start + self.duration

    @property
    def has_file(self) -> bool:
        """Whether a file says more of the events than the columns do, and `index` where."""
        return "format" not in self.header and (not len(self) or int(self.index[0]) != NONE)

    def without(self, what: str, hint: str = "") -> str:
        """A note that the trace lacks something, and what to do, where the profiler has it."""
        of = self.header.get("format", "a simulated step")
        where = (f": {hint}" if hint else "") if self.has_file else f" in {of}"
        return f"rank {self.rank}: no {what}{where}"

    @property
    def on_device(self) -> Bools:
        """Which rows are work on a device stream: kernels, copies, sets; not waits."""
        return self.of_category(DEVICE) & (self.stream >= 0) & ~self.named(WAITS)

    @property
    def tick(self) -> int:
        """Picoseconds of the clock's step: a microsecond or a nanosecond, whichever all times are multiples of."""
        for tick in (1_000_000, 1_000):
            if not (self.start % tick).any() and not (self.duration % tick).any():
                return tick
        return 1

    def text(self, row: int) -> str:
        """Name of the event in one row."""
        return self.strings[int(self.name[row])]

    def streams(self) -> tuple[Int64, list[DeviceStream]]:
        """The streams of the trace, ascending; and for each row the place of its stream among them, or -1."""
        place = np.full(len(self), NONE, np.int64)
        rows = np.flatnonzero(self.stream != NONE)
        both = np.stack((self.pid[rows], self.stream[rows]))
        known, at = np.unique(both, axis=1, return_inverse=True)
        place[rows] = at.ravel()
        return place, [DeviceStream(device, number) for device, number in known.T.tolist()]

    def process(self, pid: int) -> int | str:
        """A process or thread as the file names it: by a number, or by a text."""
        return pid if pid > TEXT else self.strings[TEXT - pid]

    def of_category(self, categories: frozenset[str] | set[str]) -> Bools:
        """Which rows are of one of the categories."""
        return self._codes_where([text in categories for text in self.strings])[self.category]

    def named(self, names: frozenset[str] | set[str]) -> Bools:
        """Which rows have one of the names."""
        return self._codes_where([text in names for text in self.strings])[self.name]

    def _codes_where(self, true: list[bool]) -> Bools:
        return np.array(true, np.bool_) if true else np.zeros(1, np.bool_)

    def argument(self, name: str, default: float | int = NONE) -> npt.NDArray[Any]:
        """One argument of every row; `default` where an event does not have it."""
        found = self.arguments.get(name)
        numbers = np.int64 if found is None else found.values.dtype
        column = np.full(len(self), default, numbers if isinstance(default, int) else np.float64)
        if found is not None:
            column[found.rows] = found.values
        return column

    def rows(self, keep: Bools | Int64) -> Trace:
        """The trace with some of its rows, in the order given (ascending, for row numbers)."""
        chosen = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep.astype(np.int64)
        place = np.full(len(self), NONE, np.int64)
        place[chosen] = np.arange(len(chosen))
        arguments = {}
        for name, (rows, values) in self.arguments.items():
            kept = place[rows] != NONE
            if kept.any():
                arguments[name] = Values(place[rows[kept]], values[kept])
        changed: dict[str, Any] = {column: getattr(self, column)[chosen] for column in COLUMNS}
        return dataclasses.replace(self, arguments=arguments, **changed)

    def since(self, origin: int) -> Trace:
        """The trace with its times counted from another origin."""
        return dataclasses.replace(self, origin=origin, start=self.start + (self.origin - origin))


class TraceSet(Mapping[int, Trace]):
    """The traces of a job by rank, with one origin: that of the event that starts first on any rank.

    A rank whose clock is more than 25 days from that of the first one counts from its own first event, which
    a note says.

    Args:
        traces: one trace a rank.
        notes: what is missing beside what the traces say, one line each.

    Raises:
        UsageError: there is none.
    """

    def __init__(self, traces: Mapping[int, Trace], notes: Iterable[str] = ()) -> None:
        if not traces:
            raise UsageError("no trace to analyse")
        said = list(notes)
        firsts = {
            rank: traces[rank].origin + int(traces[rank].start.min())
            for rank in sorted(traces)
            if len(traces[rank])
        }
        reference = next(iter(firsts.values()), 0)
        near = {r: first for r, first in firsts.items() if abs(first - reference) < LONGEST_US * PS_PER_US // 2}
        origin = min(near.values(), default=0)
        self._traces = {
            rank: traces[rank].since(origin if rank in near else firsts.get(rank, traces[rank].origin))
            for rank in sorted(traces)
        }
        said += [
            f"rank {rank}: its clock is more than 25 days from that of rank {next(iter(firsts))}: "
            "its times count from its own first event"
            for rank in firsts.keys() - near.keys()
        ]
        self._notes = tuple(dict.fromkeys(said))

    def __getitem__(self, rank: int) -> Trace:
        return self._traces[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._traces)

    def __len__(self) -> int:
        return len(self._traces)

    def replaced(self, traces: Mapping[int, Trace]) -> TraceSet:
        """The same job with other traces, and what is missing from it as a whole."""
        return TraceSet(traces, self._notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing from the traces, one line each."""
        return (*self._notes, *(note for trace in self.values() for note in trace.notes))
