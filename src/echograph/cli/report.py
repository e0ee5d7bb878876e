"""A prediction for people."""

from __future__ import annotations

from collections.abc import Sequence

from echograph.cli.app import print_line
from echograph.errors import PlanError
from echograph.simulator.memory import Memory
from echograph.simulator.result import Result
from echograph.units import format_bytes, format_count, format_time

BAR = 30


def print_result(result: Result) -> None:
    """Step time, where it goes, and how sure it is."""
    low, high = result.interval_ps
    record = result.to_json()
    print_line(f"{result.model} on {result.gpus} GPUs of {result.cluster} ({result.device})")
    print_line(
        f"  step time     {format_time(result.step_ps)}   "
        f"(90 % interval {format_time(low)} to {format_time(high)})"
    )
    tokens = f", {format_count(record['tokens_per_s'])} tokens/s" if result.tokens else ""
    print_line(f"  throughput    {format_count(record['samples_per_s'])} samples/s{tokens}")
    if result.mfu is not None:
        print_line(f"  utilisation   {result.mfu:.1%} of the device's peak (model FLOPs)")
    if result.draws_ps:
        shown = ", ".join(f"{name.upper()} {value * 1e3:.4g} ms" for name, value in result.percentiles_s.items())
        print_line(f"  with noise    {shown} ({len(result.draws_ps)} draws)")
    if result.goodput is not None:
        found = result.goodput
        every = f"every {found.interval_s:.4g} s (best {found.best_interval_s:.4g} s)"
        print_line(
            f"  with failures {found.share:.1%} of the time trains: one every {found.job_mtbf_s / 3600:.3g} h, "
            f"a checkpoint {every}"
        )
    _print_breakdown(result)
    print_line(f"  limited by    {_limits(result)} (of the critical path)")
    for axis, entry in result.collectives.items():
        print_line(
            f"  collectives   {axis}: {entry['calls']} calls, {format_bytes(entry['bytes_per_rank'])} per rank, "
            f"{entry['busy_s'] * 1e3:.4g} ms busy ({', '.join(entry['algorithms'])})"
        )
    if result.network == "flows":
        _print_links(result)
    if result.degraded:
        print_line(f"  degraded      {', '.join(result.degraded)}: every rank simulated")
    if result.memory is not None:
        _print_memory(result.memory)
    shares = ", ".join(f"{share:.0%} {name}" for name, share in result.sources.items() if share > 0)
    print_line(f"  durations     {shares} (shares of the busy time)")
    print_line(
        f"  simulation    {result.tasks} tasks of {result.simulated_ranks} distinct rank(s), "
        f"engine {result.engine}, {result.wall_s:.2g} s"
    )


def refuse_if_it_does_not_fit(result: Result, near: Sequence[str] = ()) -> None:
    """For those who want a plan beyond the device's memory to fail.

    Args:
        result: the prediction.
        near: what to change so that it fits.

    Raises:
        PlanError: the peak is above the capacity.
    """
    memory = result.memory
    if memory is not None and not memory.fits:
        raise PlanError(
            f"the plan needs {format_bytes(memory.device_bytes)} of the {format_bytes(memory.capacity_bytes)} of "
            f"{result.device} ({'; '.join(memory.lines(3))}): "
            + (f"it fits with {' or '.join(near)}" if near else "share it over more --tp, --pp or --zero 3 ranks")
        )


def _print_memory(memory: Memory) -> None:
    held = "" if memory.reserved_bytes is None else f", {format_bytes(memory.reserved_bytes)} reserved"
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    print_line(
        f"  memory        {format_bytes(memory.peak_bytes)} allocated at the peak{held}, "
        f"{format_bytes(memory.device_bytes)} of {format_bytes(memory.capacity_bytes)} in all: {verdict}"
    )
    if not memory.fits:
        for line in memory.lines():
            print_line(f"                {line}")
        print_line("                (--strict-memory names the nearest plans that fit)")


def _print_links(result: Result) -> None:
    """The busiest links, those that are used alike once."""
    print_line(f"  network       flows over links{'; used most:' if result.links else ', which nobody uses'}")
    for link in result.links:
        others = f" (and {link.alike - 1} more)" if link.alike > 1 else ""
        print_line(f"                {link.name:<24} {link.utilisation:>6.1%}{others}")


def _limits(result: Result) -> str:
    """What would have to become faster, the most telling first."""
    total = sum(result.limits.values()) or 1
    shares = [(name, value / total) for name, value in result.limits.items()]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.03)


def _print_breakdown(result: Result) -> None:
    parts = result.breakdown
    rows = [("compute", parts.compute)]
    rows += [(f"exposed {axis}", value) for axis, value in parts.exposed_communication.items()]
    rows += [("host", parts.host), ("bubble", parts.bubble), ("wait", parts.wait)]
    print_line("  where the step goes")
    for name, value in rows:
        share = value / result.step_ps if result.step_ps else 0.0
        if value or name == "compute":
            print_line(f"    {name:<16} {format_time(value):>10} {share:>7.1%}  {'#' * round(BAR * share)}")
