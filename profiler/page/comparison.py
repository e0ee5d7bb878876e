"""Two runs on one page: where the ranks' time goes in each, and what differs, what costs most first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from echograph.errors import EchoError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.against import COMPARED, TIMES, side_by_side
from echograph.profiler.analyses.table import AnswerTable
from echograph.profiler.page import charts
from echograph.profiler.page.frame import document, notes, table, table_script, tiles, with_unit
from echograph.profiler.page.plots import draw
from echograph.profiler.traces.trace import TraceSet
from echograph.progress import Progress, silent

_DRAWN, _ROWS, _ROWS_ALONE = 12, 100, 1000
_HEAT = "rank-times"
_SIDES = ("the run takes longer", "the run takes less")
# Beyond so many events of a rank, what would take minutes is left to the command: paths, what reads files again.
_MOST_EVENTS = 2_000_000
_SLOW = ("critical-path-summary", "shapes", "communication")


def comparison(
    run: TraceSet,
    against: TraceSet,
    title: str,
    names: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Progress = silent,
) -> str:
    """A page with two runs side by side.

    An analysis that cannot be made of these traces is a line among what is missing.

    Args:
        run: the traces that are looked at.
        against: the traces that they are compared with.
        title: of the page.
        names: the analyses; None takes all that can be put side by side.
        options: of each analysis.
        progress: told what is being analysed.

    Returns:
        HTML that loads nothing.

    Raises:
        EchoError: analyses were named, and one cannot be made.
    """
    missing: list[str] = []
    answers: dict[str, AnswerTable] = {}
    large = max(len(trace) for traces in (run, against) for trace in traces.values()) > _MOST_EVENTS
    for name in COMPARED if names is None else names:
        if names is None and large and name in _SLOW:
            missing.append(f"{name}: the traces are too large for this page: ask by name")
            continue
        progress(f"analysing {name}")
        try:
            answers[name] = side_by_side(name, run, against, **(options or {}).get(name, {}))
        except EchoError as error:
            if names is not None:
                raise
            missing.append(f"{name}: {error}")
    missing += [note for answer in answers.values() for note in answer.notes]
    rows = _ROWS if names is None else _ROWS_ALONE
    parts = [f"<h1>{escape(title)}</h1>", _tiles(answers), notes(missing)]
    parts += [_ranks(run, against)] if names is None else []
    parts += [_section(name, answer, rows) for name, answer in answers.items() if len(answer)]
    return document(title, parts, [table_script()])


def _tiles(answers: Mapping[str, AnswerTable]) -> str:
    """The step of both, and which kind of time and which kernel differ most."""
    shown = []
    for name, said in (("steps", "a step"), (_HEAT, "differs most of the kinds of time"), ("kernels", "kernel")):
        answer = answers.get(name)
        if answer is None or not len(answer):
            continue
        row = answer.records()[0]
        change = f"{'+' if row['difference(us)'] > 0 else ''}{with_unit(row['difference(us)'], 'us')}"
        if name == "steps":
            shown.append(
                (with_unit(row["time(us)"], "us"), f"{said}, {with_unit(row['against(us)'], 'us')} against")
            )
            shown.append((change, f"difference of {said}"))
        else:
            what = row["part"] if name == _HEAT else row["name"][:80]
            shown.append((change, f"{what}: {said}" if name == _HEAT else f"{what}: the {said} that differs most"))
    return tiles(shown) if shown else ""


def _ranks(run: TraceSet, against: TraceSet) -> str:
    """A heat map of each run."""
    maps = [draw(_HEAT, ANALYSES[_HEAT](traces)) for traces in (run, against)]
    if not any(maps):
        return ""
    titled = zip(("the run", "against"), maps, strict=True)
    drawn = "".join(f"<div><h3>{label}</h3>{drawing}</div>" for label, drawing in titled)
    return f"<h2>What each rank's time is spent on</h2>{drawn}"


def _section(name: str, answer: AnswerTable, rows: int) -> str:
    """The largest differences as bars, to the left where the run is quicker; and the table."""
    columns = [title for title in answer.columns if title not in TIMES]
    records = [row for row in answer.records()[:_DRAWN] if row["difference(us)"]]
    drawn = [
        (_label(row, columns) or "a step", [max(row["difference(us)"], 0.0), min(row["difference(us)"], 0.0)])
        for row in records
    ]
    chart = charts.bars(drawn, _SIDES, "us", [1, 0]) if drawn else '<p class="note">Nothing differs.</p>'
    return f"<h2>{escape(name)}</h2>{chart}{table(answer, rows)}"


def _label(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """What a row is of: its texts, and its numbers with what they are."""
    said = (
        row[name] if isinstance(row[name], str) else f"{name} {row[name]}"
        for name in columns
        if row[name] not in (None, "") and name not in ("count", "against_count")
    )
    return ", ".join(said)
