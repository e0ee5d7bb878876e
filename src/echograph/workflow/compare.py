"""Two results of `echosim run`, side by side.

They are read as JSON or out of a page; what is no such result is refused by naming the key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from echograph.errors import DataError, InputError

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


MAX_BYTES = 64 * 2**20
# What stands in an element of JSON has no "<".
_IN_PAGE = re.compile(r'<script type="application/json" id="result">([^<]*)</script>')
_ADDS_UP = 1e-6

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_Role = Literal[
    "parameter", "gradient", "optimizer_state", "activation", "input", "buffer", "communication", "workspace"
]  # fmt: skip


class _Breakdown(msgspec.Struct):
    compute: _Amount
    exposed_communication: dict[str, _Amount]
    bubble: _Amount
    wait: _Amount
    host: _Amount


class _Whose(msgspec.Struct):
    name: str
    rank: _Count


class _Memory(msgspec.Struct):
    peak_bytes: _Count
    device_bytes: _Count
    capacity_bytes: _Count
    fits: bool
    at_peak_bytes: dict[_Role, _Count]


class _Collectives(msgspec.Struct):
    calls: _Count
    bytes_per_rank: _Count
    busy_s: _Amount
    algorithms: list[str]


class _Plan(msgspec.Struct):
    """What is said of a plan in words; the rest is only compared."""

    tp: _Count = 1
    cp: _Count = 1
    ep: _Count = 1
    pp: _Count = 1
    dp: _Count = 1
    vpp: _Count = 1
    hsdp_replicas: _Count = 1
    zero: _Count = 0
    micro_batch: _Count | None = None
    global_batch: _Count | None = None


class _Result(msgspec.Struct):
    model: str
    cluster: str
    device: str
    gpus: _Count
    step_time_s: _Amount
    step_time_interval_s: tuple[_Amount, _Amount]
    tokens_per_s: _Amount
    samples_per_s: _Amount
    mfu: _Amount | None
    plan: _Plan
    breakdown_s: _Breakdown
    limits_s: dict[str, _Amount]
    memory: _Memory | None
    collectives: dict[str, _Collectives]
    breakdown_of: _Whose | None = None


def read_result(path: Path) -> dict[str, Any]:
    """A result that `echosim run --output` or `--json` wrote, or the one in a page that `--html` did.

    Raises:
        InputError: the file cannot be read.
        DataError: it is no result; names the key that is missing or wrong.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise DataError(f"{path}: is over {MAX_BYTES // 2**20} MiB, no result is that long")
    try:
        text = data.decode("utf-8")
        record = json.loads(_IN_PAGE.split(text)[1] if text.startswith("<!doctype html>") else text)
    except (ValueError, LookupError, RecursionError):
        raise DataError(f"{path}: is no result of echosim run --json: holds no JSON of one") from None
    for name, value in _numbers(record):
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"{path}: is no result of echosim run --json: {name} is {value}, no number")
    try:
        result = msgspec.convert(record, _Result)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a character, in a name
        raise DataError(f"{path}: is no result of echosim run --json: {error}") from None
    _check_sum(path, result)
    return dict(record)


def _numbers(record: Any) -> Iterator[tuple[str, int | float]]:
    """Every number, with the keys that lead to it."""
    left = [("", record)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(f"{name}[{place}]", item) for place, item in enumerate(value)]
        elif isinstance(value, int | float):
            yield name, value


def _check_sum(path: Path, result: _Result) -> None:
    parts = result.breakdown_s
    total = parts.compute + parts.bubble + parts.wait + parts.host + sum(parts.exposed_communication.values())
    if not math.isclose(total, result.step_time_s, rel_tol=_ADDS_UP, abs_tol=1e-11):
        raise DataError(
            f"{path}: is no result of echosim run --json: breakdown_s adds up to {total:g} s, not to step_time_s, "
            f"{result.step_time_s:g} s"
        )
