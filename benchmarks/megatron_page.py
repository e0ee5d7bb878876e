"""The generated part of docs/accuracy/megatron-tests.md: tables and a plot each of time and memory.

python -m benchmarks.megatron_page RESULTS [--page docs/accuracy/megatron-tests.md]

RESULTS is the folder that `python -m benchmarks.megatron_tests` keeps. Writes between the page's markers
`<!-- megatron -->` and `<!-- end megatron -->`, and the plots beside the page. The plots need the [report] extra.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.accuracy import BAND, ROOT, percent, replace_part, table
from echograph.ir.files import write_whole

PAGE = ROOT / "docs" / "accuracy" / "megatron-tests.md"
PLATFORMS = ("H100", "A100", "GB200", "H100 on AWS")
LARGE = 2048
"""Hidden size from which on kernels are large, and the host is not what binds."""

STEADY = 1.5
"""The times of a run are judged where 9 of 10 iterations take less than so many times the shortest one.

Of the table's 440, 43 do not: 1.5 to 20 times as long; none of the others takes more than 1.48 times. 34 of the 43
are of GB200's 36 measurements on a single node, 31 of them of the tests that were made for one ("_1node").
"""

LEFT_OUT = {
    "mixtral/mixtral_8x7b_*@lts_dgx_a100": "its 3.746 s on 64 GPUs, which memory at rest says, "
    "would be 367 TFLOP/s a GPU, above an A100's 312",
    "mixtral/mixtral_8x22b_*@lts_dgx_a100": "faster than the same on H100: its platform is wrong",
    "hybrid/hybrid_mr_mcore_te_tp1_pp1_*@lts_dgx_a100": "a sixth of the memory at rest that the same arguments "
    "have on H100: it ran with others",
}
"""Rows that are in no table or plot, by patterns of their names, and why."""

Row = Mapping[str, Any]


def main() -> None:
    """Writes the part and its plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder of results")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write into")
    arguments = parser.parse_args()
    write_page(arguments.results, arguments.page)


def write_page(results: Path, page: Path) -> None:
    """Writes what a folder of results holds between the markers of a page, and the plots beside it."""
    text = page.read_text(encoding="utf-8")
    write_whole(page, [replace_part(text, "megatron", page_part(read_records(results), page.parent))])


def read_records(folder: Path) -> list[dict[str, Any]]:
    """What a folder of results holds, by name."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda record: (record["name"], record["gpus"]))


def page_part(records: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Tables in Markdown, and the plots that they show, written into a folder."""
    rows = judged(records)
    failed = [record for record in records if record["error"]]
    captured = len(records) - len(failed)
    lines = [
        f"{captured} of {len(records)} sets of arguments are captured "
        f"({percent(captured / len(records), '.0f')}), {len(rows):,} measurements are compared"
        f"{of_code(records)}.\n\n",
        errors_table(rows),
        f"\nTimes are judged of steady runs alone, of which 9 of 10 iterations took less than {STEADY} times the "
        f"shortest one; {with_all(rows)}. {of_fastest(records)}\n",
    ]
    lines += of_years(rows)
    if failed:
        reasons = sorted({(record["name"], record["error"].removeprefix("echoc: ")) for record in failed})
        lines += ["\nNot captured:\n\n", table(("test", "why"), [(n, cell(why)) for n, why in reasons], left=2)]
    ids = {str(row["id"]) for record in records for row in record["rows"]}
    without = [(name, why) for name in sorted(ids) if (why := why_left_out(name))]
    if without:
        lines += ["\nLeft out:\n\n", table(("measurement", "why"), without, left=2)]
    folder.mkdir(exist_ok=True)
    shown = []
    for what, unit, scale, keys in PLOTS:
        name = f"megatron-{what}.png"
        pairs = {
            gpu: [
                (row[keys[0]] / scale, row[keys[1]] / scale)
                for row in (steady(rows) if what == "step" else rows)
                if row["gpu"] == gpu and row[keys[0]]
            ]
            for gpu in PLATFORMS
        }
        if any(pairs.values()):
            write_whole(folder / name, [plot(f"{what}, {unit}", pairs)])
            shown.append(f"![Measured against predicted {what}]({name})")
    return "".join([*lines, *(["\n", table([""] * len(shown), [shown], left=len(shown))] if shown else [])])


PLOTS = (
    ("step", "s", 1.0, ("measured_s", "predicted_s")),
    ("memory", "GiB", 2.0**30, ("measured_peak_bytes", "predicted_peak_bytes")),
)


def cell(text: str) -> str:
    """A text that a table holds."""
    return text.replace("|", "\\|")


def with_all(rows: Sequence[Row]) -> str:
    """What mean errors of times would be with the runs that were not steady."""
    by_gpu = {gpu: [row for row in rows if row["gpu"] == gpu] for gpu in PLATFORMS}
    said = [f"{gpu} {mean_and_bias(errors(found, 's'))[0]}" for gpu, found in by_gpu.items() if found]
    return f"of all runs the mean error is {', '.join(said)}" if said else "there is none"


def of_code(records: Sequence[Mapping[str, Any]]) -> str:
    """Which code made results."""
    by = {
        what: sorted({str(record.get(key) or "code that nobody noted") for record in records})
        for what, key in (("captured", "captured_by"), ("simulated", "simulated_by"))
    }
    return "".join(f", {what} by {' and '.join(codes)}" for what, codes in by.items())


def of_fastest(records: Iterable[Mapping[str, Any]]) -> str:
    """Errors against the fastest steady run of each set on a GPU: what made others slower is not in arguments."""
    fastest: dict[str, list[Row]] = {gpu: [] for gpu in PLATFORMS}
    for record in records:
        rows = steady(judged([record]))
        for gpu, found in fastest.items():
            found += sorted((row for row in rows if row["gpu"] == gpu), key=lambda row: row["measured_s"])[:1]
    said = []
    for gpu, found in fastest.items():
        if found:
            mean_error, bias = mean_and_bias(errors(found, "s"))
            said.append(f"{gpu} {mean_error}, bias {bias} ({len(found)} sets)")
    return f"Against the fastest run of each set alone: {'; '.join(said)}." if said else ""


def of_years(rows: Iterable[Row]) -> list[str]:
    """Errors by the year of a measurement, and against the median of all that a test took in the last of them.

    Nothing where it is not known when tests were measured.
    """
    dated = [row for row in steady(rows) if row.get("runs")]
    if not dated:
        return []
    years = sorted({_year(row) for row in dated})
    lines = []
    for gpu in PLATFORMS:
        for year in years:
            found = [row for row in dated if row["gpu"] == gpu and _year(row) == year]
            lines += [(gpu, year, f"{len(found):,}", *_timed(found))] if found else []
        several = [
            {**row, "measured_s": median(runs)}
            for row in dated
            if row["gpu"] == gpu and len(runs := [s for date, s in row["runs"] if date[:4] == years[-1]]) > 1
        ]
        if several:
            lines.append((gpu, f"{years[-1]}, median of several", f"{len(several):,}", *_timed(several)))
    told = table(("GPU", "measured in", "steady tests", "time: mean", "bias", "rank"), lines, left=2)
    head = "\nBy when their times were measured, which are kept while losses do not change:\n\n"
    return [head, told, _of_runs(dated, years[-1])]


def _of_runs(rows: Sequence[Row], year: str) -> str:
    """How far the measurements of one test in a year are apart."""
    times = [[seconds for date, seconds in row["runs"] if date[:4] == year] for row in rows]
    ratios = [max(seconds) / min(seconds) for seconds in times if len(seconds) > 1]
    if not ratios:
        return ""
    return (
        f"\nOf the {len(ratios):,} that were measured more than once in {year} with the same arguments, the "
        f"slowest time is {median(ratios):.2f} times the fastest in the median, {max(ratios):.2f} times at most.\n"
    )


def _year(row: Row) -> str:
    return str(row["runs"][-1][0][:4])


def _timed(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Mean error of times, bias and order."""
    rank = rank_correlation([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows])
    return (*mean_and_bias(errors(rows, "s")), f"{rank:.2f}")


def steady(rows: Iterable[Row]) -> list[Row]:
    """Those whose times are judged."""
    return [row for row in rows if row["spread"] < STEADY]


def judged(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The measurements that count."""
    return [row for record in records for row in record["rows"] if not why_left_out(row["id"])]


def why_left_out(name: str) -> str:
    """Why a row does not count; "" where it does."""
    return next((why for pattern, why in LEFT_OUT.items() if fnmatch(name, pattern)), "")


def errors_table(rows: Sequence[Row]) -> str:
    """Errors of step time, of peak and of memory at rest, by GPU, of all and of those with large kernels."""
    lines = []
    for label, least in (("", 0), (f", hidden size {LARGE:,} and more", LARGE)):
        for gpu in PLATFORMS:
            found = [row for row in rows if row["gpu"] == gpu and row["hidden_size"] >= least]
            if found:
                lines.append((f"{gpu}{label}", f"{len(found):,}", *figures(found)))
    head = ("GPU", "tests", "steady", "time: mean", "bias", "rank", "peak: mean", "bias", "worst", "at rest: mean",
            "bias")  # fmt: skip
    return table(head, lines)


def figures(rows: Sequence[Row]) -> tuple[str, ...]:
    """Of measurements: errors of time, their order, errors of the peak, and of what stays from step to step."""
    timed = steady(rows)
    times = errors(timed, "s")
    order = _timed(timed)[-1] if timed else ""
    peaks, rests = errors(rows, "peak_bytes"), errors(rows, "rest_bytes")
    worst = percent(max(peaks, key=abs), "+.1f") if peaks else ""
    return (f"{len(timed):,}", *mean_and_bias(times), order, *mean_and_bias(peaks), worst, *mean_and_bias(rests))


def errors(rows: Iterable[Row], what: str) -> list[float]:
    """Relative errors of those that were measured."""
    measured, predicted = f"measured_{what}", f"predicted_{what}"
    return [row[predicted] / row[measured] - 1 for row in rows if row.get(measured)]


def mean_and_bias(values: Sequence[float]) -> tuple[str, str]:
    """Mean absolute error and mean error, as the page writes them."""
    return (percent(mean(map(abs, values))), percent(mean(values), "+.1f")) if values else ("", "")


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; equal values have the mean of their places.

    Args:
        one: values.
        other: as many.
    """
    n = len(one)
    a, b = places(one), places(other)
    middle = (n - 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    alone = [sum((x - middle) ** 2 for x in values) for values in (a, b)]
    return float(both / (alone[0] * alone[1]) ** 0.5) if all(alone) else 1.0


def places(values: Sequence[float]) -> list[float]:
    """Where each would stand in order, from 0."""
    ordered = sorted(values)
    first: Callable[[float], int] = ordered.index
    return [first(value) + (ordered.count(value) - 1) / 2 for value in values]


def plot(title: str, pairs: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """Measured against predicted, both logarithmic, by platform, with a band of 10 %, as PNG."""
    from matplotlib.figure import Figure

    values = [value for points in pairs.values() for pair in points for value in pair]
    line = [min(values) / 1.25, max(values) * 1.25]
    figure = Figure(figsize=(4.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(line, [v * (1 - BAND) for v in line], [v * (1 + BAND) for v in line], color="0.88", lw=0)
    axes.plot(line, line, color="0.5", lw=0.8)
    for gpu, points in pairs.items():
        if points:
            measured, predicted = zip(*points, strict=True)
            axes.scatter(measured, predicted, s=12, alpha=0.7, lw=0, label=f"{gpu}: {len(points):,}")
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line, aspect="equal", title=title)
    axes.set(xlabel="measured", ylabel="predicted")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    return content.getvalue()


if __name__ == "__main__":
    main()
