"""`echoc annotate --profile`: measured durations into a graph, and what they cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from echograph.cli.app import print_error, print_line
from echograph.ir.graph import Graph
from echograph.ir.passes.measured import Coverage, join
from echograph.ir.profile import load_profile

G = TypeVar("G", bound=Graph)
_NAMED = 5


def annotate_measured(graph: G, profile: Path, device: str = "") -> tuple[G, dict[str, Any]]:
    """The graph with a profile's durations, under a device's name or the profile's own; and what they cover."""
    annotate, coverage = join(graph, load_profile(profile), device)
    runs = coverage.measured + coverage.free + coverage.missing
    record = {
        "device": annotate.device,
        "operations": {
            "measured": coverage.measured,
            "free": coverage.free,
            "missing": coverage.missing,
            "communication_and_host": coverage.other,
        },
        "measured_share": coverage.measured / max(1, coverage.measured + coverage.missing),
        "free_share": coverage.free / max(1, runs),
        "missing_operators": dict(coverage.missing_operators),
        "unmatched": _unmatched(coverage),
    }
    return annotate(graph), record


def _unmatched(coverage: Coverage) -> list[str]:
    return [m.arguments or m.operator for m in coverage.unmatched]


def print_coverage(record: dict[str, Any]) -> None:
    """One line on what is measured, and one each on what is missing and on what fits nothing."""
    counts = record["operations"]
    print_line(
        f"{record['device']}: {record['measured_share']:.1%} of the device operations that run are measured "
        f"({counts['measured']}), {counts['missing']} are missing, {counts['free']} views are free"
    )
    if record["missing_operators"]:
        most = [f"{count} x {name}" for name, count in list(record["missing_operators"].items())[:_NAMED]]
        print_error(f"missing: {', '.join(most)}{_more(record['missing_operators'])}")
    if record["unmatched"]:
        count, named = len(record["unmatched"]), [text[:80] for text in record["unmatched"][:_NAMED]]
        print_error(f"{count} measurements fit no operation: {', '.join(named)}{_more(record['unmatched'])}")


def _more(items: Any) -> str:
    return f", and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
