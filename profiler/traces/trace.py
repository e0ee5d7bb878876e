"""One rank's profile as columns, and the profiles of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echograph.errors import UsageError
from echograph.ir.columns import Int32, Int64

Bool = npt.NDArray[np.bool_]
NONE = -1

# What Kineto calls the categories of work on a device; the capitalised names are those of PyTorch 1.8 to 1.11.
KERNELS = frozenset({"kernel", "Kernel"})
COPIES = frozenset({"gpu_memcpy", "Memcpy"})
SETS = frozenset({"gpu_memset", "Memset"})
DEVICE = KERNELS | COPIES | SETS | {"mtia_ccp_events"}
CALLS = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "mtia_runtime", "Runtime"})
OPERATORS = frozenset({"cpu_op", "Operator"})


class Values(NamedTuple):
    """An argument that some events have.

    Attributes:
        rows: the rows that have it, ascending.
        values: its value on each of them: numbers, or codes into the trace's strings for text.
    """

    rows: Int64
    values: npt.NDArray[Any]


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
        pid: process; of device work, the device. One that is text is a negative number, -2 less its code.
        tid: thread, likewise; of device work, the stream.
        stream: stream of work on a device and of calls that name one, or -1.
        correlation: what a call to the runtime shares with the work that it launched, or -1.
        external_id: the operator under which a call was made, or -1.
        index: position of the event among the file's.
        strings: texts that codes stand for.
        arguments: further arguments by their name in the file (see `events.ARGUMENTS`).
        header: what the file says beside the events (`deviceProperties`, `distributedInfo`, ...).
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
    stream: Int32
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
    def on_device(self) -> Bool:
        """Which rows are work on a device stream: kernels, copies, sets."""
        return self.of_category(DEVICE) & (self.stream >= 0)

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

    def of_category(self, categories: frozenset[str] | set[str]) -> Bool:
        """Which rows are of one of the categories."""
        return self._codes_where([text in categories for text in self.strings])[self.category]

    def named(self, names: frozenset[str] | set[str]) -> Bool:
        """Which rows have one of the names."""
        return self._codes_where([text in names for text in self.strings])[self.name]

    def _codes_where(self, true: list[bool]) -> Bool:
        return np.array(true, np.bool_) if true else np.zeros(1, np.bool_)

    def argument(self, name: str, default: float | int = NONE) -> npt.NDArray[Any]:
        """One argument of every row; `default` where an event does not have it."""
        found = self.arguments.get(name)
        numbers = np.int64 if found is None else found.values.dtype
        column = np.full(len(self), default, numbers if isinstance(default, int) else np.float64)
        if found is not None:
            column[found.rows] = found.values
        return column

    def rows(self, keep: Bool | Int64) -> Trace:
        """The trace with some of its rows, in the order given (ascending, for row numbers)."""
        chosen = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep.astype(np.int64)
        columns = (
            "start",
            "duration",
            "name",
            "category",
            "pid",
            "tid",
            "stream",
            "correlation",
            "external_id",
            "index",
        )
        place = np.full(len(self), NONE, np.int64)
        place[chosen] = np.arange(len(chosen))
        arguments = {}
        for name, (rows, values) in self.arguments.items():
            kept = place[rows] != NONE
            if kept.any():
                arguments[name] = Values(place[rows[kept]], values[kept])
        changed: dict[str, Any] = {column: getattr(self, column)[chosen] for column in columns}
        return dataclasses.replace(self, arguments=arguments, **changed)

    def since(self, origin: int) -> Trace:
        """The trace with its times counted from another origin."""
        return dataclasses.replace(self, origin=origin, start=self.start + (self.origin - origin))


class TraceSet(Mapping[int, Trace]):
    """The traces of a job by rank, with one origin: that of the event that starts first on any rank.

    Args:
        traces: one trace a rank.

    Raises:
        UsageError: there is none.
    """

    def __init__(self, traces: Mapping[int, Trace]) -> None:
        if not traces:
            raise UsageError("no trace to analyse")
        firsts = [trace.origin + int(trace.start.min()) for trace in traces.values() if len(trace)]
        origin = min(firsts, default=0)
        self._traces = {rank: traces[rank].since(origin) for rank in sorted(traces)}

    def __getitem__(self, rank: int) -> Trace:
        return self._traces[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._traces)

    def __len__(self) -> int:
        return len(self._traces)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing from the traces, one line each."""
        return tuple(note for trace in self.values() for note in trace.notes)
