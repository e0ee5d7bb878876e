"""How far predictions are off, by family, and beside them what others say of the same rows."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from echograph.errors import DataError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row's prediction, or why there is none.

    Attributes:
        id: the row.
        family: family of the row.
        measured_s: measured step time.
        device: on which GPUs.
        gpus: how many.
        stack: the software that the step is simulated with; "" for kernels as PyTorch has them.
        experts: whether the model has experts, whose products are grouped.
        predicted_s: predicted step time; None where the row was skipped.
        interval_s: 90 % interval of the prediction, seconds.
        durations_interval_s: the same, from the errors of durations alone.
        work: what part of the predicted step each kind of work is (`simulator.form`).
        unsaid: standard error of the logarithm of the step for what was assumed.
        tokens_per_s: predicted.
        peak_bytes: predicted peak memory.
        measured_peak_bytes: measured peak memory, where the row has it.
        skipped: why; "" otherwise.
        assumed: what was assumed.
        computed: whether the table's step is no measurement (`computed`), so that its error judges nothing.
    """

    id: str
    family: str
    measured_s: float | None = None
    device: str = ""
    gpus: int = 0
    stack: str = ""
    experts: bool = False
    predicted_s: float | None = None
    interval_s: tuple[float, float] | None = None
    durations_interval_s: tuple[float, float] | None = None
    work: dict[str, float] = field(default_factory=dict)
    unsaid: float = 0.0
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    skipped: str = ""
    assumed: tuple[str, ...] = ()
    computed: bool = False

    @property
    def error(self) -> float | None:
        """Relative error of the step time; above 0: predicted too long."""
        if self.predicted_s is None or not self.measured_s:
            return None
        return self.predicted_s / self.measured_s - 1

    @property
    def in_interval(self) -> bool | None:
        """Whether the measured step is within the interval of the predicted one."""
        if self.interval_s is None or self.measured_s is None:
            return None
        return self.interval_s[0] <= self.measured_s <= self.interval_s[1]

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory."""
        if self.peak_bytes is None or not self.measured_peak_bytes:
            return None
        return self.peak_bytes / self.measured_peak_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim validate --json`."""
        record = asdict(self) | {"error": self.error, "memory_error": self.memory_error}
        record["in_interval"] = self.in_interval
        return {**record, "assumed": list(self.assumed), "skipped": self.skipped or None}


def error_summary(errors: Sequence[float]) -> dict[str, Any]:
    """Mean and median absolute error, and bias; None where there is no error to take them of."""
    size = [abs(e) for e in errors]
    return {
        "mean_abs_error": statistics.mean(size) if size else None,
        "median_abs_error": statistics.median(size) if size else None,
        "bias": statistics.mean(errors) if size else None,
    }


WORST = 3
"""Rows of each family that are named."""


def by_family(outcomes: Sequence[Outcome], peers: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Figures of each family.

    Args:
        outcomes: outcomes of all rows.
        peers: tool -> row -> its relative error.
    """
    families: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        families[outcome.family].append(outcome)
    found = {}
    for name, rows in families.items():
        errors = {row.id: row.error for row in rows if row.error is not None}
        ranked = sorted(errors.items(), key=lambda item: -abs(item[1]))[:WORST]
        theirs = {tool: [e for row, e in said.items() if row in errors] for tool, said in peers.items()}
        inside = [row.in_interval for row in rows if row.in_interval is not None]
        memory = [row.memory_error for row in rows if row.memory_error is not None]
        found[name] = {
            "rows": len(rows),
            "simulated": len(errors),
            "skipped": sum(bool(row.skipped) for row in rows),
            "computed": sum(row.computed for row in rows),
            "assumptions": sum(len(row.assumed) for row in rows),
            **error_summary(list(errors.values())),
            "in_interval": statistics.mean(inside) if inside else None,
            "worst": [{"id": row, "error": error} for row, error in ranked],
            "memory": {"rows": len(memory), **error_summary(memory)},
            "peers": {tool: {"rows": len(e), **error_summary(e)} for tool, e in theirs.items() if e},
        }
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is no error")
    return value


def read_peers(path: Path) -> dict[str, dict[str, float]]:
    """Tool -> row -> relative error, of a CSV table with the columns tool, id and err.

    Raises:
        InputError: the table cannot be read.
        DataError: it lacks a column or holds no number.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["err"]:
                    found[row["tool"]][row["id"]] = _finite(row["err"])
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (KeyError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: is no table of tool, id, err: {error}") from None
    return dict(found)
