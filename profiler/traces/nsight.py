"""The SQLite file that `nsys export --type sqlite` writes, to columns.

Tables and columns are those of NVIDIA's "SQLite Schema Reference" (Nsight Systems' documentation); which of them a
file has depends on its version and on what was traced, so each is looked for.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Int64
from echograph.profiler.traces.kineto import rank_of_name
from echograph.profiler.traces.rows import TraceRows
from echograph.profiler.traces.trace import NONE, Trace
from echograph.progress import Progress, silent
from echograph.units import PS_PER_NS

WHAT = "an export of Nsight Systems"
_KERNELS, _COPIES, _SETS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
_CALLS, _RANGES, _GRAPHS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
# Tables that say what others mean: nothing that ran is in them.
_DESCRIBE = re.compile(
    r"StringIds$|ENUM_|TARGET_INFO|META_DATA|ANALYSIS_|EXPORT_|sqlite_|.*_METADATA$|PROCESSES$|ThreadNames$"
)
_COPY_NAMES = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
# NVTX's push and pop, and start and end; marks have no duration.
_RANGE_TYPES = (59, 60)
_VERSION = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")
_BITS, _LOW = 24, (1 << 24) - 1
_BATCH = 1 << 16


def read_nsight(path: Path, progress: Progress = silent) -> Trace:
    """The kernels, copies, sets, calls and NVTX ranges of an export.

    Ranges become annotations. Where several processes used devices, each is a rank (`processRanks`): by the number
    of its device where each has one of its own, else by its own number.

    Args:
        path: the file, not gzipped.
        progress: told how far the reading is.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no such export, or broken.
    """
    try:
        connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            return _Export(path, connection, progress).trace()
        finally:
            connection.close()
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: not a whole SQLite file of Nsight Systems ({error}): unpack or export it anew"
        ) from None


class _Export:
    """One file: which tables it has, and the rows that were read of them."""

    def __init__(self, path: Path, connection: sqlite3.Connection, progress: Progress) -> None:
        self.path, self.progress = path, progress
        self._db = connection
        named = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.tables = {str(name) for (name,) in named}
        self.rows = TraceRows(path, WHAT)
        self._start_ps = PS_PER_NS * self._first("TARGET_INFO_SESSION_START_TIME", "utcEpochNs", 0)
        self._owners = self._processes()

    def trace(self) -> Trace:
        """All that is read, as a trace."""
        read = {_KERNELS, _COPIES, _SETS, _CALLS, _RANGES}
        # Graphs that were traced as a whole have no kernels of their own.
        read |= {_GRAPHS}
        if not self.tables & read:
            known = ", ".join(sorted(self.tables)[:8]) or "none"
            raise DataError(
                f"{self.path}: SQLite, but no table of Nsight Systems that says what ran (it has {known})"
            )
        self._add_work(_KERNELS, "kernel", ("demangledName", "shortName", "mangledName"))
        self._add_work(_GRAPHS, "kernel", ())
        self._add_work(_COPIES, "gpu_memcpy", ())
        self._add_work(_SETS, "gpu_memset", ())
        self._add_calls()
        self._add_ranges()
        self._note_others(read)
        header: dict[str, object] = {"deviceProperties": self._devices()}
        if len(self._owners) > 1:
            header["processRanks"] = self._ranks()
        return self.rows.trace(rank_of_name(self.path), header)

    def _columns(self, table: str) -> set[str]:
        return (
            {str(row[1]) for row in self._db.execute(f'PRAGMA table_info("{table}")')}
            if table in self.tables
            else set()
        )

    def _first(self, table: str, column: str, default: int) -> int:
        if column not in self._columns(table):
            return default
        row = self._db.execute(f'SELECT CAST("{column}" AS INTEGER) FROM "{table}" LIMIT 1').fetchone()
        return default if row is None or row[0] is None else int(row[0])

    def _read(self, table: str, columns: Sequence[str], where: str = "") -> Iterator[Int64]:
        """Batches of rows, a column each; what is not said is -1."""
        known = self._columns(table) | {"rowid"}
        if not {"start", "end"} <= known:
            return
        chosen = [
            f'COALESCE(CAST("{name}" AS INTEGER), {NONE})' if name in known else str(NONE) for name in columns
        ]
        cursor = self._db.execute(f'SELECT {", ".join(chosen)} FROM "{table}" {where}')
        done = 0
        while batch := cursor.fetchmany(_BATCH):
            done += len(batch)
            self.progress(f"reading {table} of {self.path.name}", done)
            yield np.array(batch, np.int64).T

    def _names(self, ids: Collection[int]) -> dict[int, str]:
        """Texts by their numbers."""
        found: dict[int, str] = {}
        if {"id", "value"} <= self._columns("StringIds"):
            wanted = sorted(ids)
            for at in range(0, len(wanted), 500):
                some = ", ".join(map(str, wanted[at : at + 500]))
                for number, text in self._db.execute(
                    f"SELECT id, CAST(value AS TEXT) FROM StringIds WHERE id IN ({some})"
                ):
                    found[int(number)] = text or ""
        return found

    def _processes(self) -> dict[int, tuple[int, ...]]:
        """The devices that each process used."""
        used: dict[int, set[int]] = {}
        for table in (_KERNELS, _COPIES, _SETS, _GRAPHS):
            if {"globalPid", "deviceId"} <= self._columns(table):
                rows = self._db.execute(
                    f'SELECT DISTINCT CAST(globalPid AS INTEGER), CAST(deviceId AS INTEGER) FROM "{table}"'
                )
                for process, device in rows:
                    used.setdefault(_process(process or 0), set()).add(device or 0)
        return {process: tuple(sorted(devices)) for process, devices in sorted(used.items())}

    def _device(self, processes: Int64, devices: Int64) -> Int64:
        """What stands for the device of each row: its number, or that of which process it is where several run."""
        if len(self._owners) < 2:
            return devices
        pairs, at = np.unique(np.stack((processes, devices)), axis=1, return_inverse=True)
        codes = [self.rows.process(_device_text(p, d)) for p, d in pairs.T.tolist()]
        return np.array(codes, np.int64)[at.ravel()]

    def _add_work(self, table: str, category: str, names: Sequence[str]) -> None:
        name = next((name for name in names if name in self._columns(table)), "")
        said = (
            "start",
            "end",
            "deviceId",
            "streamId",
            "correlationId",
            "globalPid",
            name,
            "bytes",
            "copyKind",
            "graphId",
        )
        for start, end, device, stream, correlation, process, text, nbytes, copied, graph in self._read(
            table, said
        ):
            if table == _KERNELS:
                known = self._names(set(text.tolist()))
                labels = [known.get(number, f"kernel {number}") for number in text.tolist()]
            elif table == _GRAPHS:
                labels = [f"CUDA graph {number}" for number in graph.tolist()]
            elif table == _COPIES:
                labels = [f"Memcpy {_COPY_NAMES.get(kind, kind)}" for kind in copied.tolist()]
            else:
                labels = ["Memset"] * len(start)
            moved = {"bytes": nbytes} if "bytes" in self._columns(table) else {}
            where = self._device(_process_of(process), device)
            self._add(
                category,
                labels,
                start,
                end,
                pid=where,
                tid=stream,
                stream=stream,
                correlation=correlation,
                arguments=moved,
            )

    def _add_calls(self) -> None:
        for start, end, thread, correlation, text in self._read(
            _CALLS, ("start", "end", "globalTid", "correlationId", "nameId")
        ):
            known = self._names(set(text.tolist()))
            labels = [_VERSION.sub("", known.get(number, f"call {number}"), count=1) for number in text.tolist()]
            runtime = np.array([label.startswith("cuda") for label in labels])
            for category, of in (("cuda_runtime", runtime), ("cuda_driver", ~runtime)):
                chosen = np.flatnonzero(of)
                self._add(
                    category, [labels[row] for row in chosen.tolist()], start[chosen], end[chosen],
                    pid=_process_of(thread[chosen]), tid=thread[chosen] & _LOW, correlation=correlation[chosen],
                )  # fmt: skip

    def _add_ranges(self) -> None:
        columns = self._columns(_RANGES)
        if not {"globalTid", "eventType"} <= columns:
            return
        text = '"text"' if "text" in columns else "NULL"
        of = f"WHERE eventType IN ({_RANGE_TYPES[0]}, {_RANGE_TYPES[1]})"
        for start, end, thread, number, row in self._read(
            _RANGES, ("start", "end", "globalTid", "textId", "rowid"), of
        ):
            known = self._names({n for n in number.tolist() if n != NONE})
            ids = ", ".join(map(str, row[number == NONE].tolist())) or "-1"
            own = dict(
                self._db.execute(f'SELECT rowid, CAST({text} AS TEXT) FROM "{_RANGES}" WHERE rowid IN ({ids})')
            )
            labels = [
                known.get(n) or own.get(r) or "(no name)"
                for n, r in zip(number.tolist(), row.tolist(), strict=True)
            ]
            self._add("user_annotation", labels, start, end, pid=_process_of(thread), tid=thread & _LOW)

    def _add(self, category: str, labels: list[str], start: Int64, end: Int64, **rest: object) -> None:
        # A range that did not end has no end; nanoseconds since the session began.
        length = np.where((end == NONE) | (end < start), NONE, end - start)
        self.rows.add(category, labels, start * PS_PER_NS, length * PS_PER_NS, base_ps=self._start_ps, **rest)  # type: ignore[arg-type]

    def _ranks(self) -> dict[str, int]:
        """The rank of each process, and of its devices."""
        alone = [devices[0] for devices in self._owners.values() if len(devices) == 1]
        by_device = len(set(alone)) == len(self._owners)
        order = sorted(self._owners, key=(lambda process: self._owners[process]) if by_device else int)
        how = "by the numbers of their devices" if by_device else "by their own numbers"
        self.rows.notes.append(f"{self.path}: {len(order)} processes used devices: taken for ranks, {how}")
        found: dict[str, int] = {}
        for rank, process in enumerate(order):
            found[str(process)] = rank
            found |= {_device_text(process, device): rank for device in self._owners[process]}
        return found

    def _devices(self) -> list[dict[str, object]]:
        if "name" not in self._columns("TARGET_INFO_GPU"):
            return []
        rows = self._db.execute("SELECT CAST(name AS TEXT) FROM TARGET_INFO_GPU").fetchall()
        return [{"id": number, "name": name} for number, (name,) in enumerate(rows)]

    def _note_others(self, read: set[str]) -> None:
        rest = (table for table in sorted(self.tables - read) if not _DESCRIBE.match(table))
        others = [table for table in rest if "start" in self._columns(table)]
        if others:
            self.rows.notes.append(f"{self.path}: not read: {', '.join(others)}")


def _process(number: int) -> int:
    """The number of a process within a serialised global one: 24 bits above those of its thread."""
    return (number >> _BITS) & _LOW


def _process_of(numbers: Int64) -> Int64:
    found: Int64 = (numbers >> _BITS) & _LOW
    return found


def _device_text(process: int, device: int) -> str:
    return f"device {device} of process {process}"
