"""The generated parts of docs/accuracy.md and of its folder: errors of whole steps, intervals, and plots.

python -m benchmarks.accuracy RESULT.json [...] [--page docs/accuracy.md]

Reads what `echosim validate TABLE --peers FILE -o RESULT.json` wrote, of all families or of some; a row of a later
file takes the place of the same row of an earlier one. Writes into the page (a summary by family; what to believe
when) and into two pages of the folder of its name: steps.md (all figures by family, a plot a family beside it) and
intervals.md. Each part stands between markers (`<!-- NAME -->` to `<!-- end NAME -->`), so what people wrote
around them stays. Takes seconds. The plots need the [report] extra.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from echograph.errors import DataError
from echograph.ir.files import write_whole
from echograph.simulator.form import Form
from echograph.workflow.calibration.form import LEVELS, FormCalibration, calibrate

ROOT = Path(__file__).resolve().parents[1]
SCALES = ((8, "1 to 8"), (64, "9 to 64"), (512, "65 to 512"), (10**9, "over 512"))
"""Numbers of GPUs that are told apart, each up to the first figure."""

MUCH = {"host": 0.2, "all-to-all exchange": 0.05, "hidden communication": 0.2, "attention": 0.25, "bubble": 0.2}
"""Kinds of work that are told apart by errors, and from which part of a step on."""

BAND = 0.1
COLUMNS = 3
LEAST_SPAN = 8
"""From the least to the largest step of a plot, so that steps that are alike look alike."""
Row = dict[str, Any]


def main() -> None:
    """Writes the page's tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="what echosim validate -o wrote")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "accuracy.md", help="the page to write into")
    arguments = parser.parse_args()
    rows, peers = read_results(arguments.results)
    titles = tomllib.loads((ROOT / "benchmarks" / "families.toml").read_text(encoding="utf-8"))
    named = {
        name: rows[name] for name in (*(n for n in titles if n in rows), *(n for n in rows if n not in titles))
    }
    calibration = calibrate(arguments.results)
    for row in answered(row for family in named.values() for row in family):
        hold(row, calibration.left_out.get(row["family"], calibration.form))
    folder = arguments.page.with_suffix("")
    done = answered(measured(row for rows in named.values() for row in rows))
    front = {"summary": summary_table(named, titles, peers), "believe": believe_table(done)}
    steps = {
        "families": families_table(named, titles, peers),
        "plots": plots_table(named, folder),
        "kinds": kinds_table(done),
    }
    write_parts(arguments.page, front)
    write_parts(folder / "steps.md", steps)
    write_parts(folder / "intervals.md", {"intervals": intervals_table(calibration)})


def write_parts(page: Path, parts: dict[str, str]) -> None:
    """Writes each part between its markers in a page.

    Args:
        page: a page in Markdown.
        parts: by the name in its markers, what stands between them.

    Raises:
        DataError: the page lacks a marker.
    """
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = replace_part(text, name, part)
    write_whole(page, [text])


def read_results(paths: Iterable[Path]) -> tuple[dict[str, list[Row]], dict[str, dict[str, float]]]:
    """Rows by family, and by family what other tools' mean errors are."""
    rows: dict[str, Row] = {}
    peers: dict[str, dict[str, float]] = {}
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        rows |= {row["id"]: row for row in record["rows"]}
        for name, family in record["families"].items():
            peers[name] = {tool: said["mean_abs_error"] for tool, said in family["peers"].items()}
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows.values():
        families[row["family"]].append(row)
    return dict(families), peers


def replace_part(text: str, name: str, part: str) -> str:
    """A page with another part between two markers.

    Raises:
        DataError: it has no such markers.
    """
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not marked.search(text):
        raise DataError(f"the page has no <!-- {name} --> and <!-- end {name} -->")
    return marked.sub(lambda found: found[1] + part + found[2], text)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A table in Markdown, its first columns to the left."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in (head, rule, *rows))


def answered(rows: Iterable[Row]) -> list[Row]:
    """Those with a prediction."""
    return [row for row in rows if row["error"] is not None]


def measured(rows: Iterable[Row]) -> list[Row]:
    """Those whose step is a measurement."""
    return [row for row in rows if not row.get("computed")]


def mean_error(rows: Sequence[Row]) -> float:
    """Mean absolute error."""
    return statistics.mean(abs(row["error"]) for row in rows)


def percent(value: float, form: str = ".1f") -> str:
    """A share as the page writes it."""
    return f"{100 * value:{form}} %"


def summary_table(
    families: dict[str, list[Row]], titles: dict[str, str], peers: dict[str, dict[str, float]]
) -> str:
    """Of each family of measured steps: how many, mean error, bias, share in the interval, other tools' errors.

    Args:
        families: rows by family.
        titles: what a family is, by its name.
        peers: mean errors by family and tool.
    """
    lines: list[tuple[str, ...]] = []
    means: list[float] = []
    done: list[Row] = []
    for name, all_rows in families.items():
        if rows := answered(measured(all_rows)):
            title, steps, _, mean, _, bias, held, _, *others = family_line(
                f"{titles.get(name, name)} (`{name}`)", all_rows, peers.get(name, {})
            )
            lines.append((title, steps, mean, bias, held, *others))
            means.append(mean_error(rows))
            done += rows
    head = ("measured steps", "number", "mean error", "bias", "in the 90 % interval", *TOOL_TITLES)
    lines += [
        ("mean over families", f"{len(done):,}", percent(statistics.mean(means)), *[""] * 4),
        ("mean over steps", f"{len(done):,}", percent(mean_error(done)), *[""] * 4),
    ]
    return table(head, lines)


def families_table(
    families: dict[str, list[Row]], titles: dict[str, str], peers: dict[str, dict[str, float]]
) -> str:
    """Errors by family, of its dense models and those with experts apart, and the mean over families.

    A family of steps that were computed has a line, and no part in the mean.
    """
    lines, means, others = [], [], []
    for name, all_rows in families.items():
        rows = answered(all_rows)
        judges = bool(measured(all_rows))
        told = "" if judges else "; no measurements"
        lines.append(family_line(f"{name}: {titles.get(name, '')}{told}", all_rows, peers.get(name, {})))
        (means if judges else others).extend([mean_error(rows)] if rows else [])
        kinds = grouped(rows, lambda row: "with experts" if row.get("experts") else "dense")
        lines += [family_line(f"{name}, {kind}", kinds[kind], {}) for kind in sorted(kinds) if len(kinds) > 1]
    head = ("family", "rows", "of", "mean", "median", "bias", "in interval", "worst", *TOOL_TITLES)
    every = measured(row for rows in families.values() for row in rows)
    done = answered(every)
    median = statistics.median(abs(row["error"]) for row in done)
    with_others = f" ({percent(statistics.mean(means + others))} with what was computed)" if others else ""
    told = (
        f"\nMean over {len(means)} families of the same weight: {percent(statistics.mean(means))}{with_others}; "
        f"over all {len(done):,} measured steps {percent(mean_error(done))} (median {percent(median)}). "
        f"{len(done):,} of {len(every):,} rows are answered. Worst rows by number.\n"
    )
    return table(head, lines) + told


def family_line(title: str, all_rows: Sequence[Row], peers: dict[str, float]) -> tuple[str, ...]:
    """A line of the table of families."""
    rows = answered(all_rows)
    if not rows:
        return (title, "0", f"{len(all_rows):,}", *[""] * 7)
    worst = sorted(rows, key=lambda row: -abs(row["error"]))[:3]
    return (
        title,
        f"{len(rows):,}",
        f"{len(all_rows):,}",
        percent(mean_error(rows)),
        percent(statistics.median(abs(row["error"]) for row in rows)),
        percent(statistics.mean(row["error"] for row in rows), "+.1f"),
        percent(statistics.mean(bool(row["in_interval"]) for row in rows), ".0f"),
        ", ".join(f"{row['id'].rsplit('-', 1)[1]} {percent(row['error'], '+.0f')}" for row in worst),
        *(percent(found) if (found := peers.get(tool)) is not None else "" for tool in TOOLS),
    )


TOOLS = ("calculon", "simumax")
TOOL_TITLES = ("Calculon", "SimuMax")


def hold(row: Row, form: Form) -> None:
    """Says in a row whether the 90 % interval by spreads of other families holds what was measured."""
    low, high = form.interval(row["predicted_s"], row["durations_interval_s"], row["work"], row["unsaid"])
    row["in_interval"] = low <= row["measured_s"] <= high


def intervals_table(found: FormCalibration) -> str:
    """What intervals hold of families that had no part in their estimate, and of all as shipped; the widths."""
    lines = [
        (
            one.family,
            f"{one.steps:,}",
            *(percent(one.held[n], ".0f") for n in LEVELS),
            percent(one.half_width, ".0f"),
            percent(ships.held[LEVELS[-1]], ".0f"),
            percent(ships.half_width, ".0f"),
        )
        for one, ships in zip(found.families, found.shipped, strict=True)
    ]
    head = (
        *("family left out", "steps", *(f"held by {n} %" for n in LEVELS), "half-width of 90 %"),
        *("held by 90 % from all families", "half-width"),
    )
    widths = table(
        ("interval from all families", "shorter by", "longer by"),
        [
            (f"{level} %", percent(1 - math.exp(-shorter)), percent(math.exp(longer) - 1))
            for level, (shorter, longer) in found.form.widths.items()
        ],
    )
    return f"{table(head, lines)}\n{widths}"


def kinds_table(rows: Sequence[Row]) -> str:
    """Errors by GPU, by stack, by number of GPUs, and by kinds of work.

    Args:
        rows: measured steps with a prediction.
    """
    keys: list[tuple[str, Callable[[Row], str]]] = [
        ("GPU", lambda row: row["device"]),
        ("stack", stack_of),
        ("GPUs", scale_of),
    ]
    lines = []
    for what, key in keys:
        groups = grouped(rows, key)
        order = [title for _, title in SCALES] if what == "GPUs" else sorted(groups)
        lines += [(f"{what}: {name}", *figures(groups[name])) for name in order if name in groups]
    for kind, least in MUCH.items():
        if much := [row for row in rows if row["work"].get(kind, 0.0) >= least]:
            lines.append((f"{kind} {percent(least, '.0f')} of the step or more", *figures(much)))
    if rest := [row for row in rows if all(row["work"].get(kind, 0.0) < least for kind, least in MUCH.items())]:
        lines.append(("less of each of these", *figures(rest)))
    return table(("by", "steps", "families", "mean", "bias", "9 of 10 within"), lines)


def believe_table(rows: Sequence[Row]) -> str:
    """Mean errors and numbers of steps by GPU and stack (a line each) and by number of GPUs (a column each).

    Args:
        rows: measured steps with a prediction.
    """
    both = grouped(rows, lambda row: f"{row['device']} | {stack_of(row)}")
    cells = [
        (name, *(cell([row for row in both[name] if scale_of(row) == title]) for _, title in SCALES))
        for name in sorted(both)
    ]
    return table(("GPU", "stack", *(f"{title} GPUs" for _, title in SCALES)), cells, left=2)


def grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows by a key."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def stack_of(row: Row) -> str:
    """The software that a row is simulated with."""
    return row["stack"] or "none"


def scale_of(row: Row) -> str:
    """How many GPUs, roughly."""
    return next(title for most, title in SCALES if row["gpus"] <= most)


def figures(rows: Sequence[Row]) -> tuple[str, ...]:
    """Of some steps: how many, of how many families, their errors, and what nine of ten do not exceed."""
    ranked = sorted(abs(row["error"]) for row in rows)
    bias = statistics.mean(row["error"] for row in rows)
    most = ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))]
    families = len({row["family"] for row in rows})
    return f"{len(rows):,}", str(families), percent(mean_error(rows)), percent(bias, "+.1f"), percent(most, ".0f")


def cell(rows: Sequence[Row]) -> str:
    """Mean error and number of steps."""
    return f"{percent(mean_error(rows), '.0f')} ({len(rows)})" if rows else ""


def plots_table(families: dict[str, list[Row]], folder: Path) -> str:
    """One plot a family, written into a folder, and the table with which a page of that folder shows them."""
    folder.mkdir(exist_ok=True)
    shown = []
    for name, rows in families.items():
        if done := answered(rows):
            plot(name, done, folder / f"{name}.png")
            shown.append(f"![Measured against predicted steps of {name}]({name}.png)")
    shown += [""] * (-len(shown) % COLUMNS)
    lines = [shown[i : i + COLUMNS] for i in range(0, len(shown), COLUMNS)]
    return table([""] * COLUMNS, lines, left=COLUMNS)


def plot(name: str, rows: Sequence[Row], path: Path) -> None:
    """Measured against predicted steps of one family, both logarithmic, with a band of 10 %."""
    import io

    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    measured = [row["measured_s"] for row in rows]
    predicted = [row["predicted_s"] for row in rows]
    low, high = min(measured + predicted), max(measured + predicted)
    wider = max(1.25, (LEAST_SPAN * low / high) ** 0.5)
    low, high = low / wider, high * wider
    figure = Figure(figsize=(3.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    line = [low, high]
    axes.fill_between(line, [v * (1 - BAND) for v in line], [v * (1 + BAND) for v in line], color="0.88", lw=0)
    axes.plot(line, line, color="0.5", lw=0.8)
    for held, colour, label in ((True, "C0", "in the 90 % interval"), (False, "C3", "outside")):
        mine = [i for i, row in enumerate(rows) if bool(row["in_interval"]) is held]
        axes.scatter(
            [measured[i] for i in mine],
            [predicted[i] for i in mine],
            s=24 if len(rows) < 200 else 5,
            color=colour,
            alpha=0.7,
            lw=0,
            label=f"{label}: {len(mine):,}",
        )
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_tick_params(labelsize=8)
    axes.set(xlabel="measured step, s", ylabel="predicted step, s", title=f"{name}: {percent(mean_error(rows))}")
    axes.legend(loc="upper left", fontsize=7, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    write_whole(path, [content.getvalue()])


if __name__ == "__main__":
    main()
