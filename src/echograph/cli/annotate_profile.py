"""`echoc annotate --profile`: measured durations into a graph, and what they cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from echograph.cli.app import print_error, print_line
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph
from echograph.ir.passes.annotate import Annotate, Coverage, join
from echograph.ir.profile import Profile, load_profile
from echograph.ir.types import COMMUNICATIONS, Source

G = TypeVar("G", bound=Graph)
_NAMED = 5


def host_name(device: str) -> str:
    """The name under which a file says how long the host takes to issue an operation for a device."""
    return f"{device}/host"


def annotate_measured(graph: G, profile: Path, device: str = "") -> tuple[G, dict[str, Any]]:
    """The graph with a profile's durations, under a device's name or the profile's own; and what they cover.

    Where the profile says what the host takes, that goes under `host_name` of the device.
    """
    measured = load_profile(profile)
    annotate, coverage = join(graph, measured, device)
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
    annotated = annotate(graph)
    if measured.environment.host_op_picoseconds:
        annotated = _with_host(annotated, measured, annotate.device)
        record["host"] = host_name(annotate.device)
    return annotated, record


def _with_host(graph: G, profile: Profile, device: str) -> G:
    from echograph.cli.measured import host

    count = len(graph.ops)
    communicates = np.isin(graph.ops.kind, COMMUNICATIONS)
    return Annotate(
        device=host_name(device),
        # Of collectives, which go through a process group, the profile says nothing.
        picoseconds=np.where(communicates, NONE, host(profile).issue(graph)),
        source=np.full(count, Source.MEASURED, np.uint8),
        spread=np.zeros(count, np.float32),
        samples=np.zeros(count, np.int64),
    )(graph)


def _unmatched(coverage: Coverage) -> list[str]:
    return [m.arguments or m.operator for m in coverage.unmatched]


def print_coverage(record: dict[str, Any]) -> None:
    """One line on what is measured, and one each on what is missing and on what fits nothing."""
    counts = record["operations"]
    print_line(
        f"{record['device']}: {record['measured_share']:.1%} of the device operations that run are measured "
        f"({counts['measured']}), {counts['missing']} are missing, {counts['free']} views are free"
    )
    if "host" in record:
        print_line(f"{record['host']}: what the host takes to issue each, as measured")
    if record["missing_operators"]:
        most = [f"{count} x {name}" for name, count in list(record["missing_operators"].items())[:_NAMED]]
        print_error(f"missing: {', '.join(most)}{_more(record['missing_operators'])}")
    if record["unmatched"]:
        count, named = len(record["unmatched"]), [text[:80] for text in record["unmatched"][:_NAMED]]
        print_error(f"{count} measurements fit no operation: {', '.join(named)}{_more(record['unmatched'])}")


def _more(items: Any) -> str:
    return f", and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
