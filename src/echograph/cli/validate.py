"""A validation for people: errors by family, the worst rows, and why rows were skipped."""

from __future__ import annotations

from collections import Counter
from typing import Any

from echograph.cli.app import print_line, print_table


def print_outcomes(record: dict[str, Any]) -> None:
    """The record of `echosim validate`, as tables."""
    lines = []
    for name, family in record["families"].items():
        lines.append(_line(name, "echograph", family["simulated"], family["rows"], family))
        lines += [_line(name, tool, said["rows"], family["rows"], said) for tool, said in family["peers"].items()]
    print_table(("family", "tool", "rows", "of", "mean error", "median", "bias"), lines)
    for name, family in record["families"].items():
        worst = ", ".join(f"{row['id']} {row['error']:+.1%}" for row in family["worst"])
        if worst:
            print_line(f"worst of {name}: {worst}")
        if family["memory"]["rows"]:
            memory = family["memory"]
            print_line(
                f"peak memory of {name}: {memory['rows']} rows, mean error {memory['mean_abs_error']:.1%}, "
                f"bias {memory['bias']:+.1%}"
            )
    reasons = Counter(row["skipped"] for row in record["rows"] if row["skipped"])
    for why, count in reasons.most_common():
        print_line(f"skipped {count}: {why}")
    for what, count in Counter(what for row in record["rows"] for what in row["assumed"]).most_common():
        print_line(f"assumed in {count}: {what}")


def _line(family: str, tool: str, rows: int, of: int, figures: dict[str, Any]) -> list[str]:
    mean, median, bias = (figures[k] for k in ("mean_abs_error", "median_abs_error", "bias"))
    if mean is None:
        return [family, tool, str(rows), str(of), "-", "-", "-"]
    return [family, tool, str(rows), str(of), f"{mean:.1%}", f"{median:.1%}", f"{bias:+.1%}"]
