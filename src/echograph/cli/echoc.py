"""`echoc`: compile models to workload graphs, and look at graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from echograph.cli.annotate import annotate_command
from echograph.cli.app import (
    make_app,
    print_error,
    print_json,
    print_line,
    print_table,
    print_text,
    progress,
    require_torch,
    run,
)
from echograph.cli.capture import capture_command
from echograph.cli.export import export_command
from echograph.cli.imports import import_command
from echograph.cli.options import with_options
from echograph.cli.output import Json, check_outputs
from echograph.cli.show import micro_batch, print_summary
from echograph.cli.show_job import print_job
from echograph.cli.step_options import Attention, BatchSize, SeqLen
from echograph.frontend.pytorch.spec import StepSpec
from echograph.units import format_bytes, format_count
from echograph.workflow.formats import refuse_format
from echograph.workflow.plan import Plan
from echograph.workflow.summary import summarize, summarize_job

app = make_app("echoc", "Compile a training step into a workload graph, without a GPU; look at graphs.")

GraphFile = Annotated[Path, typer.Argument(help="A graph file written by echoc.")]


@app.command("compile")
@with_options
def compile_command(
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Zoo name, Hugging Face config folder or JSON, or file.py:function."),
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", help="Or an ONNX file: its forward pass, --train for a step.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the graph goes.")] = Path("graph.pb"),
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    attention: Attention = None,
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
    from echograph.cli.compile_onnx import check_source
    from echograph.ir import files, serde
    from echograph.workflow.compile import compile as compile_model
    from echograph.workflow.compile import compile_onnx_file

    zoo = (batch_size, seq_len, attention, step.get("recompute"), None if capture == "recorder" else capture)
    check_source(
        model, onnx, zoo=zoo, own=(dim or None, branch or None, train or None, None if loss == "auto" else loss)
    )
    files.check_writable(output)
    require_torch("compiling a model")
    note = ""
    notes: tuple[str, ...] = ()
    with progress("starting") as say:
        if onnx is not None:
            graph, note, notes = compile_onnx_file(
                onnx, dims=dim or (), train=train, loss=loss, step=step, branch=branch, say=say
            )
        else:
            assert model is not None
            graph = compile_model(
                model, StepSpec(**step), batch_size=batch_size, seq_len=seq_len, attention=attention,
                producer=capture, say=say,
            )  # fmt: skip
        say(f"writing {output}")
        size = serde.save(graph, output, say)
    summary = summarize(graph)
    if as_json:
        said = ({"loss": note} if note else {}) | ({"notes": list(notes)} if notes else {})
        print_json({"output": str(output), "bytes": size, **summary} | said)
        return
    for line in _headline(summary):
        print_line(line)
    for text in (*((f"trained on the {note}",) if note else ()), *notes):
        print_error(f"note: {text}")
    print_error(f"wrote {output} ({format_bytes(size)})")


def _headline(summary: dict[str, Any]) -> list[str]:
    flops = sum(summary["flops"].values())
    blocks = "".join(f", {b['instances']} x {b['name']}" for b in summary["blocks"][1:])
    return [
        f"{summary['model']}: {format_count(summary['parameters'])} parameters, {summary['dtype']}, "
        f"{micro_batch(summary)} a micro-batch, {summary['optimizer'] or 'no optimizer'}",
        f"{summary['unfolded_ops']} operations ({summary['ops']} stored{blocks}), "
        f"{format_count(flops, 'FLOP')} a step",
    ]


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="One model: everything known of it.")] = None,
    as_json: Json = False,
) -> None:
    """List the model zoo with parameters and FLOPs."""
    from echograph.models import get_model, model_entries
    from echograph.workflow.summary import model_row

    entries = [get_model(name)] if name else list(model_entries())
    rows = [model_row(entry) for entry in entries]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("model", "family", "parameters", "sample", "FLOPs/sample forward", "backward", "also called"),
        (
            (
                row["name"],
                row["family"],
                _known_count(row["parameters"]),
                row["sample"],
                *(_known_count(row["flops_per_sample"][k]) for k in ("forward", "backward")),
                ", ".join(row["aliases"]),
            )
            for row in rows
        ),
    )


def _known_count(value: float | None) -> str | None:
    return None if value is None else format_count(value)


@app.command()
def show(graph: GraphFile, as_json: Json = False) -> None:
    """Say what a graph holds: blocks, operations, FLOPs, bytes, memory, what is measured; of a job, its roles."""
    from echograph.ir import serde
    from echograph.ir.graph import JobGraph

    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
    summary = summarize(loaded)
    if isinstance(loaded, JobGraph):
        summary |= summarize_job(loaded)
    if as_json:
        print_json(summary)
        return
    print_summary(summary)
    if isinstance(loaded, JobGraph):
        print_job(summary, headline=False)


app.command("annotate")(annotate_command)
app.command("capture")(capture_command)
app.command("export")(export_command)
app.command("import")(import_command)


@app.command("lower")
@with_options
def lower_command(
    graph: GraphFile,
    plan: Plan,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the job goes.")] = Path("job.pb"),
    as_json: Json = False,
) -> None:
    """Spread a step over GPUs by a parallel plan and write what every rank executes as a job graph."""
    from echograph.ir import serde
    from echograph.ir.graph import JobGraph
    from echograph.workflow.plan import apply
    from echograph.workflow.system import System

    check_outputs({"the graph": graph}, {"--output": output})
    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
        say("lowering")
        notes: list[str] = []
        job = apply(loaded, plan, System(plan.cluster).cluster, notes.append)
        say(f"writing {output}")
        size = serde.save(job, output, say)
    for note in notes:
        print_error(f"note: {note}")
    # A list of passes of the user's own may leave a step.
    summary = summarize_job(job) if isinstance(job, JobGraph) else summarize(job)
    if as_json:
        print_json({"output": str(output), "bytes": size, **summary})
    elif isinstance(job, JobGraph):
        print_job(summary)
    else:
        print_summary(summary)
    print_error(f"wrote {output} ({format_bytes(size)})")


@app.command()
def check(
    graph: Annotated[Path, typer.Argument(help="A graph file written by echoc, or the folder of another format.")],
    what: Annotated[str, typer.Option("--as", help="graph; chakra: the traces that ASTRA-sim reads.")] = "graph",
    as_json: Json = False,
) -> None:
    """Read a graph and check every invariant; exit 1 if one does not hold."""
    if what not in ("graph", "chakra"):
        refuse_format(what, ("graph", "chakra"), "checked")
    if what == "chakra":
        from echograph.cli.check_chakra import check_chakra

        check_chakra(graph, as_json=as_json)
        return
    from echograph.ir import serde
    from echograph.ir.verify import CHECKS

    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
    names = [c.__name__ for c in CHECKS]
    if as_json:
        print_json({"graph": str(graph), "valid": True, "checks": names})
    else:
        print_line(f"{graph}: valid ({len(loaded.ops)} operations, {len(names)} invariants)")


@app.command()
def text(
    graph: GraphFile,
    unfold: Annotated[bool, typer.Option("--unfold", help="Write every block instance out.")] = False,
) -> None:
    """Print a graph as text."""
    from echograph.ir import serde
    from echograph.ir.graph import StepGraph
    from echograph.ir.text import to_text
    from echograph.ir.unfold import unfold as unfolded

    with progress(f"reading {graph}") as say:
        loaded = serde.load(graph, say)
        if unfold and isinstance(loaded, StepGraph):
            say("unfolding")
            loaded = unfolded(loaded)
    for piece in to_text(loaded):
        print_text(piece.rstrip("\n"))


def main() -> None:
    """Entry point of the console script."""
    run(app, "echoc")
