"""A prediction for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echograph.cli.app import print_line
from echograph.simulator.memory import Memory
from echograph.simulator.ranks import RankPath
from echograph.simulator.result import Result
from echograph.units import format_bytes, format_count, format_time
from echograph.workflow.predict import shortage

BAR = 30
MOST_RANKS = 3


def print_result(result: Result, near: Sequence[str] = ()) -> None:
    """Step time, where it goes, and how sure it is; before all, whether it cannot run.

    Args:
        result: the prediction.
        near: where it does not fit in memory, what to change so that it does.
    """
    low, high = result.interval_ps
    record = result.to_json()
    if result.memory is not None and not result.memory.fits:
        print_line(f"DOES NOT FIT: needs {shortage(result, near)}", alarm=True)
    print_line(f"{result.model} on {result.gpus} GPUs of {result.cluster} ({result.device})")
    print_line(
        f"  step time     {format_time(result.step_ps)}   "
        f"(90 % interval {format_time(low)} to {format_time(high)})"
    )
    tokens = f", {format_count(record['tokens_per_s'])} tokens/s" if result.tokens else ""
    print_line(f"  throughput    {format_count(record['samples_per_s'])} samples/s{tokens}")
    if result.mfu is not None:
        print_line(f"  utilisation   {result.mfu:.1%} of the device's peak ({_utilisation(result)})")
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
    print_line(f"  limited by    {_limits(result.limits)} (of the critical path)")
    if result.path is not None:
        _print_path(result, result.path)
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


def _utilisation(result: Result) -> str:
    """By which FLOPs, and what it is with causal attention by half."""
    if not result.causal_attention_flops or result.mfu_causal is None:
        return "model FLOPs, none recomputed or padded"
    return f"model FLOPs, none recomputed or padded; {result.mfu_causal:.1%} with causal attention by half"


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


def _print_links(result: Result) -> None:
    """The busiest links, those that are used alike once."""
    print_line(f"  network       flows over links{'; used most:' if result.links else ', which nobody uses'}")
    for link in result.links:
        others = f" (and {link.alike - 1} more)" if link.alike > 1 else ""
        print_line(f"                {link.name:<24} {link.utilisation:>6.1%}{others}")


def _limits(limits: Mapping[str, int]) -> str:
    """What would have to become faster, the most telling first."""
    total = sum(limits.values()) or 1
    shares = [(name, value / total) for name, value in limits.items()]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.03)


def _print_path(result: Result, path: RankPath) -> None:
    """The ranks through which the critical path goes, and what they do meanwhile."""
    for number, one in enumerate(path.ranks[:MOST_RANKS]):
        share = one.total_ps / result.step_ps if result.step_ps else 0.0
        if share < 0.03:
            break
        slower = "" if one.slower == 1 else f", {one.slower:g} times as slow,"
        role = f" ({one.role})" if one.role and len(result.roles) > 1 else ""
        head = "  on the path   " if not number else " " * 16
        print_line(f"{head}rank {one.rank}{role}{slower} for {share:.0%}: {_limits(one.limits)}")


def _print_breakdown(result: Result) -> None:
    """The parts of the step of the role that ends last; where there are others, beside what these have."""
    own, spread, step = result.breakdown.flat(), result.spread, result.step_ps or 1
    mean, least, most = (part.flat() for part in (spread.mean, spread.least, spread.most))
    several = spread.ranks > 1 and len(result.roles) > 1
    print_line(f"  where the step goes{_whose(result) if several else ''}")
    for name, value in own.items():
        if not (value or name == "compute" or (several and most[name])):
            continue
        bar = "#" * round(BAR * value / step)
        if several:
            others = f"{mean[name] / step:>6.1%} ({least[name] / step:.1%} to {most[name] / step:.1%})"
            bar = f"{others:<27}  {bar}".rstrip()
        print_line(f"    {name:<16} {format_time(value):>10} {value / step:>7.1%}  {bar}")


def _whose(result: Result) -> str:
    """Whose parts are listed, and over which ranks their mean goes."""
    last, spread = result.ends_last, result.spread
    return f": {last.name} (rank {last.rank}), which ends last; mean of {spread.ranks} ranks (least to most)"
