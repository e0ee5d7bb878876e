"""`echosim`: simulate workload graphs on clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import make_app, print_error, print_json, print_line, print_table, progress, run
from echograph.cli.options import parse_ranks, with_options
from echograph.cli.output import Json, Output, Trace, check_outputs, write_json, write_text, write_trace
from echograph.cli.replay import replay_command
from echograph.errors import UsageError
from echograph.workflow.plan import Plan
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import SystemOptions

app = make_app("echosim", "Simulate a workload graph on a cluster: step time, where it goes, how sure it is.")

MAX_TRACED = 64


@app.command("run")
@with_options
def run_command(
    graph: Annotated[Path, typer.Argument(help="A graph file written by echoc.")],
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
    trace: Trace = None,
    trace_ranks: Annotated[
        str | None, typer.Option(help="Ranks to trace, as 0,17 [default: each role]", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that shows why: one file, which loads nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the time of one training step, spread over the GPUs by a parallel plan."""
    from echograph.cli.report import print_result
    from echograph.ir import serde
    from echograph.ir.passes import PASSES
    from echograph.ir.passes.base import run as run_passes
    from echograph.workflow.plan import cluster_notes
    from echograph.workflow.predict import FEW, MOST_TRIED, feasible_plans, predict, refuse_if_it_does_not_fit

    if trace_ranks is not None and trace is None:
        raise UsageError("--trace-ranks: says whose timelines a trace holds, give --trace as well")
    traced = () if trace_ranks is None else parse_ranks("--trace-ranks", trace_ranks, MAX_TRACED)
    check_outputs({"the graph": graph}, {"--output": output, "--trace": trace, "--html": html})
    system = system_options.system(plan.cluster)
    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
        if model_communication:
            loaded = run_passes(loaded, (PASSES["forget_communication"](),))
        say("simulating")
        said: list[str] = []
        result, job = predict(loaded, plan, system, scenario, engine=engine, trace_ranks=traced, note=said.append)
        # Who reads only the JSON is told whether it fits, and saves the time.
        most = MOST_TRIED if strict_memory else FEW if html or not as_json else 0
        near = feasible_plans(loaded, plan, system.cluster, result.memory, say, most)
    said += cluster_notes(system.cluster, job.world_size)
    for note in said:
        print_error(f"note: {note}")
    if strict_memory:
        refuse_if_it_does_not_fit(result, near)
    record = result.to_json()
    if as_json:
        print_json(record)
    else:
        print_result(result, near)
    write_json(output, record, "result")
    write_trace(trace, result, traced)
    if html is not None:
        from echograph.workflow.report.prediction import page

        write_text(html, page(result, job, plan, system, scenario, said, near), "page: open it in a browser")


app.command("replay")(replay_command)


@app.command("compare")
def compare_command(
    before: Annotated[Path, typer.Argument(help="A result written by echosim run --output or --html.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    html: Annotated[Path | None, typer.Option(help="Write a page with both side by side.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two predictions figure by figure, and say which options of their plans differ."""
    from echograph.cli.compare import print_comparison
    from echograph.ir import files
    from echograph.workflow.compare import compare, read_result

    if html is not None:
        if html.resolve() in (before.resolve(), after.resolve()):
            raise UsageError(f"--html {html}: is one of the results to compare: give another file")
        files.check_writable(html)
    results = read_result(before), read_result(after)
    record = compare(*results)
    print_json(record) if as_json else print_comparison(record)
    if html is not None:
        from echograph.workflow.report.comparison import comparison_page

        page = comparison_page(record, *results, (before.stem, after.stem))
        write_text(html, page, "page: open it in a browser")


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
    from echograph.cli.app import require_torch
    from echograph.cli.validate import print_outcomes
    from echograph.workflow.validation.validate import validate

    check_outputs({"the table": table}, {"--output": output})
    require_torch()
    grades = tuple(grade.split(",")) if grade else ()
    with progress("compiling") as say:
        record = validate(table, families=family or (), grades=grades, peers=peers, jobs=jobs, say=say).to_json()
    if as_json:
        print_json(record)
    else:
        print_outcomes(record)
    write_json(output, record, "validation")


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
        return
    if len(rows) == 1:
        for key, value in rows[0].items():
            print_line(f"{key:<24} {value}")
        return
    print_table([key.replace("_", " ") for key in rows[0]], [list(row.values()) for row in rows])


def main() -> None:
    """Entry point of the console script."""
    run(app, "echosim")
