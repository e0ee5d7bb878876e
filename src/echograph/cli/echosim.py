"""`echosim`: simulate workload graphs on clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echograph.cli.app import make_app, require_torch, run
from echograph.cli.options import GraphFile, Json, Output, TraceFile, parse_ranks, with_options
from echograph.cli.output import (
    check_outputs,
    print_json,
    print_line,
    print_notes,
    print_table,
    progress,
    reading,
    shortened,
    write_json,
    write_text,
    write_trace,
)
from echograph.errors import UsageError
from echograph.ir.graph import JobGraph
from echograph.units import format_bytes, format_count, format_time
from echograph.workflow.plan import Plan
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System, SystemOptions

if TYPE_CHECKING:
    from echograph.simulator.memory import Memory
    from echograph.simulator.ranks import RankPath
    from echograph.simulator.result import Result
    from echograph.workflow.replay import StepTime

app = make_app("echosim", "Simulate a workload graph on a cluster: step time, where it goes, how sure it is.")

MAX_TRACED = 64


@app.command("run")
@with_options
def run_command(
    graph: GraphFile,
    plan: Plan,
    system_options: SystemOptions,
    scenario: Scenario,
    model_communication: Annotated[
        bool,
        typer.Option(
            "--model-communication",
            help="Communication takes what the cluster's model says, not what an imported graph holds of it.",
        ),
    ] = False,
    strict_memory: Annotated[
        bool,
        typer.Option(
            "--strict-memory",
            help="A plan that does not fit in memory is an error that names the nearest which do.",
        ),
    ] = False,
    engine: Annotated[str, typer.Option(help="auto, segments, static or events.")] = "auto",
    output: Output = None,
    trace: TraceFile = None,
    trace_ranks: Annotated[
        str | None, typer.Option(help="Ranks to trace, as 0,17 [default: each role]", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that shows why: one file, which loads nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the time of one training step, spread over the GPUs by a parallel plan."""
    from echograph.ir.passes import PASSES
    from echograph.ir.passes.base import run as run_passes
    from echograph.workflow.feasible import FEW, MOST_TRIED, feasible_plans, refuse_if_it_does_not_fit
    from echograph.workflow.plan import cluster_notes
    from echograph.workflow.predict import predict

    if trace_ranks is not None and trace is None:
        raise UsageError("--trace-ranks: says whose timelines a trace holds, give --trace as well")
    traced = () if trace_ranks is None else parse_ranks("--trace-ranks", trace_ranks, MAX_TRACED)
    check_outputs({"the graph": graph}, {"--output": output, "--trace": trace, "--html": html})
    system = system_options.system(plan.cluster)
    notes: list[str] = []
    with reading(graph) as (loaded, say):
        if model_communication:
            loaded = run_passes(loaded, (PASSES["forget_communication"](),))
        say("simulating")
        result, job = predict(loaded, plan, system, scenario, engine=engine, trace_ranks=traced, note=notes.append)
        # Who reads only the JSON is told whether it fits, and saves the time.
        most = MOST_TRIED if strict_memory else FEW if html or not as_json else 0
        near = feasible_plans(loaded, plan, system.cluster, result.memory, say, most)
    notes += cluster_notes(system.cluster, job.world_size)
    print_notes(notes)
    if strict_memory:
        refuse_if_it_does_not_fit(result, near)
    print_json(result.to_json()) if as_json else print_result(result, near)
    write_json(output, result.to_json(), "result")
    write_trace(trace, result, traced)
    if html is not None:
        from echograph.workflow.report.prediction import page

        write_text(html, page(result, job, plan, system, scenario, notes, near), "page: open it in a browser")


@app.command("replay")
def replay_command(
    job: Annotated[Path, typer.Argument(help="A job graph of echoc import kineto.")],
    gpus: Annotated[
        int | None, typer.Option(help="Other ranks of a data-parallel job; the cluster's network then counts.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Whose network carries the communication: a preset or a TOML file.")
    ] = None,
    scale: Annotated[
        list[str] | None, typer.Option(help="What if WHAT=FACTOR, as compute=0.9, host=0.5, op:aten.mm=0.5.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="What if this took no time, as comm.")] = None,
    trace: TraceFile = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run a traced job again with its measured durations: step time, where it goes, error against the measured."""
    from echograph.workflow.replay import is_traced, replay, replay_record, steps

    check_outputs({"the job": job}, {"--output": output, "--trace": trace})
    scales = Scenario(scale=tuple(scale or ()), without=tuple(without or ())).scales
    system = None if cluster is None else System(cluster)
    with reading(job) as (loaded, say):
        if not (isinstance(loaded, JobGraph) and is_traced(loaded)):
            raise UsageError(
                f"{job}: holds no measured step: echosim run it, or give a job of echoc import kineto"
            )
        say("replaying")
        result = replay(loaded, system=system, gpus=gpus, scales=scales)
        found = steps(result)
    changed = bool(cluster or gpus or scale or without)
    record = replay_record(result, found, changed=changed)
    print_json(record) if as_json else _print_replay(result, record, found, changed=changed)
    write_json(output, record, "result")
    write_trace(trace, result)


def _print_replay(result: Result, record: dict[str, Any], found: Sequence[StepTime], *, changed: bool) -> None:
    from echograph.workflow.replay import TRACE, shown_steps, step_medians

    shown = shown_steps(found)
    what = "step" if shown[0].name != TRACE else "trace"
    print_line(f"{result.model} on {result.gpus} ranks ({result.device})")
    replayed, measured = (round(record[f"{word}_step_s"] * 1e12) for word in ("replayed", "measured"))
    ratio = replayed / measured - 1 if measured else 0.0
    said = "measured, other" if changed else "measured"
    print_line(f"  {what:<14}{format_time(replayed)}   ({said}: {format_time(measured)}, {ratio:+.2%})")
    if free := step_medians(found):
        ratio = free[1] / free[2] - 1
        print_line(f"  not recorded  {free[2] * 1e3:.4g} ms   (median of the free steps; replayed: {ratio:+.2%})")
    parts = record["breakdown_s"]
    flat = {"compute": parts["compute"], "host": parts["host"], "wait": parts["wait"] + parts["bubble"]}
    flat |= {f"{axis} communication": value for axis, value in parts["exposed_communication"].items()}
    times = ", ".join(f"{name} {format_time(round(value * 1e12))}" for name, value in flat.items() if value)
    whose = f"rank {result.ends_last.rank}"
    print_line(f"  where it goes {times} (all of the trace, {whose}, which ends last)")
    limits = ", ".join(f"{name} {value / record['trace_s']:.0%}" for name, value in record["limits_s"].items())
    print_line(f"  limited by    {limits} (of the critical path)")
    _print_collectives(result)
    if len(shown) > 1:
        rows = [
            (s.role, s.name, *(f"{t * 1e3:.4g}" for t in (s.measured_s, s.replayed_s)), f"{s.error:+.2%}")
            for s in shown
        ]
        print_table(("rank", "step", "measured ms", "replayed ms", "difference"), rows)


@app.command("compare")
def compare_command(
    before: Annotated[Path, typer.Argument(help="A result written by echosim run --output or --html.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    html: Annotated[Path | None, typer.Option(help="Write a page with both side by side.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two predictions figure by figure, and say which options of their plans differ."""
    from echograph.ir import files
    from echograph.workflow.compare import compare, read_result

    if html is not None:
        if html.resolve() in (before.resolve(), after.resolve()):
            raise UsageError(f"--html {html}: is one of the results to compare: give another file")
        files.check_writable(html)
    results = read_result(before), read_result(after)
    record = compare(*results)
    print_json(record) if as_json else _print_comparison(record)
    if html is not None:
        from echograph.workflow.report.comparison import comparison_page

        page = comparison_page(record, *results, (before.stem, after.stem))
        write_text(html, page, "page: open it in a browser")


def _print_comparison(record: dict[str, Any]) -> None:
    lines = []
    for name, row in record["figures"].items():
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append((name, *(_figure(name, row[k]) for k in ("before", "after", "difference")), ratio))
    print_table(("figure", "before", "after", "difference", "ratio"), lines)
    for name, (old, new) in record["plan"].items():
        print_line(shortened(f"plan: {name} {old} -> {new}", 160))


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "peak_bytes":
        return ("-" if value < 0 else "") + format_bytes(abs(int(value)))
    if name in ("tokens_per_s", "samples_per_s"):
        return f"{value:.4g}/s"
    return f"{value:.4f}" if name == "mfu" else f"{value * 1e3:.4g} ms"


@app.command("validate")
def validate_command(
    table: Annotated[
        Path, typer.Argument(help="CSV table of measured steps (docs/accuracy.md names its columns).")
    ],
    family: Annotated[list[str] | None, typer.Option(help="Only rows of this family; may be repeated.")] = None,
    grade: Annotated[str, typer.Option(help="Only rows of these grades.")] = "A,B",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    peers: Annotated[Path | None, typer.Option(help="CSV table of other tools' errors: tool, id, err.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict measured training steps and say how far the predictions are off, family by family."""
    from echograph.workflow.validation.validate import validate

    check_outputs({"the table": table}, {"--output": output})
    require_torch()
    grades = tuple(grade.split(",")) if grade else ()
    with progress("compiling") as say:
        record = validate(table, families=family or (), grades=grades, peers=peers, jobs=jobs, say=say).to_json()
    print_json(record) if as_json else print_outcomes(record)
    write_json(output, record, "validation")


def print_outcomes(record: dict[str, Any]) -> None:
    """The record of a validation: errors by family, the worst rows, and why rows were skipped."""
    lines = []
    for name, family in record["families"].items():
        tools = [("echograph", family["simulated"], family)]
        tools += [(tool, said["rows"], said) for tool, said in family["peers"].items()]
        for tool, rows, figures in tools:
            mean, median, bias = (figures[k] for k in ("mean_abs_error", "median_abs_error", "bias"))
            errors = ("-",) * 3 if mean is None else (f"{mean:.1%}", f"{median:.1%}", f"{bias:+.1%}")
            lines.append((name, tool, str(rows), str(family["rows"]), *errors))
    print_table(("family", "tool", "rows", "of", "mean error", "median", "bias"), lines)
    for name, family in record["families"].items():
        worst = ", ".join(f"{row['id']} {row['error']:+.1%}" for row in family["worst"])
        if worst:
            print_line(f"worst of {name}: {worst}")
        if (memory := family["memory"])["rows"]:
            print_line(
                f"peak memory of {name}: {memory['rows']} rows, mean error {memory['mean_abs_error']:.1%}, "
                f"bias {memory['bias']:+.1%}"
            )
    reasons = Counter(row["skipped"] for row in record["rows"] if row["skipped"])
    for why, count in reasons.most_common():
        print_line(f"skipped {count}: {why}")
    for what, count in Counter(what for row in record["rows"] for what in row["assumed"]).most_common():
        print_line(f"assumed in {count}: {what}")


@app.command()
def clusters(name: Annotated[str | None, typer.Argument()] = None, as_json: Json = False) -> None:
    """List the cluster presets, or describe one."""
    from echograph.workflow.summary import cluster_rows

    _print_rows(cluster_rows(name), as_json)


@app.command()
def devices(name: Annotated[str | None, typer.Argument()] = None, as_json: Json = False) -> None:
    """List the devices, what their costs rest on, and how far the fits were off."""
    from echograph.workflow.summary import device_rows

    _print_rows(device_rows(name), as_json)


def _print_rows(rows: list[dict[str, object]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
    elif len(rows) == 1:
        for key, value in rows[0].items():
            print_line(f"{key:<24} {value}")
    else:
        print_table([key.replace("_", " ") for key in rows[0]], [list(row.values()) for row in rows])


# -- a prediction, for people ------------------------------------------------------------------------------------

BAR, MOST_RANKS, LEAST_SHARE = 30, 3, 0.03


def print_result(result: Result, near: Sequence[str] = ()) -> None:
    """Step time, where it goes, and how sure it is; before all, whether it cannot run.

    Args:
        result: the prediction.
        near: where it does not fit in memory, what to change so that it does.
    """
    from echograph.workflow.feasible import shortage

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
    _print_collectives(result, algorithms=True)
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


def _print_collectives(result: Result, *, algorithms: bool = False) -> None:
    for axis, entry in result.collectives.items():
        how = f" ({', '.join(entry['algorithms'])})" if algorithms else ""
        print_line(
            f"  collectives   {axis}: {entry['calls']} calls, {format_bytes(entry['bytes_per_rank'])} per rank, "
            f"{entry['busy_s'] * 1e3:.4g} ms busy{how}"
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
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= LEAST_SHARE)


def _print_path(result: Result, path: RankPath) -> None:
    """The ranks through which the critical path goes, and what they do meanwhile."""
    for number, one in enumerate(path.ranks[:MOST_RANKS]):
        share = one.total_ps / result.step_ps if result.step_ps else 0.0
        if share < LEAST_SHARE:
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


def main() -> None:
    """Entry point of the console script."""
    run(app, "echosim")
