"""Two results of `echosim run`, side by side."""

from __future__ import annotations

import math
from typing import Any

_PLAIN = ("step_time_s", "tokens_per_s", "samples_per_s", "mfu")


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Every figure of both, with their difference and ratio; and the options of the plan that differ."""
    old, new = _figures(before), _figures(after)
    rows = {}
    for name in [*old, *(n for n in new if n not in old)]:
        a, b = old.get(name, 0.0), new.get(name, 0.0)
        if a or b:
            rows[name] = {"before": a, "after": b, **_apart(a, b)}
    plans = before["plan"], after["plan"]
    different = {
        k: [p.get(k) for p in plans] for k in {**plans[0], **plans[1]} if plans[0].get(k) != plans[1].get(k)
    }
    return {"figures": rows, "plan": different}


def _apart(before: float | None, after: float | None) -> dict[str, float | None]:
    """Difference and ratio, where both are known."""
    if before is None or after is None:
        return {"difference": None, "ratio": None}
    ratio = after / before if before else math.inf
    return {"difference": after - before, "ratio": ratio if math.isfinite(ratio) else None}


def _figures(record: dict[str, Any]) -> dict[str, float | None]:
    """Every figure; None where it is not known."""
    parts, memory = record["breakdown_s"], record["memory"]
    found = {name: None if record[name] is None else float(record[name]) for name in _PLAIN}
    found |= {name: float(parts[name]) for name in ("compute", "host", "bubble", "wait")}
    found |= {f"exposed {axis}": float(value) for axis, value in parts["exposed_communication"].items()}
    return {**found, "peak_bytes": None if memory is None else float(memory["peak_bytes"])}
