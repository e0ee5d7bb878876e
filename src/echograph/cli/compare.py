"""Two results of `echosim run`, side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from echograph.cli.app import print_line, print_table
from echograph.errors import DataError, InputError
from echograph.units import format_bytes

# What stands in an element of JSON has no "<".
_IN_PAGE = re.compile(r'<script type="application/json" id="result">([^<]*)</script>')
MAX_BYTES = 64 * 2**20
_PLAIN = ("step_time_s", "tokens_per_s", "samples_per_s", "mfu")


def read_result(path: Path) -> dict[str, Any]:
    """A result that `echosim run --output` or `--json` wrote, or the one in a page that `--html` did.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no result.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path}: is over {MAX_BYTES // 2**20} MiB, no result is that long")
        text = path.read_text(encoding="utf-8")
        record = json.loads(_IN_PAGE.split(text)[1] if text.startswith("<!doctype html>") else text)
        _figures(record)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path}: is no result of echosim run --json") from None
    return dict(record)


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Every figure of both, with their difference and ratio; and the options of the plan that differ."""
    old, new = _figures(before), _figures(after)
    rows = {}
    for name in [*old, *(n for n in new if n not in old)]:
        a, b = old.get(name, 0.0), new.get(name, 0.0)
        if a or b:
            rows[name] = {"before": a, "after": b, "difference": b - a, "ratio": b / a if a else None}
    plans = before["plan"], after["plan"]
    different = {
        k: [p.get(k) for p in plans] for k in {**plans[0], **plans[1]} if plans[0].get(k) != plans[1].get(k)
    }
    return {"figures": rows, "plan": different}


def _figures(record: dict[str, Any]) -> dict[str, float]:
    parts = record["breakdown_s"]
    seconds = {name: parts[name] for name in ("compute", "host", "bubble", "wait")}
    seconds |= {f"exposed {axis}": value for axis, value in parts["exposed_communication"].items()}
    found = {name: float(record[name] or 0.0) for name in _PLAIN} | {k: float(v) for k, v in seconds.items()}
    if record["memory"]:
        found["peak_bytes"] = float(record["memory"]["peak_bytes"])
    record["plan"].get("gpus")  # no dictionary: no result
    return found


def print_comparison(record: dict[str, Any]) -> None:
    """The comparison for people; times in milliseconds."""
    lines = []
    for name, row in record["figures"].items():
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append((name, *(_shown(name, row[k]) for k in ("before", "after", "difference")), ratio))
    print_table(("figure", "before", "after", "difference", "ratio"), lines)
    for name, (old, new) in record["plan"].items():
        print_line(f"plan: {name} {old} -> {new}")


def _shown(name: str, value: float) -> str:
    if name == "peak_bytes":
        return ("-" if value < 0 else "") + format_bytes(abs(int(value)))
    if name in ("tokens_per_s", "samples_per_s"):
        return f"{value:.4g}/s"
    return f"{value:.4f}" if name == "mfu" else f"{value * 1e3:.4g} ms"
