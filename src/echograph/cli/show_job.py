"""What a job graph does on each role, for people."""

from __future__ import annotations

from typing import Any

from echograph.cli.app import print_line, print_table
from echograph.ir.types import Phase
from echograph.units import format_bytes, format_count

_MODEL_PHASES = (Phase.FORWARD, Phase.BACKWARD)


def print_job(summary: dict[str, Any], *, headline: bool = True) -> None:
    """A job's roles and communications, for people."""
    if headline:
        _print_headline(summary)
    print_line("")
    print_table(
        (
            "role", "ranks", "micro-batches", "FLOPs", "recomputed", "traffic", "parameters", "gradients",
            "optimizer", "peak",
        ),
        [_role_row(role) for role in summary["roles"]],
    )  # fmt: skip
    if summary["communication"]:
        print_line("")
        rows = [_communication_row(entry, len(summary["roles"])) for entry in summary["communication"]]
        print_table(("axes", "ranks", "what", "carries", "bytes each", "calls", "bytes a step", "roles"), rows)


def _print_headline(summary: dict[str, Any]) -> None:
    mesh = " x ".join(f"{name} {size}" for name, size in summary["mesh"].items())
    print_line(f"{summary['model']} on {summary['ranks']} ranks" + (f": mesh {mesh}" if mesh else ""))


def _role_row(role: dict[str, Any]) -> tuple[object, ...]:
    needs = role["memory_bytes"] or {}
    own = sum(role["flops"].get(p.name.lower(), 0) for p in _MODEL_PHASES)
    return (
        role["role"],
        role["ranks"],
        role["micro_batches"],
        format_count(own),
        format_count(role["flops"].get("recompute", 0)),
        format_bytes(role["device_bytes"]),
        *(format_bytes(needs[k]) if k in needs else None for k in _MEMORY),
    )


_MEMORY = ("parameter", "gradient", "optimizer_state", "peak")


def _communication_row(entry: dict[str, Any], roles: int) -> tuple[object, ...]:
    calls = entry["calls"]
    low, high = min(calls.values()), max(calls.values())
    return (
        entry["axes"],
        entry["group_size"],
        entry["kind"].replace("_", "-"),
        entry["payload"].replace("_", " "),
        format_bytes(entry["bytes_per_rank"]),
        f"{low}" if low == high else f"{low} to {high}",
        format_bytes(high * entry["bytes_per_rank"]),
        "all" if len(calls) == roles else _few(list(calls)),
    )


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)})"
