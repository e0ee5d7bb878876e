"""`echosim`: simulate workload graphs on clusters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

# No prediction multiplies matrices that are worth a thread; NumPy would start one for each core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from echograph.cli.app import end_with, make_app, require_torch, run
from echograph.cli.options import (
    GraphFile,
    GraphFiles,
    Json,
    Output,
    TraceFile,
    with_options,
)
from echograph.cli.output import (
    PAGE,
    check_outputs,
    print_error,
    print_json,
    print_line,
    print_notes,
    print_table,
    print_text,
    reading,
    shortened,
    show_progress,
    write_json,
    write_text,
    write_trace,
)
from echograph.errors import UsageError
from echograph.frontend.pytorch.spec import ModelSizes
from echograph.options import given, option_name, parse_ranks
from echograph.units import format_bytes
from echograph.workflow.find import SearchOptions
from echograph.workflow.jobs import JobPlacement
from echograph.workflow.plan import Plan
from echograph.workflow.prediction import PredictionOptions
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System, SystemOptions
from echograph.workflow.training import TrainingOptions
from echograph.workflow.workers import WorkerOptions

if TYPE_CHECKING:
    from echograph.workflow.search import SearchResult

app = make_app("echosim", "Simulate a workload graph on a cluster: step time, where it goes, how sure it is.")

MAX_TRACED = 64
MODEL_OF_TRACE = typer.Option(
    "--model",
    "-m",
    help="With --trace: zoo name, Hugging Face config, or file.py:function [default: by its gradients].",
)


@app.command("run")
@with_options
def run_command(
    graphs: GraphFiles,
    plan: Plan,
    system_options: SystemOptions,
    scenario: Scenario,
    training_options: TrainingOptions,
    placement: JobPlacement,
    asked: PredictionOptions,
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
    from echograph.workflow.prediction import prediction

    if len(graphs) > 1 or given(placement):
        files = {"trace": trace, "trace_ranks": trace_ranks, "html": html}
        others = [*(name for name, value in files.items() if value), *given(asked)]
        others += [*given(scenario), *given(training_options)]
        _run_jobs(graphs, plan, system_options, placement, others, output, as_json)
        return
    (graph,) = graphs
    if trace_ranks is not None and trace is None:
        raise UsageError("--trace-ranks: says whose timelines a trace holds, give --trace as well")
    traced = () if trace_ranks is None else parse_ranks("--trace-ranks", trace_ranks, MAX_TRACED)
    check_outputs({"the graph": graph}, {"--output": output, "--trace": trace, "--html": html})
    if asked.model:
        require_torch()
    system = system_options.system(plan.cluster)
    with reading(graph) as (loaded, progress):
        # Who reads only the JSON is told whether it fits, and saves the time.
        found = prediction(
            loaded, plan, system, scenario, asked, training_options,
            trace_ranks=traced, propose=html is not None or not as_json, progress=progress,
        )  # fmt: skip
    print_notes(found.notes)
    record = found.to_json()
    if as_json:
        if asked.tensors:
            print_notes(["--tensors: has no effect on JSON, which lists them always"])
        print_json(record)
    else:
        if found.alarm:
            print_line(found.alarm, alarm=True)
        print_text(str(found))
    write_json(output, record, "result")
    write_trace(trace, found.result, traced)
    if html is not None:
        from echograph.workflow.report.prediction import prediction_page

        shown = prediction_page(
            found.result, found.job, plan, system, scenario, list(found.notes), list(found.near)
        )
        write_text(html, shown, PAGE)


def _run_jobs(
    graphs: Sequence[Path],
    plan: Plan,
    system_options: SystemOptions,
    placement: JobPlacement,
    others: Sequence[str],
    output: Path | None,
    as_json: bool,
) -> None:
    """Several jobs on one system, or one that waits for storage."""
    from echograph.ir import serde
    from echograph.workflow.jobs import simulate_jobs

    if others:
        names = ", ".join(map(option_name, others))
        raise UsageError(f"{names}: not of jobs that share a system: run each alone for that")
    check_outputs({f"graph {n}": path for n, path in enumerate(dict.fromkeys(graphs), 1)}, {"--output": output})
    stems = [path.stem for path in graphs]
    with show_progress(f"reading {graphs[0]}") as progress:
        loaded = [serde.load(path, progress) for path in graphs]
        progress("simulating")
        found = simulate_jobs(loaded, system_options.system(plan.cluster), placement, names=stems, plans=(plan,))
    record = found.to_json()
    if as_json:
        print_json(record)
    else:
        print_text(str(found))
    write_json(output, record, "result")


@app.command("plan")
@with_options
def plan_command(
    graph: GraphFile,
    plan: Annotated[dict[str, Any], Plan],
    system_options: SystemOptions,
    scenario: Scenario,
    training_options: TrainingOptions,
    where: WorkerOptions,
    asked: SearchOptions,
    write: Annotated[
        list[str] | None,
        typer.Option(help="Write the best as FORMAT:FILE: plan, megatron, deepspeed, torchtitan or accelerate."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the best as a plan file.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page of the best and why the rest lose: one file, which loads nothing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the best plans: of every way to spread the step that divides and fits in memory, the fastest."""
    from echograph.workflow.find import PlansFound, find_plans
    from echograph.workflow.search.writers import parse_target

    targets = [parse_target(text) for text in write or ()]
    files = {"--output": output, "--html": html, **{f"--write {name}": path for name, path in targets}}
    if (asked.moves or asked.compare_clusters) and (names := [name for name, path in files.items() if path]):
        other = "--moves" if asked.moves else "--compare-clusters"
        raise UsageError(f"{', '.join(names)}: {other} writes no plan or page: leave it out")
    check_outputs({"the graph": graph}, files)
    with reading(graph) as (loaded, progress):
        found = find_plans(
            loaded, plan, system_options, scenario, training_options, asked, where=where, progress=progress
        )  # fmt: skip
    print_json(found.to_json()) if as_json else print_text(str(found))
    if not isinstance(found, PlansFound):
        return
    print_notes(found.notes)
    _write_plans(found.found, output, targets)
    if html is not None:
        from echograph.workflow.report.search import search_page

        write_text(html, search_page(found.found), PAGE)
    if found.found.ended == "interrupt":
        raise KeyboardInterrupt


def _write_plans(found: SearchResult, output: Path | None, targets: Sequence[tuple[str, Path]]) -> None:
    """Writes the best plan as it is asked for."""
    from echograph.workflow.search.writers import written

    if not found.best or not (targets or output):
        return
    best, sizes = found.best[0].plan, found.sizes(found.best[0])
    texts = [(path, written(name, best, sizes)) for name, path in targets]
    write_text(output, written("plan", best, sizes)[0], "plan file")
    for path, (text, notes) in texts:
        print_notes(notes)
        write_text(path, text, "the best plan")


@app.command("sweep")
@with_options
def sweep_command(
    graph: GraphFile,
    plan: Plan,
    system_options: SystemOptions,
    scenario: Scenario,
    where: WorkerOptions,
    over: Annotated[
        list[str],
        typer.Option(
            help="What varies: gpus=8..1024:x2, cluster=dgx-h100,dgx-b200, cluster.network.nic_GBps=25,50."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Table to write, .csv or .parquet; what it has is kept.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page of curves: one file, which loads nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict every point of a grid: one row a point, kept as soon as it is finished."""
    from echograph.workflow.sweep import sweep
    from echograph.workflow.sweep.grid import parse_grid_axis
    from echograph.workflow.sweep.store import check_table, journal_of, write_table

    axes = [parse_grid_axis("--over", text) for text in over]
    check_outputs({"the graph": graph}, {"--output": output, "--html": html})
    if output is not None:
        check_table(output)
    with reading(graph) as (loaded, progress):
        found = sweep(
            loaded, axes, plan, system_options, scenario,
            journal_path=None if output is None else journal_of(output), where=where, progress=progress,
        )  # fmt: skip
    print_json(found.to_json()) if as_json else print_text(str(found))
    print_notes(found.notes)
    if output is not None:
        write_table(output, found.rows)
        print_error(f"wrote {output} ({len(found.rows)} points, {found.known} of them known before)")
    if html is not None:
        from echograph.workflow.report.sweep import sweep_page

        write_text(html, sweep_page(found), PAGE)
    if found.ended:
        raise KeyboardInterrupt
    found.require_answers()


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
    from echograph.workflow.replay import replayed_job

    check_outputs({"the job": job}, {"--output": output, "--trace": trace})
    scales = Scenario(scale=tuple(scale or ()), without=tuple(without or ())).scales
    system = None if cluster is None else System(cluster)
    with reading(job) as (loaded, progress):
        progress("replaying")
        found = replayed_job(loaded, system=system, gpus=gpus, scales=scales)
    record = found.to_json()
    print_json(record) if as_json else print_text(str(found))
    write_json(output, record, "result")
    write_trace(trace, found.result)


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
        write_text(html, page, PAGE)


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
@with_options
def validate_command(
    plan: Plan,
    system_options: SystemOptions,
    sizes: ModelSizes,
    table: Annotated[
        Path | None, typer.Argument(help="CSV table of measured steps (docs/accuracy/steps.md names its columns).")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Instead: profiler traces of a job, compared operator by operator."),
    ] = None,
    model: Annotated[str, MODEL_OF_TRACE] = "",
    dtype: Annotated[str, typer.Option(help="With --trace: of the step [default: the gradients'].")] = "",
    optimizer: Annotated[str, typer.Option(help="With --trace: adamw, adam or sgd [default: the trace's].")] = "",
    family: Annotated[list[str] | None, typer.Option(help="Only rows of this family; may be repeated.")] = None,
    grade: Annotated[str, typer.Option(help="Only rows of these grades.")] = "A,B",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    peers: Annotated[Path | None, typer.Option(help="CSV table of other tools' errors: tool, id, err.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict measured steps and say how far off: those of a table, or the one that a profiler's trace shows."""
    if (table is None) == (trace is None):
        raise UsageError("give a table of measured steps, or --trace FOLDER with the traces of a job")
    require_torch()
    if trace is not None:
        from echograph.workflow.analyze import read_folder
        from echograph.workflow.validation.traced import validate_trace

        of_table = {"family": family, "grade": grade != "A,B", "jobs": jobs != 1, "peers": peers}
        if others := [option_name(name) for name, value in of_table.items() if value]:
            raise UsageError(f"{', '.join(others)}: of a table of steps: leave that out with --trace")
        check_outputs({"the trace": trace}, {"--output": output})
        spec = {name: value for name, value in (("dtype", dtype), ("optimizer", optimizer)) if value}
        with show_progress("reading") as progress:
            found: Any = validate_trace(
                read_folder(trace, progress=progress), model=model, plan=plan, sizes=sizes, spec=spec,
                system_options=system_options, source=trace.resolve().name, progress=progress,
            )  # fmt: skip
    elif table is not None:
        from echograph.workflow.validation.validate import validate

        check_outputs({"the table": table}, {"--output": output})
        asked = {"model": model, "dtype": dtype, "optimizer": optimizer}
        words = [*(n for n, value in asked.items() if value), *given(plan), *given(system_options), *given(sizes)]
        if words:
            raise UsageError(f"{', '.join(map(option_name, words))}: only with --trace: a table's rows say it")
        grades = tuple(grade.split(","))
        with show_progress("compiling") as progress:
            found = validate(
                table, families=family or (), grades=grades, peers=peers, jobs=jobs, progress=progress
            )
    print_json(found.to_json()) if as_json else print_text(str(found))
    write_json(output, found.to_json(), "validation")


@app.command("calibrate")
def calibrate_command(
    results: Annotated[list[Path], typer.Argument(help="What echosim validate -o wrote; one or several.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the widths, as the simulator's form.json.")
    ] = None,
    source: Annotated[str, typer.Option(help="Which steps these are, as it stands in that file.")] = "",
    date: Annotated[str, typer.Option(help="Date of the estimate, as it stands in that file.")] = "",
    as_json: Json = False,
) -> None:
    """Estimate how sure the model's form is, and what intervals hold of families left out of the estimate."""
    from echograph.workflow.calibration.form import calibrate

    check_outputs({f"result {n}": path for n, path in enumerate(results)}, {"--output": output})
    if (source or date) and output is None and not as_json:
        raise UsageError("--source, --date: stand in the file of the widths: give --output as well")
    found = calibrate(results, source=source, date=date)
    print_json(found.to_json()) if as_json else print_text(str(found))
    write_json(output, found.to_json()["form"], "widths")


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


def main() -> None:
    """The command line, in a process that goes on."""
    run(app, "echosim")


def process() -> None:
    """Entry point of the console script, which is all of its process."""
    end_with(app, "echosim")
