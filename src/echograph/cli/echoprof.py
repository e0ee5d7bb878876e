"""`echoprof`: fit device and fabric profiles from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.analyze import analyze_command
from echograph.cli.app import make_app, print_error, print_json, print_table, progress, run
from echograph.cli.byteprofile import compare3d_command, compare_command, mapping_command, stats_command
from echograph.cli.byteprofile_dag import dag_command
from echograph.cli.byteprofile_replay import critical_command, replay_command
from echograph.cli.byteprofile_traces import collect_command, combine_command
from echograph.cli.collectives import collectives_command
from echograph.cli.comms import comms
from echograph.cli.graph import graph_command
from echograph.cli.ops import ops_command
from echograph.cli.record import record
from echograph.cli.step import step_command

app = make_app("echoprof", "Measure and analyse; fit device and fabric profiles from measurements.")
app.command("analyze")(analyze_command)
app.command("graph")(graph_command)
app.command("ops")(ops_command)
app.command("step")(step_command)
app.command("collectives")(collectives_command)
app.command("stats")(stats_command)
app.command("combine")(combine_command)
app.command("compare")(compare_command)
app.command("critical")(critical_command)
app.command("replay")(replay_command)
app.command("collect")(collect_command)
app.command("compare3d")(compare3d_command)
app.command("mapping")(mapping_command)
app.command("dag")(dag_command)
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn measurement tables into device and fabric profiles; say how far they are off on rows held out."""
    from echograph.workflow.calibration.profiles import fit

    with progress("reading the tables") as say:
        found = fit(
            output, kernels=kernels, collectives=collectives, nccl_tests=nccl_tests or (), cluster=cluster,
            collective=collective, name=name, devices=device or (), base=base, fabrics=fabric or (), date=date,
            say=say,
        )  # fmt: skip
    for note in found.notes:
        print_error(note)
    if nccl_tests:
        print_error(f"wrote {output / name}.toml: echosim run GRAPH --cluster {output / name}.toml")
    if as_json:
        print_json(found.records())
    else:
        print_table(list(found.columns), found.rows())


def main() -> None:
    """Entry point of the console script."""
    run(app, "echoprof")
