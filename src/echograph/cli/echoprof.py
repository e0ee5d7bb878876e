"""`echoprof`: fit device and fabric profiles from measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echograph.cli.analyze import analyze
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
from echograph.errors import DataError, UnavailableError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from echograph.profiler.costs.device import DeviceProfile

app = make_app("echoprof", "Measure and analyse; fit device and fabric profiles from measurements.")
app.command("analyze")(analyze)
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


@app.command()
def fit(
    kernels: Annotated[Path | None, typer.Option(help="Table of measured kernels (CSV, may be gzipped).")] = None,
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
    if kernels is None and collectives is None and not nccl_tests:
        raise UsageError("nothing to fit: give --kernels TABLE, --collectives TABLE or --nccl-tests LOG")
    from echograph.ir.files import whole_folder

    rows: list[dict[str, object]] = []
    with whole_folder(output) as folder:
        if kernels is not None and base is not None:
            rows += refit_device(kernels, base, folder, date)
        elif kernels is not None:
            rows += fit_devices(kernels, device or [], folder, date)
        if collectives is not None:
            rows += fit_the_fabrics(collectives, fabric or [], folder, date)
        if nccl_tests:
            rows += fit_the_logs(nccl_tests, cluster, collective, name, folder, date)
    if nccl_tests:
        print_error(f"wrote {output / name}.toml: echosim run GRAPH --cluster {output / name}.toml")
    if as_json:
        print_json(rows)
    else:
        titles = ("profile", "what", "rows held out", "median error", "mean error", "bias")
        print_table(titles, [[row[title] for title in titles] for row in rows])


def fit_devices(table: Path, names: list[str], output: Path, date: str) -> list[dict[str, object]]:
    """Fits the named devices, or all of the datasheets; one record for each kind that was held out."""
    from echograph.profiler.costs import load_device
    from echograph.profiler.fit.device import fit_device, write_profile
    from echograph.profiler.fit.facts import read_facts
    from echograph.profiler.fit.table import read_table

    facts = read_facts()
    for name in names:
        if name not in facts:
            raise UnknownNameError("device", name, facts)
    done: dict[str, DeviceProfile] = {}
    with progress(f"reading {table}") as say:
        measured = read_table(table)
        # The file names a device after the relative that it borrows from, so relatives are fitted first.
        for name, device in facts.items():
            if not names or name in names:
                say(f"fitting {name}")
                relative = done.get(device.relative) or (load_device(device.relative) if device.relative else None)
                done[name] = fit_device(measured, name, device, relative=relative, date=date)
                write_profile(done[name], output / f"{name}.json")
    return [record for profile in done.values() for record in _held_out(profile)]


def refit_device(table: Path, base: str, output: Path, date: str) -> list[dict[str, object]]:
    """Fits what a table of one device measures; the rest stays as the shipped profile has it."""
    from echograph.profiler.costs import load_device
    from echograph.profiler.fit.device import refit, write_profile
    from echograph.profiler.fit.table import read_table

    with progress(f"fitting {table}"):
        profile = refit(read_table(table), load_device(base), [], date=date)
        write_profile(profile, output / f"{profile.name}.json")
    return list(_held_out(profile))


def _held_out(profile: DeviceProfile) -> Iterator[dict[str, object]]:
    labels = {f"gemm {n}": m.label for n, m in profile.gemm.items()}
    labels |= {f"attention {n}": m.forward.label for n, m in profile.attention.items()}
    labels |= {f"attention {n} backward": m.backward.label for n, m in profile.attention.items() if m.backward}
    labels |= {f"memory {n}": m.label for n, m in profile.memory.items()}
    for what, label in labels.items():
        error = label.held_out.long
        if error is not None and label.source == "fitted":
            yield {
                "profile": profile.name,
                "what": what,
                "rows held out": error.rows,
                "median error": round(error.median_abs, 4),
                "mean error": round(error.mean_abs, 4),
                "bias": round(error.bias, 4),
            }


def fit_the_fabrics(table: Path, names: list[str], output: Path, date: str) -> list[dict[str, object]]:
    """Fits the named fabrics, or all that have measured rows; one record for each kind of collective held out."""
    from echograph.cli import fit_fabrics
    from echograph.cli.fabric_recipes import RECIPES
    from echograph.ir.files import write_whole
    from echograph.profiler.fit.collectives import read_collectives_csv
    from echograph.simulator.clusters import fabric_names

    known = {recipe.fabric: recipe for recipe in RECIPES}
    for name in names:
        if name not in known:
            if name in fabric_names():
                raise UnavailableError(f"fabric '{name}' is assumed: no measured rows make it", sorted(known))
            raise UnknownNameError("fabric", name, known)
    records: list[dict[str, object]] = []
    fitted: list[str] = []
    skipped: list[str] = []
    with progress(f"reading {table}") as say:
        measured = read_collectives_csv(table)
        for name in names or known:
            recipe = known[name]
            rows = fit_fabrics.rows_of(recipe, measured)
            if not rows:
                skipped.append(name)
                continue
            say(f"fitting {name} to {len(rows)} rows")
            content, error = fit_fabrics.document(recipe, fit_fabrics.fit(recipe, rows), rows, date)
            write_whole(output / f"{name}.json", [json.dumps(content, indent=2) + "\n"])
            held = {"rows held out": content["about"]["held_out_rows"], "median error": None, "bias": None}
            records += [
                {"profile": name, "what": kind, **held, "mean error": round(value, 4)}
                for kind, value in error.items()
            ]
            fitted.append(name)
    if not fitted:
        raise DataError(
            f"{table}: no rows of {', '.join(names) or 'any fabric'}: nothing to fit (see docs/accuracy.md)"
        )
    for name in skipped:
        print_error(f"{name}: the table has no rows for it, skipped")
    return records


def fit_the_logs(
    logs: list[Path], cluster: str, collective: str, name: str, output: Path, date: str
) -> list[dict[str, object]]:
    """Fits a cluster's fabrics to logs of nccl-tests; one record for each kind of collective held out."""
    from echograph.cli.fit_logs import fit_logs
    from echograph.profiler.fit.collectives import KINDS, read_nccl_tests

    if not cluster:
        raise UsageError("--nccl-tests: say what they ran on with --cluster (see echosim clusters)")
    if collective and collective not in KINDS:
        raise UnknownNameError("collective", collective, KINDS)
    kind: Any = collective or None
    with progress(f"reading {len(logs)} logs") as say:
        rows = [row for log in logs for row in read_nccl_tests(log, kind)]
        say(f"fitting {len(rows)} rows")
        records = fit_logs(rows, cluster, name, output, date)
    return records


def main() -> None:
    """Entry point of the console script."""
    run(app, "echoprof")
