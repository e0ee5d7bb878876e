"""Tells steps that a table gives as measured and that somebody computed.

A step that ran differs from the next in its third or fourth digit. A simulator's does not: all else alike, its
step is a + b m for m micro-batches, to the last digit that is printed. A source in which no set of such rows
leaves its line is a program's output, whatever its column is called, and its rows judge nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from echograph.workflow.validation.table import MeasuredStep, Skip

LEAST_SETS = 10
"""Sets of rows by which a source is judged: one or two may lie on a line by chance, as by rounding."""

RUNS_DIFFER = 1e-5
"""How far, relatively, a step that ran leaves its line at the least: a hundredth of what one run differs from
another (a few thousandths, as lines of a training log show)."""

_RATES = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
_FIGURES = {"id", "global_batch", "step_time_s", *_RATES, "peak_mem_gib", "notes", "grade"}
"""Columns that follow from the number of micro-batches, or say nothing of how the step was run."""


def computed_sources(rows: Iterable[MeasuredStep]) -> dict[str, int]:
    """Sources whose steps are linear in the number of micro-batches wherever three or more rows can tell.

    Returns:
        Source -> in how many sets of rows its steps lie on a line, which are all of its sets.
    """
    sets: dict[str, dict[object, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        seconds = row.real("step_time_s")
        try:
            samples = row.global_batch
        except Skip:
            continue
        if row.text("source") and seconds is not None:
            alike = tuple((name, said) for name, said in row.columns.items() if name not in _FIGURES)
            sets[row.text("source")][alike][samples] = seconds
    found = {}
    for source, steps in sets.items():
        telling = [sorted(one.items()) for one in steps.values() if len(one) > 2]
        if len(telling) >= LEAST_SETS and all(map(_on_a_line, telling)):
            found[source] = len(telling)
    return found


def _on_a_line(steps: Sequence[tuple[int, float]]) -> bool:
    """Whether steps by samples, in order, lie on the line from the first to the last."""
    (least, shortest), (most, longest) = steps[0], steps[-1]
    slope = (longest - shortest) / (most - least)
    return all(
        abs(shortest + slope * (samples - least) - seconds) <= RUNS_DIFFER * seconds for samples, seconds in steps
    )
