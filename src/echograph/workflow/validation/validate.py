"""Predictions held against a table of measured training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echograph.errors import DataError
from echograph.ir.tables import text_table
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.progress import Progress, silent
from echograph.workflow.validation.computed import computed_sources
from echograph.workflow.validation.run import predict_rows
from echograph.workflow.validation.score import Outcome, by_family, read_peers
from echograph.workflow.validation.table import read_measured_steps

_FIGURES = ("rows", "simulated", "skipped", "mean_abs_error", "median_abs_error", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """How far predictions are off.

    Attributes:
        outcomes: one for each row, in the order of the table.
        families: figures of each family, as `echosim validate --json` has them.
        computed: sources whose steps are no measurements, and in how many sets of rows that shows.
    """

    outcomes: tuple[Outcome, ...]
    families: dict[str, dict[str, Any]]
    computed: dict[str, int] = field(default_factory=dict)

    @property
    def table(self) -> AnswerTable:
        """A row each family: how many steps, and the relative errors of those that were simulated."""
        rows = [(name, *(family[figure] for figure in _FIGURES)) for name, family in self.families.items()]
        return from_rows(("family", *_FIGURES), rows)

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim validate --json`."""
        rows = [outcome.to_json() for outcome in self.outcomes]
        return {"families": self.families, "computed": self.computed, "rows": rows}

    def __str__(self) -> str:
        """Errors by family, the worst rows, and why rows were skipped."""
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def _lines(found: Validation) -> Iterator[str]:
    rows = []
    for name, family in found.families.items():
        tools = [("echograph", family["simulated"], family)]
        tools += [(tool, said["rows"], said) for tool, said in family["peers"].items()]
        for tool, count, figures in tools:
            mean, median, bias = (figures[k] for k in ("mean_abs_error", "median_abs_error", "bias"))
            errors = ("-",) * 3 if mean is None else (f"{mean:.1%}", f"{median:.1%}", f"{bias:+.1%}")
            held = "-" if figures.get("in_interval") is None else f"{figures['in_interval']:.0%}"
            rows.append((name, tool, str(count), str(family["rows"]), *errors, held))
    yield text_table(("family", "tool", "rows", "of", "mean error", "median", "bias", "in interval"), rows)
    for name, family in found.families.items():
        worst = ", ".join(f"{row['id']} {row['error']:+.1%}" for row in family["worst"])
        if worst:
            yield f"worst of {name}: {worst}"
        if (memory := family["memory"])["rows"]:
            yield (
                f"peak memory of {name}: {memory['rows']} rows, mean error {memory['mean_abs_error']:.1%}, "
                f"bias {memory['bias']:+.1%}"
            )
    for source, sets in found.computed.items():
        yield (
            f"no measurements: steps of {source} are linear in the number of micro-batches to the last digit, in "
            f"all {sets} sets of rows that could tell: a program's output, which judges no prediction"
        )
    reasons = Counter(outcome.skipped for outcome in found.outcomes if outcome.skipped)
    yield from (f"skipped {count}: {why}" for why, count in reasons.most_common())
    assumed = Counter(what for outcome in found.outcomes for what in outcome.assumed)
    yield from (f"assumed in {count}: {what}" for what, count in assumed.most_common())


def validate(
    table: str | Path,
    *,
    families: Sequence[str] = (),
    grades: Sequence[str] = ("A", "B"),
    peers: str | Path | None = None,
    jobs: int = 1,
    progress: Progress = silent,
) -> Validation:
    """Predicts measured training steps, and says how far the predictions are off.

    Args:
        table: a CSV table of measured steps, a row each (docs/accuracy/steps.md names its columns); in seconds.
        families: only rows of these; none: all.
        grades: only rows whose source is trusted so far; none: all.
        peers: a CSV table of other tools' errors on these rows, with the columns tool, id, err.
        jobs: processes.
        progress: told how far it is.

    Raises:
        InputError: a table cannot be read.
        DataError: it lacks a column, or no row is left.
        MissingExtraError: PyTorch is not installed, and a row's model must be captured.
    """
    rows = read_measured_steps(Path(table), tuple(families), tuple(grades))
    said = read_peers(Path(peers)) if peers else {}
    if peers and not {row.id for row in rows} & {row for errors in said.values() for row in errors}:
        raise DataError(f"{peers}: has an error of no row that is compared: give the ids of {table}")
    computed = computed_sources(rows)
    outcomes = [
        replace(outcome, computed=row.text("source") in computed)
        for row, outcome in zip(rows, predict_rows(rows, jobs, progress), strict=True)
    ]
    return Validation(outcomes=tuple(outcomes), families=by_family(outcomes, said), computed=computed)
