"""Rows of any format become the columns of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import DataError
from echograph.ir.columns import Int64
from echograph.profiler.traces.events import TEXTS, whole_characters
from echograph.profiler.traces.trace import LONGEST_US, NONE, TEXT, Trace, Values
from echograph.units import PS_PER_US

_COLUMNS = ("start", "duration", "name", "category", "pid", "tid", "stream", "correlation")


class TraceRows:
    """Collects the rows of one file.

    Args:
        path: the file.
        what: what its format is called, for notes.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        self.notes: list[str] = []
        self._codes: dict[str, int] = {}
        self._parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _COLUMNS}
        self._arguments: dict[str, list[Values]] = {}
        self._count = 0
        self._base_ps: int | None = None
        self._left_out = 0

    def __len__(self) -> int:
        return self._count

    def code(self, text: str) -> int:
        """The number of a text."""
        return self._codes.setdefault(text, len(self._codes))

    def process(self, text: str) -> int:
        """What stands for a process or thread that is called by a text."""
        return TEXT - self.code(text)

    def add(
        self,
        category: str,
        names: Sequence[str] | npt.NDArray[Any],
        start: Int64,
        duration: Int64,
        *,
        base_ps: int = 0,
        arguments: Mapping[str, Sequence[Any] | npt.NDArray[Any]] | None = None,
        **places: Int64 | int,
    ) -> None:
        """Adds rows of a category; those that last less than nothing, or above 50 days, are left out.

        Args:
            category: as `trace` has them: "kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", ...
            names: a text each, or codes.
            start: int64 [n], picoseconds since `base_ps`.
            duration: int64 [n], picoseconds.
            base_ps: picoseconds of the file's clock; rows lie within 50 days of those that were added first.
            arguments: by their names in the profiler's JSON, a value each.
            places: columns `pid`, `tid`, `stream`, `correlation`: a value each, or one of all.
        """
        kept = (duration >= 0) & (duration < LONGEST_US * PS_PER_US) & (np.abs(start) < LONGEST_US * PS_PER_US)
        self._left_out += int((~kept).sum())
        if not kept.any():
            return
        if self._base_ps is None:
            self._base_ps = base_ps
        shift = base_ps - self._base_ps
        if abs(shift) >= LONGEST_US * PS_PER_US:
            raise DataError(f"{self.path}: its clocks are more than 50 days apart: export what lies together")
        codes = names if isinstance(names, np.ndarray) else np.array([self.code(name) for name in names], np.int32)
        count = int(kept.sum())
        columns: dict[str, Any] = {"start": start + shift, "duration": duration, "name": codes}
        columns |= {"category": self.code(category), **places}
        for name, parts in self._parts.items():
            of = np.broadcast_to(np.asarray(columns.get(name, NONE)), kept.shape)[kept]
            parts.append(of.astype(np.int32 if name in ("name", "category") else np.int64))
        rows = np.arange(self._count, self._count + count)
        for name, values in (arguments or {}).items():
            coded = np.array([self.code(v) for v in values], np.int32) if name in TEXTS else np.asarray(values)
            self._arguments.setdefault(name, []).append(Values(rows, coded[kept]))
        self._count += count

    def trace(self, rank: int, header: Mapping[str, Any] | None = None, world_size: int = 0) -> Trace:
        """The rows by their start, as a trace.

        Args:
            rank: of the job.
            header: what the file says beside the rows, under the names of the profiler's JSON.
            world_size: ranks of the job; 0 where the file does not say.
        """
        whole = dict.fromkeys(_COLUMNS, np.zeros(0, np.int64))
        columns = {name: np.concatenate(parts) if parts else whole[name] for name, parts in self._parts.items()}
        order = np.lexsort((-columns["duration"], columns["start"]))
        place = np.argsort(order)
        columns = {name: column[order] for name, column in columns.items()}
        first = int(columns["start"][0]) if len(order) else 0
        arguments = {}
        for name, parts in self._arguments.items():
            rows = place[np.concatenate([part.rows for part in parts])]
            by_row = np.argsort(rows)
            arguments[name] = Values(rows[by_row], np.concatenate([part.values for part in parts])[by_row])
        notes = list(self.notes)
        if self._left_out:
            notes.append(f"{self.path}: {self._left_out} events left out: their times are none")
        columns["start"] = columns["start"] - first
        nothing = np.full(len(order), NONE, np.int64)
        rest: dict[str, Any] = {name: columns[name] for name in _COLUMNS}
        rest |= {name: columns[name].astype(np.int32) for name in ("name", "category")}
        return Trace(
            rank=rank,
            world_size=world_size,
            path=str(self.path),
            origin=(self._base_ps or 0) + first,
            **rest,
            external_id=nothing,
            index=nothing,
            strings=tuple(map(whole_characters, self._codes)),
            arguments=arguments,
            header={"format": self.what, **(header or {})},
            notes=tuple(notes),
        )
