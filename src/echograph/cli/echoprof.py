"""`echoprof`: measure and analyse; fit device and fabric profiles from measurements."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echograph.cli import byteprofile
from echograph.cli.app import end_with, make_app, require_torch, run
from echograph.cli.comms import comms, record
from echograph.cli.options import MODEL, GraphFile, Json, with_options
from echograph.cli.output import (
    PAGE,
    check_outputs,
    print_error,
    print_json,
    print_line,
    print_notes,
    print_table,
    print_tables,
    print_text,
    reading,
    show_progress,
    write_text,
)
from echograph.errors import UsageError
from echograph.frontend.pytorch.spec import ModelSizes
from echograph.ir.files import check_writable, write_whole
from echograph.options import parse_ranks
from echograph.progress import silent
from echograph.units import format_bytes, format_time
from echograph.workflow.measure import MeasuringOptions
from echograph.workflow.plan import Plan, read_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echograph.profiler.analyses.table import AnswerTable
    from echograph.profiler.measure.ops import OpTiming
    from echograph.profiler.traces import TraceSet

app = make_app("echoprof", "Measure and analyse; fit device and fabric profiles from measurements.")
PICTURES = ("dot", "gml", "graphml", "json", "svg")
_LONGEST = 12


@app.command("analyze")
def analyze_command(
    traces: Annotated[Path, typer.Argument(help="Folder with one profiler trace a rank, or one trace.")],
    name: Annotated[
        str, typer.Argument(help="Which analysis (a wrong name lists them); without one, an overview.")
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, an option of the analysis (may be given again).")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="Only these ranks, for instance 0,1 or 0-7.")] = None,
    last_step: Annotated[
        bool, typer.Option("--last-step", help="Keep the last profiler step, which is often cut off.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes that read; 0 takes one a core.")] = 0,
    engine: Annotated[
        str, typer.Option(help="What reads: local (processes here), or ray (a Ray cluster, a task a rank).")
    ] = "local",
    cache: Annotated[bool, typer.Option(help="Keep what was read, so that a second look is quick.")] = True,
    against: Annotated[
        Path | None, typer.Option(help="Another run's traces: both side by side, what differs most first.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page that a browser shows: the whole picture, or one analysis with its plot."),
    ] = None,
    xlsx: Annotated[
        Path | None, typer.Option(help="Write a workbook: a sheet for every analysis, or for the one named.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Json = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the CSV or JSON there; of counters, the trace with them."),
    ] = None,
) -> None:
    """Answer a question about measured traces: where the time goes, what waits, what is launched."""
    from echograph.profiler.analyses import ANALYSES, COPIES
    from echograph.profiler.analyses.workbook import check_workbook, write_workbook
    from echograph.workflow.analyze import (
        analysis_page,
        answers,
        every_answer,
        parse_options,
        read_folder,
        write_copy,
    )

    _check_analysis(name, option or (), html=html, xlsx=xlsx, as_csv=as_csv, as_json=as_json, output=output)
    if name:
        ANALYSES[name]

    def read(path: Path, wanted: list[int] | None = None) -> TraceSet:
        with show_progress(f"reading {path}") as progress:
            return read_folder(
                path, wanted, last_step=last_step, jobs=jobs, cache=cache, engine=engine, progress=progress
            )

    options = parse_options(name, option or (), read) if name else {}
    wanted = None if ranks is None else sorted(parse_ranks("--ranks", ranks))
    copy = output if name in COPIES and not (as_csv or as_json) else None
    if copy is not None and against is not None:
        raise UsageError(f"--against: not with a copy of the traces with their {name}: leave it out, or add --csv")
    for target in filter(None, (output, html)):
        check_writable(target)
    check_workbook(xlsx)
    found = read(traces, wanted)
    other = None if against is None else read(against, wanted)
    if html is not None:
        with show_progress("analysing") as progress:
            beside = None if against is None or other is None else (against.resolve().name, other)
            page = analysis_page(found, traces.resolve().name, name, options, beside, progress)
        write_text(html, page, PAGE)
        return
    if xlsx is not None:
        with show_progress("analysing") as progress:
            write_workbook(
                xlsx, answers(found, name, options, other) if name else every_answer(found, other, progress)
            )
        print_error(f"wrote {xlsx} (workbook)")
        return
    if copy is not None:
        print_notes(found.notes)
        write_copy(found, name, copy, options)
        return
    _print_answers(answers(found, name, options, other), name, as_csv=as_csv, as_json=as_json, output=output)


def _check_analysis(
    name: str,
    option: Sequence[str],
    *,
    html: Path | None,
    xlsx: Path | None,
    as_csv: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Refuses options of `analyze` that do not go together."""
    if as_csv and as_json:
        raise UsageError("--csv and --json: give one of them")
    if html and (as_csv or as_json or output or xlsx):
        raise UsageError("--html: a page is written alone; leave out --xlsx, --csv, --json and --output")
    if xlsx and (as_csv or as_json or output):
        raise UsageError("--xlsx: a workbook is written alone; leave out --csv, --json and --output")
    if (as_csv or output) and not name and not as_json:
        raise UsageError("the overview is several tables: name one analysis, or ask for --json")
    if option and not name:
        raise UsageError("--option: name the analysis that it is for")


def _print_answers(
    tables: dict[str, AnswerTable], name: str, *, as_csv: bool, as_json: bool, output: Path | None
) -> None:
    print_notes(dict.fromkeys(note for table in tables.values() for note in table.notes))
    if not (as_csv or as_json or output):
        print_tables(tables)
        return
    answer: Any = [{"analysis": n, "rows": t.records(), "notes": list(t.notes)} for n, t in tables.items()]
    document = json.dumps(answer[0] if name else answer, indent=2, allow_nan=False) + "\n"
    text = tables[name].csv() if as_csv else document
    print_text(text) if output is None else write_whole(output, [text])


@app.command("graph")
def graph_command(
    graph: GraphFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The picture or file; its ending says which format.")
    ] = Path("graph.svg"),
    as_json: Json = False,
) -> None:
    """Draw a graph, or write it as GML or JSON: the format is the ending of --output."""
    from echograph.workflow.formats import export

    to = output.suffix.removeprefix(".").lower()
    if to not in PICTURES:
        raise UsageError(f"--output {output.name}: the ending is the format: give one of .{', .'.join(PICTURES)}")
    check_outputs({"the graph": graph}, {"--output": output})
    with reading(graph) as (loaded, progress):
        progress(f"drawing {output}")
        done = export(loaded, to, output)
    if as_json:
        print_json({"output": str(output), "format": to, **asdict(done)})
        return
    print_line(f"{output}: {to}, {format_bytes(done.bytes)}")
    print_notes(done.notes)


@app.command("ops")
@with_options
def ops_command(
    model: Annotated[str, MODEL],
    sizes: Annotated[dict[str, Any], ModelSizes],
    measuring: MeasuringOptions,
    name: Annotated[
        str, typer.Option(help="Device name for the durations [default: the hardware's]", show_default=False)
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Samples of an operation at most.")] = 200,
    budget: Annotated[float, typer.Option(min=0, help="Seconds for all operations.")] = 300.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")] = Path("profile.pb"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the profile at --output.")] = False,
    graph: Annotated[Path | None, typer.Option(help="Write the step's graph, too.")] = None,
    echo_json: Annotated[
        Path | None, typer.Option("--echo-json", help="Folder for JSON files in the layout of Echo's tracer.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure each distinct operation of a training step on the device at hand, and write a profile."""
    for path in filter(None, (output, graph)):
        check_writable(path)
    require_torch("measuring operations")
    from echograph.ir import serde
    from echograph.profiler.measure.ops import Options
    from echograph.workflow import measure

    here, spec = measuring.open()
    with show_progress("starting") as progress:
        captured = measure.capture_invocations(model, spec, here.cache_bytes, progress, **sizes)
        profile = measure.start_profile(here, output, name, resume, progress)
        options = Options(repeats=repeats, budget_s=budget)
        outcome = measure.measure_invocations(captured.invocations, here, profile, options, output, progress)
        if graph is not None:
            serde.save(captured.graph, graph)
    if echo_json is not None:
        from echograph.ir.exporters.echo import export_echo
        from echograph.ir.passes.annotate import join

        export_echo(join(captured.flat, outcome.profile)[0](captured.flat), echo_json)
    summary = measure.summarize_measured(captured, outcome, here)
    print_json({"output": str(output), **summary}) if as_json else _print_measured(summary, outcome)
    for text, why in outcome.refused:
        print_error(f"not measured: {text[:120]}: {why}")
    if outcome.left:
        print_error(f"{len(outcome.left)} operations are left, the time is up: --resume goes on")
    print_error(f"wrote {output} (profile of {outcome.profile.environment.device})")


def _print_measured(summary: dict[str, Any], outcome: OpTiming) -> None:
    counts = summary["operations"]
    print_line(f"{summary['hardware']} as '{summary['device']}', torch {summary['torch']}")
    print_line(
        f"{summary['distinct_invocations']} distinct invocations; operations of the step: "
        f"{counts['measured']} measured, {counts['free']} free, {counts['missing']} missing"
    )
    print_line(
        f"sum {format_time(summary['sum_s'] * 1e12)}; the host adds {format_time(summary['host_op_s'] * 1e12)} "
        f"an operation, {format_time(summary['host_view_s'] * 1e12)} a view"
    )
    if summary["utilisation"] is not None:
        print_line(f"the device was busy {summary['utilisation']:.0%} of the last second, says NVML")
    longest = sorted(outcome.profile.measurements, key=lambda m: -m.median_picoseconds * m.runs)
    print_table(
        ("operator", "invocations", "median us", "spread %", "samples", "memory", "invocation"),
        [
            (
                m.operator,
                str(m.runs),
                round(m.median_picoseconds * 1e-6, 2),
                round(m.spread * 100, 2),
                str(m.samples),
                format_bytes(m.peak_bytes),
                m.arguments.partition("(")[2][:60],
            )
            for m in longest[:_LONGEST]
        ],
    )


@app.command("step")
@with_options
def step_command(
    model: Annotated[str, MODEL],
    sizes: Annotated[dict[str, Any], ModelSizes],
    measuring: MeasuringOptions,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 10,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 3,
    allocator: Annotated[
        str, typer.Option(help="Of the CPU: keep (freed memory stays, as on CUDA) or system.")
    ] = "keep",
    profile: Annotated[
        Path | None, typer.Option(help="Of echoprof ops: print the sum of its operations and a simulation, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time whole training steps end to end; beside a profile's sum of operations and its simulation."""
    if allocator not in ("keep", "system"):
        raise UsageError(f"--allocator {allocator}: give keep or system")
    require_torch("running a training step")
    from echograph.workflow.measure import time_step

    here, spec = measuring.open()
    with show_progress("starting") as progress:
        found = time_step(
            model, spec, here, steps=steps, warm_up=warm_up, keep=allocator == "keep", profile=profile,
            progress=progress, **sizes,
        )  # fmt: skip
    if as_json:
        print_json(found)
    else:
        print_line(
            f"measured   {format_time(found['step_s'] * 1e12):>10}  median of {found['steps']} steps, "
            f"mean {format_time(found['mean_s'] * 1e12)} +- {found['spread']:.1%}"
        )
        for part, title in (("sum", "operations"), ("simulated", "simulated")):
            if f"{part}_s" in found:
                time, error = found[f"{part}_s"], found[f"{part}_error"]
                print_line(f"{title:<10} {format_time(time * 1e12):>10}  {error:+.1%}")
    if found.get("missing"):
        print_notes([f"{found['missing']} operations of the step are not in {profile}"])


@app.command("collectives")
def collectives_command(
    sizes: Annotated[
        str, typer.Option(help="Range (1K:64M, each the double) or list (4K,1M) of bytes.")
    ] = "1K:64M",
    ops: Annotated[str, typer.Option(help="Operations, with commas.")] = "all_reduce,all_gather,reduce_scatter",
    backend: Annotated[str, typer.Option(help="gloo or nccl; by default nccl where there is CUDA.")] = "",
    budget: Annotated[float, typer.Option(help="Seconds that each size is repeated.")] = 0.5,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for one log an operation.")] = None,
    as_json: Json = False,
) -> None:
    """Under torchrun: time collectives and write tables like nccl-tests', for `echoprof fit --nccl-tests`."""
    require_torch("measuring collectives")
    from echograph.profiler.measure.collectives import parse_operations, parse_sizes
    from echograph.workflow.measure import measure_collectives

    wanted, steps = parse_operations(ops), parse_sizes(sizes)
    found = measure_collectives(wanted, steps, backend, budget, silent if as_json else print_text, output)
    if found is None:
        return
    if output is not None:
        print_error(f"wrote {output}: echoprof fit --nccl-tests {output / wanted[0]}.log --cluster ...")
    if as_json:
        print_json(found)


for _name, _command in byteprofile.COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(comms, name="comms")
app.add_typer(record, name="record")

Names = Annotated[list[str] | None, typer.Option(help="Only this one (may be given again).")]


@app.command("fit")
def fit_command(
    kernels: Annotated[
        list[Path] | None,
        typer.Option(help="Table of measured kernels (CSV, may be gzipped; may be given again)."),
    ] = None,
    collectives: Annotated[Path | None, typer.Option(help="Table of measured collectives (CSV).")] = None,
    nccl_tests: Annotated[
        list[Path] | None, typer.Option(help="Output of an nccl-tests program (may be given again).")
    ] = None,
    cluster: Annotated[str, typer.Option(help="What those logs ran on: a preset or a TOML file.")] = "",
    collective: Annotated[str, typer.Option(help="What they ran, where they do not say.")] = "",
    name: Annotated[str, typer.Option(help="Name of the cluster that is written from them.")] = "ours",
    device: Names = None,
    base: Annotated[
        str | None, typer.Option(help="Fit your own table of one device anew on top of this shipped profile.")
    ] = None,
    fabric: Names = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the profiles.")] = Path("profiles"),
    date: Annotated[str, typer.Option(help="Date of the fit, as it stands in the profiles.")] = "",
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Instead: traces of a job, whose kernels correct their device's profile."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="With --trace: the model, if it does not show.")
    ] = "",
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="With --trace: TOML file of the plan, if it does not show."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn measurement tables into device and fabric profiles; say how far they are off on rows held out."""
    from echograph.workflow.calibration.profiles import fit

    with show_progress("reading the tables") as progress:
        found = fit(
            output, kernels=kernels, collectives=collectives, nccl_tests=nccl_tests or (), cluster=cluster,
            collective=collective, name=name, devices=device or (), base=base, fabrics=fabric or (), date=date,
            trace=trace, model=model, plan=None if plan is None else Plan(**read_plan(plan)), progress=progress,
        )  # fmt: skip
    for note in found.notes:
        print_error(note)
    if nccl_tests:
        print_error(f"wrote {output / name}.toml: echosim run GRAPH --cluster {output / name}.toml")
    print_json(found.records()) if as_json else print_table(list(found.columns), found.rows())


def main() -> None:
    """The command line, in a process that goes on."""
    run(app, "echoprof")


def process() -> None:
    """Entry point of the console script, which is all of its process."""
    end_with(app, "echoprof")
