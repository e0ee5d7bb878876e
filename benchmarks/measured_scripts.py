"""Scripts of others, unedited, against measured steps: `python -m benchmarks.measured_scripts FOLDER`.

FOLDER holds the clones, and in `data` what rows of `measured_scripts.toml` say has to be there. Each script is
captured and simulated on the cluster that its authors ran it on; what is predicted stands beside what they report.
Graphs are kept in FOLDER/graphs, and captured once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import echograph as eg
from benchmarks.strangers import capture, clone, scripts

ROWS = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A step and its peak of memory, measured and predicted.

    Attributes:
        name: of the script's row.
        gpus: number of ranks.
        measured_s: seconds of a step.
        predicted_s: the same, predicted.
        interval_s: 90 % interval of that.
        measured_gib: at the peak, allocated.
        predicted_gib: the same, predicted.
    """

    name: str
    gpus: int
    measured_s: float
    predicted_s: float
    interval_s: tuple[float, float]
    measured_gib: float
    predicted_gib: float

    @property
    def step_error(self) -> float:
        """Relative error of the step time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def peak_error(self) -> float:
        """Relative error of the peak."""
        return self.predicted_gib / self.measured_gib - 1

    @property
    def is_held(self) -> bool:
        """Whether the interval holds the measured step."""
        return self.interval_s[0] <= self.measured_s <= self.interval_s[1]


def comparisons(rows: Sequence[dict[str, Any]], folder: Path) -> Iterator[Comparison]:
    """What is predicted of scripts that are captured, one after the other; of others, a line says why not."""
    graphs = folder / "graphs"
    graphs.mkdir(exist_ok=True)
    for row in rows:
        graph = graphs / f"{row['name']}.pb"
        if not graph.is_file():
            outcome = capture(row, folder, graph)
            if not outcome.captured:
                print(f"{row['name']}: {outcome.line}")
                continue
        beside = ROWS.with_name(row["cluster"])
        result = eg.simulate(eg.load(graph), eg.System(str(beside) if beside.is_file() else row["cluster"]))
        low, high = result.interval_ps
        assert result.memory is not None  # a captured step has tensors
        yield Comparison(
            name=row["name"], gpus=row["ranks"], measured_s=row["step-s"], predicted_s=result.step_s,
            interval_s=(low / 1e12, high / 1e12), measured_gib=row["peak-gib"],
            predicted_gib=result.memory.peak_bytes / 2**30,
        )  # fmt: skip


def table(found: Sequence[Comparison]) -> str:
    """Comparisons in Markdown, and what they come to."""
    lines = [
        "| script | GPUs | step, measured | predicted | error | peak, measured | predicted | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in found:
        step = f"{each.measured_s:.2f} s | {each.predicted_s:.2f} s | {each.step_error:+.1%}"
        peak = f"{each.measured_gib:.1f} GiB | {each.predicted_gib:.1f} GiB | {each.peak_error:+.1%}"
        lines.append(f"| {each.name} | {each.gpus} | {step} | {peak} |")
    steps, peaks = [each.step_error for each in found], [each.peak_error for each in found]
    lines += [
        "",
        f"Mean error of {len(found)} steps: {fmean(map(abs, steps)):.1%} (bias {fmean(steps):+.1%}), "
        f"{sum(each.is_held for each in found)} of them in the 90 % interval; of peaks "
        f"{fmean(map(abs, peaks)):.1%} (bias {fmean(peaks):+.1%}).",
    ]
    return "\n".join(lines)


def main() -> None:
    """Compares them all, or those whose names hold a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the clones lie")
    parser.add_argument("--only", default="", help="those whose names hold this")
    given = parser.parse_args()
    folder = given.folder.resolve()
    rows = [row for row in scripts(ROWS.read_text()) if given.only in row["name"]]
    there = [row for row in rows if (folder / clone(row)).is_dir()]
    if not there:
        parser.error(f"{folder} has no clone of {', '.join(sorted({row['repository'] for row in rows}))}")
    print(table(list(comparisons(there, folder))))


if __name__ == "__main__":
    main()
