"""`echosim compare`: two results side by side, for people."""

from __future__ import annotations

from typing import Any

from echograph.cli.app import print_line, print_table, shortened
from echograph.units import format_bytes

_LONGEST = 160


def print_comparison(record: dict[str, Any]) -> None:
    """The comparison for people; times in milliseconds."""
    lines = []
    for name, row in record["figures"].items():
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append((name, *(_shown(name, row[k]) for k in ("before", "after", "difference")), ratio))
    print_table(("figure", "before", "after", "difference", "ratio"), lines)
    for name, (old, new) in record["plan"].items():
        print_line(shortened(f"plan: {name} {old} -> {new}", _LONGEST))


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "peak_bytes":
        return ("-" if value < 0 else "") + format_bytes(abs(int(value)))
    if name in ("tokens_per_s", "samples_per_s"):
        return f"{value:.4g}/s"
    return f"{value:.4f}" if name == "mfu" else f"{value * 1e3:.4g} ms"
