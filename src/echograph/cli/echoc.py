"""`echoc`: compile models to workload graphs, and look at graphs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from echograph.cli.app import end_with, make_app, require_torch, run
from echograph.cli.options import MODEL, GraphFile, Json, with_options
from echograph.cli.output import (
    check_outputs,
    print_error,
    print_json,
    print_line,
    print_notes,
    print_table,
    print_text,
    print_warnings,
    print_written,
    reading,
    save_graph,
    show_progress,
)
from echograph.errors import UsageError
from echograph.frontend.pytorch.spec import ModelSizes, StepSpec
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.types import Phase
from echograph.options import option_name
from echograph.simulator.clusters import DEFAULT_CLUSTER
from echograph.units import format_bytes, format_count
from echograph.workflow.capture import CaptureOptions, capture_script_file
from echograph.workflow.formats import (
    EXPORTS,
    IMPORTS,
    check_export,
    check_import,
    export,
    import_graph,
    refuse_format,
)
from echograph.workflow.plan import Plan
from echograph.workflow.summary import outline, summarize, summarize_job
from echograph.workflow.system import System

app = make_app("echoc", "Compile a training step into a workload graph, without a GPU; look at graphs.")


@app.command("compile")
@with_options
def compile_command(
    *,
    model: Annotated[str | None, MODEL] = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", help="Or an ONNX file: its forward pass, --train for a step.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the graph goes.")] = Path("graph.pb"),
    sizes: Annotated[dict[str, Any], ModelSizes],
    step: Annotated[dict[str, Any], StepSpec],
    capture: Annotated[str, typer.Option(help="recorder, or aot (export and AOTAutograd).")] = "recorder",
    dim: Annotated[
        list[str] | None, typer.Option(help="ONNX: a dimension without a size, as batch=8 or x.0=8.")
    ] = None,
    branch: Annotated[str, typer.Option(help="ONNX: what an If on data takes: then or else.")] = "",
    train: Annotated[bool, typer.Option("--train", help="ONNX: add loss, backward and optimizer.")] = False,
    loss: Annotated[str, typer.Option(help="ONNX: auto, output, cross-entropy or sum.")] = "auto",
    as_json: Json = False,
) -> None:
    """Capture one training step of a model and write it as a workload graph."""
    from echograph.ir import files
    from echograph.workflow.compile import compile as compile_model
    from echograph.workflow.compile import compile_onnx_file

    if (model is None) == (onnx is None):
        raise UsageError("give what to compile: --model NAME or --onnx FILE, one of them")
    of_onnx = {"dim": dim, "branch": branch, "train": train, "loss": loss != "auto"}
    others = [*sizes, *["capture"] * (capture != "recorder")] if onnx else [n for n, v in of_onnx.items() if v]
    if others:
        which = "not for an ONNX file: leave it out" if onnx else "for an ONNX file: give it by --onnx"
        raise UsageError(f"{', '.join(map(option_name, others))}: {which}")
    files.check_writable(output)
    require_torch("compiling a model")
    note, notes = "", tuple[str, ...]()
    with show_progress("starting") as progress:
        if onnx is not None:
            graph, note, notes = compile_onnx_file(
                onnx, dims=dim or (), train=train, loss=loss, step=step, branch=branch, progress=progress
            )
        else:
            graph = compile_model(str(model), StepSpec(**step), **sizes, producer=capture, progress=progress)
        written = save_graph(graph, output, progress)
    summary = summarize(graph)
    if as_json:
        print_json(
            written | summary | ({"loss": note} if note else {}) | ({"notes": list(notes)} if notes else {})
        )
        return
    blocks = "".join(f", {b['instances']} x {b['name']}" for b in summary["blocks"][1:])
    print_line(
        f"{summary['model']}: {format_count(summary['parameters'])} parameters, {summary['dtype']}, "
        f"{_micro_batch(summary)} a micro-batch, {summary['optimizer'] or 'no optimizer'}"
    )
    print_line(
        f"{summary['unfolded_ops']} operations ({summary['ops']} stored{blocks}), "
        f"{format_count(sum(summary['flops'].values()), 'FLOP')} a step"
    )
    print_notes((*((f"trained on the {note}",) if note else ()), *notes))
    print_written(written)


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="One model: everything known of it.")] = None,
    as_json: Json = False,
) -> None:
    """List the model zoo with parameters and FLOPs."""
    from echograph.models import get_model, model_entries
    from echograph.workflow.summary import model_row

    rows = [model_row(entry) for entry in ([get_model(name)] if name else model_entries())]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("model", "family", "parameters", "sample", "FLOPs/sample forward", "backward", "also called"),
        [
            (
                row["name"],
                row["family"],
                _count(row["parameters"]),
                row["sample"],
                *(_count(row["flops_per_sample"][k]) for k in ("forward", "backward")),
                ", ".join(row["aliases"]),
            )
            for row in rows
        ],
    )


def _count(value: float | None) -> str | None:
    return None if value is None else format_count(value)


@app.command()
def show(graph: GraphFile, as_json: Json = False) -> None:
    """Say what a graph holds: blocks, operations, FLOPs, bytes, memory, what is measured; of a job, its roles."""
    with reading(graph) as (loaded, _):
        summary = summarize(loaded) | (summarize_job(loaded) if isinstance(loaded, JobGraph) else {})
    if as_json:
        print_json(summary)
        return
    _print_summary(summary)
    if isinstance(loaded, JobGraph):
        _print_roles(summary)


@app.command("annotate")
def annotate_command(
    graph: GraphFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where it goes; may be the graph itself.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Where it runs: a preset (see echosim clusters) or a TOML file "
            f"[default: {DEFAULT_CLUSTER}; with --profile none]",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Measured durations (of echoprof ops), which come before the cluster's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the durations of a cluster into a graph: its device's, its host's, and of a job its network's."""
    from echograph.ir import files
    from echograph.workflow.system import annotate, annotate_measured, duration_sources

    files.check_writable(output)
    system = System(cluster or DEFAULT_CLUSTER) if cluster is not None or profile is None else None
    with reading(graph) as (loaded, progress):
        progress("annotating")
        measured: dict[str, Any] = {}
        if profile is not None:
            loaded, measured = annotate_measured(loaded, profile, "" if system is None else system.cluster.device)
        annotated = loaded if system is None else annotate(loaded, system)
        written = save_graph(annotated, output, progress)
    parts = {} if system is None else duration_sources(annotated, system)
    if as_json:
        counts = {part: {"name": name, **count} for part, (name, count) in parts.items()}
        record = written | {"operations": len(annotated.ops), "durations": counts}
        print_json(record | ({"profile": measured} if measured else {}))
    else:
        if measured:
            _print_coverage(measured)
        for name, count in parts.values():
            shares = ", ".join(f"{number} {source}" for source, number in count.items())
            print_line(f"{name:<20} {shares or 'no operation'}")
    print_written(written)


def _print_coverage(record: dict[str, Any]) -> None:
    """One line on what is measured, and one each on what is missing and on what fits nothing."""
    counts = record["operations"]
    print_line(
        f"{record['device']}: {record['measured_share']:.1%} of the device operations that run are measured "
        f"({counts['measured']}), {counts['missing']} are missing, {counts['free']} views are free"
    )
    if "host" in record:
        print_line(f"{record['host']}: what the host takes to issue each, as measured")
    missing = [f"{count} x {name}" for name, count in record["missing_operators"].items()]
    unmatched = [text[:80] for text in record["unmatched"]]
    for what, named in (("missing", missing), (f"{len(unmatched)} measurements fit no operation", unmatched)):
        if named:
            more = f", and {len(named) - 5} more" if len(named) > 5 else ""
            print_error(f"{what}: {', '.join(named[:5])}{more}")


@app.command("capture")
@with_options
def capture_command(
    framework: Annotated[str, typer.Argument(help="torch, deepspeed or megatron.")],
    asked: CaptureOptions,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script finds behind its name; give it behind --.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the job goes.")] = Path("job.pb"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; the script prints on stderr.")] = False,
) -> None:
    """Run a training script as one rank of a job without GPUs, and write what all ranks do as a job graph."""
    from echograph.ir import files

    files.check_writable(output)
    require_torch("capturing scripts")
    captured = capture_script_file(
        framework, arguments or (), asked, showing=lambda: show_progress("starting"), quiet=as_json
    )
    with show_progress(f"writing {output}") as progress:
        written = save_graph(captured.graph, output, progress)
    print_notes(captured.notes)
    print_warnings(captured.warnings)
    assert isinstance(captured.graph, JobGraph)
    summary = summarize_job(captured.graph)
    said = {"notes": list(captured.notes), "warnings": list(captured.warnings)}
    print_json(written | said | summary) if as_json else _print_job(summary)
    print_written(written)


@app.command("export")
def export_command(
    graph: GraphFile,
    to: Annotated[str, typer.Option(help=f"{', '.join(sorted(EXPORTS))}.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file; for chakra the folder.")],
    cluster: Annotated[
        str | None,
        typer.Option(help="Where the job runs (chakra, chrome, simai) [default: dgx-h100]", show_default=False),
    ] = None,
    per_role: Annotated[
        bool, typer.Option("--per-role", help="One file a role instead of one a rank (chakra).")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the files (chakra).")] = None,
    as_json: Json = False,
) -> None:
    """Write a graph in another tool's format, and say what the format cannot hold."""
    check_export(to, {"cluster": cluster, "per_role": per_role, "name": name})
    if graph.resolve() == output.resolve():
        raise UsageError(f"--output {output}: is the graph itself: give the export a path of its own")
    with reading(graph) as (loaded, progress):
        progress(f"writing {output}")
        done = export(loaded, to, output, cluster=cluster, per_role=per_role, name=name, progress=progress)
    if as_json:
        print_json({"output": str(output), "format": to, **asdict(done)})
        return
    print_line(f"{output}: {to}, {done.files} file{'s' * (done.files != 1)}, {format_bytes(done.bytes)}")
    print_notes(done.notes)


@app.command("import")
def import_command(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help=f"{', '.join(sorted(IMPORTS))}.")],
    source: Annotated[Path, typer.Argument(help="The file; for chakra and kineto the folder of the ranks.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the graph goes.")],
    keep_overhead: Annotated[
        bool, typer.Option("--keep-overhead", help="kineto: durations as recorded, with what recording cost.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read what another tool wrote, and write it as a graph; say what a graph cannot hold of it."""
    check_import(format_name, {"keep_overhead": keep_overhead})
    check_outputs({"the source": source}, {"--output": output})
    with show_progress(f"reading {source}") as progress:
        imported = import_graph(format_name, source, keep_overhead=keep_overhead, progress=progress)
        written = save_graph(imported.graph, output, progress)
    summary = outline(imported.graph)
    print_notes(imported.notes)
    if as_json:
        print_json(written | summary | {"notes": list(imported.notes)})
    else:
        ranks = f" on {summary['ranks']} ranks" if summary["level"] == "job" else ""
        stored = "" if summary["operations"] == summary["ops"] else f" ({summary['ops']} stored)"
        print_line(f"{summary['name']}{ranks}: {summary['operations']} operations{stored}")
    print_written(written)


@app.command("lower")
@with_options
def lower_command(
    graph: GraphFile,
    plan: Plan,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the job goes.")] = Path("job.pb"),
    as_json: Json = False,
) -> None:
    """Spread a step over GPUs by a parallel plan and write what every rank executes as a job graph."""
    from echograph.workflow.plan import apply

    check_outputs({"the graph": graph}, {"--output": output})
    notes: list[str] = []
    with reading(graph) as (loaded, progress):
        progress("lowering")
        job = apply(loaded, plan, System(plan.cluster).cluster, notes.append)
        written = save_graph(job, output, progress)
    print_notes(notes)
    # A list of passes of the user's own may leave a step.
    summary, shown = (
        (summarize_job(job), _print_job) if isinstance(job, JobGraph) else (summarize(job), _print_summary)
    )
    print_json(written | summary) if as_json else shown(summary)
    print_written(written)


@app.command()
def check(
    graph: Annotated[Path, typer.Argument(help="A graph file written by echoc, or the folder of another format.")],
    what: Annotated[str, typer.Option("--as", help="graph; chakra: the traces that ASTRA-sim reads.")] = "graph",
    as_json: Json = False,
) -> None:
    """Read a graph and check every invariant; exit 1 if one does not hold."""
    from echograph.ir.verify import CHECKS

    if what not in ("graph", "chakra"):
        refuse_format(what, ("graph", "chakra"), "checked")
    if what == "chakra":
        check_chakra(graph, as_json=as_json)
        return
    with reading(graph) as (loaded, _):
        names = [c.__name__ for c in CHECKS]
    if as_json:
        print_json({"graph": str(graph), "valid": True, "checks": names})
    else:
        print_line(f"{graph}: valid ({len(loaded.ops)} operations, {len(names)} invariants)")


def check_chakra(source: Path, *, as_json: bool) -> None:
    """Prints what makes ASTRA-sim trip over a set of traces; exits with 1 where one finding is an error."""
    from echograph.ir.chakra.check import check as check_traces
    from echograph.ir.chakra.reader import read_traces

    with show_progress(f"reading {source}") as progress:
        traces = read_traces(source, progress)
        progress("checking")
        found = check_traces(traces)
    if as_json:
        print_json({"source": str(source), "valid": not found.errors, **asdict(found)})
    else:
        for finding in found.findings:
            print_line(str(finding))
        for name, count in found.counts.items():
            shown = sum(finding.check == name for finding in found.findings)
            if shown < count:
                print_line(f"{name}: {count - shown:,} more")
        verdict = f"{found.errors:,} errors" if found.errors else "valid"
        warnings = sum(found.counts.values()) - found.errors
        more = f", {warnings:,} warnings" if warnings else ""
        print_line(
            f"{source}: {verdict}{more} ({found.ranks} ranks, {found.nodes:,} nodes, {len(found.counts)} checks)"
        )
    if found.errors:
        raise typer.Exit(1)


@app.command()
def text(
    graph: GraphFile,
    unfold: Annotated[bool, typer.Option("--unfold", help="Write every block instance out.")] = False,
) -> None:
    """Print a graph as text."""
    from echograph.ir.text import to_text
    from echograph.ir.unfold import unfold as unfolded

    with reading(graph) as (loaded, progress):
        if unfold and isinstance(loaded, StepGraph):
            progress("unfolding")
            loaded = unfolded(loaded)
    for part in to_text(loaded):
        print_text(part.rstrip("\n"))


# -- what a graph holds, for people ------------------------------------------------------------------------------


def _micro_batch(summary: dict[str, Any]) -> str:
    tokens = f" x {summary['sequence_length']} tokens" if summary["sequence_length"] else ""
    return f"{summary['batch_size']} sample{'s' * (summary['batch_size'] != 1)}{tokens}"


def _mesh(summary: dict[str, Any]) -> str:
    return " x ".join(f"{name} {size}" for name, size in summary["mesh"].items())


def _print_summary(summary: dict[str, Any]) -> None:
    """A summary of `summarize`."""
    mesh = _mesh(summary)
    print_line(f"{summary['model']} ({summary['level']} graph{', ' + mesh if mesh else ''})")
    print_line(
        f"  {format_count(summary['parameters'])} parameters, {summary['dtype']}, "
        f"{summary['optimizer'] or 'no optimizer'}"
        f"{' with fp32 master weights' if summary['master_weights'] else ''}, "
        f"{_micro_batch(summary)} a micro-batch"
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
        shares = ", ".join(f"{v / count['of']:.1%} {k}" for k, v in count.items() if k != "of" and v)
        print_line(f"  durations on {device}: {shares}")
    if not summary["durations"]:
        print_line("  durations: none yet (echosim fits them to its cluster's device)")
    print_line("  operators with the most work")
    for row in summary["operators"][:12]:
        print_line(
            f"    {row['count']:>6} x {row['name']:<52} {format_count(row['flops'], 'FLOP'):>14} "
            f"{format_bytes(row['bytes']):>12}"
        )


def _print_job(summary: dict[str, Any]) -> None:
    """A summary of `summarize_job`."""
    mesh = _mesh(summary)
    print_line(f"{summary['model']} on {summary['ranks']} ranks{': mesh ' + mesh if mesh else ''}")
    _print_roles(summary)


def _print_roles(summary: dict[str, Any]) -> None:
    print_line()
    titles = ("ranks", "micro-batches", "FLOPs", "recomputed", "traffic", "parameters", "gradients", "optimizer")
    print_table(("role", *titles, "peak"), [_role_row(role) for role in summary["roles"]])
    if summary["communication"]:
        print_line()
        rows = [_communication_row(entry, len(summary["roles"])) for entry in summary["communication"]]
        print_table(("axes", "ranks", "what", "carries", "bytes each", "calls", "bytes a step", "roles"), rows)


def _role_row(role: dict[str, Any]) -> tuple[object, ...]:
    flops, needs = role["flops"], role["memory_bytes"] or {}
    own = sum(flops.get(p.name.lower(), 0) for p in (Phase.FORWARD, Phase.BACKWARD))
    memory = ("parameter", "gradient", "optimizer_state", "peak")
    return (
        *(role[k] for k in ("role", "ranks", "micro_batches")),
        *(format_count(count) for count in (own, flops.get("recompute", 0))),
        format_bytes(role["device_bytes"]),
        *(format_bytes(needs[k]) if k in needs else None for k in memory),
    )


def _communication_row(entry: dict[str, Any], roles: int) -> tuple[object, ...]:
    calls, names = entry["calls"].values(), list(entry["calls"])
    low, high = min(calls), max(calls)
    few = ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)})"
    return (
        entry["axes"],
        entry["group_size"],
        entry["kind"].replace("_", "-"),
        entry["payload"].replace("_", " "),
        format_bytes(entry["bytes_per_rank"]),
        f"{low}" if low == high else f"{low} to {high}",
        format_bytes(high * entry["bytes_per_rank"]),
        "all" if len(names) == roles else few,
    )


def main() -> None:
    """The command line, in a process that goes on."""
    run(app, "echoc")


def process() -> None:
    """Entry point of the console script, which is all of its process."""
    end_with(app, "echoc")
