"""What `echoc show`, `compile` and `models` print."""

from __future__ import annotations

from typing import Any

from echograph.cli.app import print_line
from echograph.units import format_bytes, format_count


def micro_batch(summary: dict[str, Any]) -> str:
    """What one micro-batch holds."""
    tokens = f" x {summary['sequence_length']} tokens" if summary["sequence_length"] else ""
    return f"{summary['batch_size']} samples{tokens}"


def print_summary(summary: dict[str, Any]) -> None:
    """A summary for people."""
    mesh = " x ".join(f"{name} {size}" for name, size in summary["mesh"].items())
    print_line(f"{summary['model']} ({summary['level']} graph{', ' + mesh if mesh else ''})")
    print_line(
        f"  {format_count(summary['parameters'])} parameters, {summary['dtype']}, "
        f"{summary['optimizer'] or 'no optimizer'}"
        f"{' with fp32 master weights' if summary['master_weights'] else ''}, "
        f"{micro_batch(summary)} a micro-batch"
    )
    print_line(
        f"  {summary['unfolded_ops']} operations run, {summary['views']} of them views; {summary['ops']} stored"
    )
    for block in summary["blocks"]:
        print_line(f"    {block['instances']:>5} x {block['name']:<40} {block['ops']} operations")
    print_line("  FLOPs and device memory traffic by phase")
    for phase, flops in summary["flops"].items():
        print_line(
            f"    {phase:<12} {format_count(flops, 'FLOP'):>14} {format_bytes(summary['device_bytes'][phase]):>14}"
        )
    print_line("  tensors by role")
    for role, size in summary["tensor_bytes"].items():
        print_line(f"    {role:<18} {format_bytes(size):>14}")
    for device, count in summary["durations"].items():
        known = {k: v for k, v in count.items() if k != "of" and v}
        shares = ", ".join(f"{v / count['of']:.1%} {k}" for k, v in known.items())
        print_line(f"  durations on {device}: {shares}")
    if not summary["durations"]:
        print_line("  durations: none yet (echosim fits them to its cluster's device)")
    print_line("  operators with the most work")
    for row in summary["operators"][:12]:
        print_line(
            f"    {row['count']:>6} x {row['name']:<52} {format_count(row['flops'], 'FLOP'):>14} "
            f"{format_bytes(row['bytes']):>12}"
        )
