"""Pieces of HTML that the pages of one prediction and of two share, made of results as JSON has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from echograph.profiler.page import charts
from echograph.units import format_bytes, format_time
from echograph.workflow.report.lanes import HOST, IDLE, OF_COMMUNICATION

US_PER_S = 1e6
_MAY_BREAK = re.compile(r"(?<=\w[._])(?=[A-Za-z]{3})|(?<=\*\.)")
_OF_KIND = {
    "matrix products": 0,
    "attention": 5,
    "convolutions": 3,
    "other kernels": 2,
    "host": HOST,
    "other ranks": IDLE,
}
_Row = Sequence[Any]


def seconds(value: float) -> str:
    """A time as people read it."""
    return format_time(value * 1e12)


def percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.1f} %"


def plan_line(record: Mapping[str, Any]) -> str:
    """What a plan does, leaving out what it does not."""
    plan = record["plan"]
    words = [f"{axis} {plan[axis]}" for axis in ("tp", "cp", "ep", "pp", "dp") if plan.get(axis, 1) > 1]
    words += [
        f"{name.replace('_', ' ')} {plan[name]}" for name in ("vpp", "hsdp_replicas") if plan.get(name, 1) > 1
    ]
    words += [f"ZeRO-{plan['zero']}"] if plan.get("zero") else []
    words += ["sequence parallel"] if plan.get("sequence_parallel") else []
    words += [f"schedule {plan['schedule']}"] if plan.get("schedule") else []
    words += [f"recompute {plan['recompute']}"] if plan.get("recompute", "none") != "none" else []
    words += [str(plan["precision"])] if plan.get("precision") else []
    words += [f"micro-batch {plan['micro_batch']}"] if plan.get("micro_batch") else []
    words += [f"global batch {plan['global_batch']:,}"] if plan.get("global_batch") else []
    return ", ".join(words)


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Breakdowns as bars of one colour a part.

    Args:
        rows: label and a breakdown as in the result.
    """
    split = [(label, flat(breakdown)) for label, breakdown in rows]
    of_axis = {f"exposed {axis}": colour for axis, colour in _axes([breakdown for _, breakdown in rows]).items()}
    return _seconds_bars(split, {"compute": 0, **of_axis, "host": HOST, "bubble": IDLE, "wait": IDLE})


def limit_bars(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Critical paths as bars of one colour a kind of work.

    Args:
        rows: label and the result.
    """
    split = [(label, record["limits_s"]) for label, record in rows]
    axes = _axes([record["breakdown_s"] for _, record in rows])
    of_axis = {f"{axis} communication": colour for axis, colour in axes.items()}
    return _seconds_bars(split, {**_OF_KIND, **of_axis})


def _axes(breakdowns: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The colour of each axis, the same in all charts of a page."""
    names = dict.fromkeys(axis for breakdown in breakdowns for axis in breakdown["exposed_communication"])
    return {axis: OF_COMMUNICATION[i % len(OF_COMMUNICATION)] for i, axis in enumerate(names)}


def _seconds_bars(rows: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, int]) -> str:
    names = list(dict.fromkeys(name for _, split in rows for name, value in split.items() if value))
    drawn = [(label, [split.get(name, 0.0) * US_PER_S for name in names]) for label, split in rows]
    return charts.bars(drawn, names, "us", [colours.get(name, IDLE) for name in names])


def flat(breakdown: Mapping[str, Any]) -> dict[str, float]:
    """The parts of a breakdown by name, in the order in which they are told."""
    exposed = {f"exposed {axis}": value for axis, value in breakdown["exposed_communication"].items()}
    return {"compute": breakdown["compute"], **exposed, **{k: breakdown[k] for k in ("host", "bubble", "wait")}}


def grid(titles: Sequence[str], rows: Sequence[_Row], texts: Sequence[int] = ()) -> str:
    """A table of what is written already.

    Args:
        titles: titles of the columns.
        rows: texts; of a pair, the second is written small under the first.
        texts: places of the columns that are words, beside the first.
    """
    kind = dict.fromkeys((0, *texts), ' class="text"')
    # On a narrow screen the first column leaves room for the others; what lies beyond is scrolled to.
    most = {at: "14rem,40vw" if at == 0 else "14rem" for at in kind}
    wide = {at: f' style="min-width:min({_longest(rows, at)}ch,{most[at]})"' for at in kind}
    head = "".join(
        f"<th{kind.get(at, '')}{wide.get(at, '')}>{escape(title)}</th>" for at, title in enumerate(titles)
    )
    lines = ("".join(f"<td{kind.get(at, '')}>{_cell(value)}</td>" for at, value in enumerate(row)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll wrap"><table><tr>{head}</tr>{body}</table></div>' if rows else ""


def _longest(rows: Sequence[Sequence[Any]], at: int) -> int:
    """Characters of the longest text of a column; of a pair, those of the first."""
    cells = (row[at][0] if isinstance(row[at], tuple) else row[at] for row in rows)
    return max((len(str(cell)) for cell in cells), default=0)


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{_cell(value[0])}<br><small>{escape(value[1])}</small>"
    return _MAY_BREAK.sub("<wbr>", escape(str(value)))


def section(title: str, text: str, *parts: str) -> str:
    """A part of the page; nothing where it has nothing to show."""
    content = "".join(parts)
    return f'<h2>{escape(title)}</h2><p class="note">{escape(text)}</p>{content}' if content else ""


def memory_bars(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """What devices' memory is taken by.

    Args:
        rows: label and the memory as in the result.
    """
    parts = [(label, _memory_parts(memory)) for label, memory in rows]
    for _, memory in rows:
        if not memory["fits"]:
            parts.append(("the device has", {"capacity": float(memory["capacity_bytes"])}))
    names = [name for name in _HOLDERS if any(part.get(name) for _, part in parts)]
    drawn = [(label, [part.get(name, 0.0) for name in names]) for label, part in parts]
    return charts.bars(drawn, names, "bytes", [_HOLDERS[name] for name in names])


_OF_ROLE = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations and inputs",
    "input": "activations and inputs",
    "buffer": "buffers",
    "communication": "communication",
    "workspace": "workspaces",
}
_OUTSIDE = "allocator's rest, context, NCCL"
_HOLDERS = {
    **{name: at for at, name in enumerate(dict.fromkeys(_OF_ROLE.values()))},
    _OUTSIDE: 7,
    "free": IDLE,
    "capacity": IDLE,
}


def _memory_parts(memory: Mapping[str, Any]) -> dict[str, float]:
    """Bytes that add up to the device's capacity, or beyond it."""
    found: dict[str, float] = {}
    for role, nbytes in memory["at_peak_bytes"].items():
        name = _OF_ROLE[role]
        found[name] = found.get(name, 0.0) + nbytes
    found[_OUTSIDE] = float(max(0, memory["device_bytes"] - memory["peak_bytes"]))
    found["free"] = float(max(0, memory["capacity_bytes"] - memory["device_bytes"]))
    return found


def memory_said(memory: Mapping[str, Any]) -> str:
    """Whether it fits."""
    room = f"{format_bytes(memory['device_bytes'])} of {format_bytes(memory['capacity_bytes'])}"
    return f"{room}: {'fits' if memory['fits'] else 'DOES NOT FIT'}"


COMMUNICATION = ("group", "calls", "bytes per rank", "busy", "exposed", "algorithms")


def communication(record: Mapping[str, Any], axis: str) -> tuple[str, ...]:
    """What `COMMUNICATION` names, of one axis, but for the first."""
    entry = record["collectives"][axis]
    return (
        f"{entry['calls']:,}",
        format_bytes(entry["bytes_per_rank"]),
        seconds(entry["busy_s"]),
        seconds(record["breakdown_s"]["exposed_communication"].get(axis, 0.0)),
        ", ".join(entry["algorithms"]) or "–",
    )
