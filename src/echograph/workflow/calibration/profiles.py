"""Device and fabric profiles from tables of measurements, with how far they are off on rows held out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import DataError, UnavailableError, UnknownNameError, UsageError
from echograph.options import option_name
from echograph.progress import Progress, silent
from echograph.workflow.plan import Plan

if TYPE_CHECKING:
    from echograph.profiler.analyses.table import AnswerTable
    from echograph.profiler.costs.device import DeviceProfile


TITLES = ("profile", "what", "rows held out", "median error", "mean error", "bias")


def fit(
    output: str | Path,
    *,
    kernels: str | Path | Sequence[str | Path] | None = None,
    collectives: str | Path | None = None,
    nccl_tests: Sequence[str | Path] = (),
    cluster: str = "",
    collective: str = "",
    name: str = "ours",
    devices: Sequence[str] = (),
    base: str | None = None,
    fabrics: Sequence[str] = (),
    date: str = "",
    trace: str | Path | None = None,
    model: str = "",
    plan: Plan | None = None,
    progress: Progress = silent,
) -> AnswerTable:
    """Turns tables of measurements into profiles of devices and fabrics, which predictions then rest on.

    Args:
        output: folder for the profiles; it is written whole or not at all.
        kernels: a table of measured kernels (CSV, may be gzipped), or several.
        collectives: a table of measured collectives (CSV).
        nccl_tests: what programs of nccl-tests printed; a cluster is written from them.
        cluster: what those ran on: a preset or a TOML file.
        collective: what they ran, where they do not say.
        name: name of the cluster that is written.
        devices: only these of the table; none: all.
        base: fit the table of one device anew on top of this shipped profile.
        fabrics: only these of the table; none: all.
        date: date of the fit, as it stands in the profiles.
        trace: instead of all these, profiler traces of a job, whose kernels correct the profile of their device.
        model: the model that was traced, where the trace does not show it.
        plan: what the trace does not show of how it was spread.
        progress: told what goes on.

    Returns:
        How far each fit is off on rows that it has not seen; relative errors.

    Raises:
        UsageError: nothing to fit, too few rows, or an option of tables that are not given.
        UnknownNameError: a device, fabric or collective that there is not.
        InputError: a table cannot be read.
        DataError: it breaks a rule, or holds no row that fits.
        OutputError: the folder cannot be written.
    """
    given = {
        "kernels": kernels, "device": devices, "base": base, "collectives": collectives, "fabric": fabrics,
        "nccl_tests": nccl_tests, "cluster": cluster, "collective": collective, "name": name != "ours",
        "date": date, "trace": trace, "model": model, "plan": plan,
    }  # fmt: skip
    _check_fit({option for option, value in given.items() if value})
    if trace is not None:
        return _fit_the_trace(Path(trace), Path(output), model, plan, progress)
    if not name or name.startswith(".") or Path(name).name != name:
        raise UsageError(f"--name {name[:40]}: names a cluster and its files: give a word without slashes")
    tables = [Path(kernels)] if isinstance(kernels, str | Path) else [Path(table) for table in kernels or ()]
    from echograph.ir.files import whole_folder
    from echograph.profiler.analyses.table import from_rows

    records: list[dict[str, object]] = []
    skipped: list[str] = []
    with whole_folder(Path(output)) as folder:
        if tables and base is not None:
            records += refit_device(tables, base, folder, date, progress)
        elif tables:
            records += fit_devices(tables, list(devices), folder, date, progress)
        if collectives is not None:
            found, skipped = fit_the_fabrics(Path(collectives), list(fabrics), folder, date, progress)
            records += found
        if nccl_tests:
            logs = [Path(log) for log in nccl_tests]
            records += fit_the_logs(logs, cluster, collective, name, folder, date, progress)
    notes = (f"{without}: the table has no rows for it, skipped" for without in skipped)
    return from_rows(TITLES, [[record[title] for title in TITLES] for record in records], notes)


_OF_SOURCE = {
    "kernels": {"device", "base", "date"},
    "collectives": {"fabric", "date"},
    "nccl_tests": {"cluster", "collective", "name", "date"},
    "trace": {"model", "plan"},
}
"""What is fitted, and what may be said of it."""


def _check_fit(given: set[str]) -> None:
    """Refuses options that do not go together, and those that would change nothing."""
    sources = given & _OF_SOURCE.keys()
    if not sources:
        raise UsageError(
            "nothing to fit: give --kernels TABLE, --collectives TABLE, --nccl-tests LOG or --trace DIR"
        )
    if "trace" in sources and len(sources) > 1:
        raise UsageError("--trace: a profile is corrected by one trace alone: leave the tables out")
    for name in sorted((given - sources).difference(*(_OF_SOURCE[source] for source in sources))):
        of = " or ".join(option_name(source) for source, words in _OF_SOURCE.items() if name in words)
        raise UsageError(f"{option_name(name)}: is of {of}: give that, or leave it out")
    if {"base", "device"} <= given:
        raise UsageError("--device: not with --base, which names the one that is fitted: leave it out")


def _fit_the_trace(trace: Path, output: Path, model: str, plan: Plan | None, progress: Progress) -> AnswerTable:
    from echograph.ir.files import whole_folder
    from echograph.profiler.analyses.table import from_rows
    from echograph.workflow.analyze import read_folder
    from echograph.workflow.calibration.traced import TITLES as OF_TRACE
    from echograph.workflow.calibration.traced import fit_trace

    name = trace.resolve().name
    with whole_folder(output) as folder:
        records = fit_trace(
            read_folder(trace, progress=progress), folder, model=model, plan=plan, source=name, progress=progress
        )
    return from_rows(OF_TRACE, [[record[title] for title in OF_TRACE] for record in records])


def fit_devices(
    tables: Sequence[Path], names: list[str], output: Path, date: str, progress: Progress = silent
) -> list[dict[str, object]]:
    """Fits the named devices, or all of the datasheets; one record for each kind that was held out."""
    from echograph.profiler.costs import load_device
    from echograph.profiler.fit.device import fit_device, write_profile
    from echograph.profiler.fit.facts import read_facts
    from echograph.profiler.fit.table import read_tables

    facts = read_facts()
    for name in names:
        if name not in facts:
            raise UnknownNameError("device", name, facts)
    done: dict[str, DeviceProfile] = {}
    progress(f"reading {', '.join(map(str, tables))}")
    measured = read_tables(tables)
    # The file names a device after the relative that it borrows from, so relatives are fitted first.
    for name, device in facts.items():
        if not names or name in names:
            progress(f"fitting {name}")
            relative = done.get(device.relative) or (load_device(device.relative) if device.relative else None)
            done[name] = fit_device(measured, name, device, relative=relative, date=date)
            write_profile(done[name], output / f"{name}.json")
    return [record for profile in done.values() for record in _held_out(profile)]


def refit_device(
    tables: Sequence[Path], base: str, output: Path, date: str, progress: Progress = silent
) -> list[dict[str, object]]:
    """Fits what tables of one device measure; the rest stays as the shipped profile has it."""
    from echograph.profiler.costs import load_device
    from echograph.profiler.fit.device import refit, write_profile
    from echograph.profiler.fit.table import read_tables

    progress(f"fitting {', '.join(map(str, tables))}")
    profile = refit(read_tables(tables), load_device(base), [], date=date)
    write_profile(profile, output / f"{profile.name}.json")
    return list(_held_out(profile))


def _held_out(profile: DeviceProfile) -> Iterator[dict[str, object]]:
    labels = {f"gemm {n}": m.label for n, m in profile.gemm.items()}
    labels |= {f"attention {n}": m.forward.label for n, m in profile.attention.items()}
    labels |= {f"attention {n} backward": m.backward.label for n, m in profile.attention.items() if m.backward}
    labels |= {f"experts {n}": m.label for n, m in profile.grouped.products.items()}
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


def fit_the_fabrics(
    table: Path, names: list[str], output: Path, date: str, progress: Progress = silent
) -> tuple[list[dict[str, object]], list[str]]:
    """Fits the named fabrics, or all that have measured rows.

    Returns:
        A record for each kind of collective held out; and the fabrics of which the table has no row.
    """
    from echograph.ir.files import write_whole
    from echograph.profiler.fit.fabric import read_collectives_csv
    from echograph.simulator.clusters import fabric_names
    from echograph.workflow.calibration import fabrics
    from echograph.workflow.calibration.fabrics import RECIPES

    known = {recipe.fabric: recipe for recipe in RECIPES}
    for name in names:
        if name not in known:
            if name in fabric_names():
                raise UnavailableError(f"fabric '{name}' is assumed: no measured rows make it", sorted(known))
            raise UnknownNameError("fabric", name, known)
    records: list[dict[str, object]] = []
    fitted: list[str] = []
    skipped: list[str] = []
    progress(f"reading {table}")
    measured = read_collectives_csv(table)
    for name in names or known:
        recipe = known[name]
        rows = fabrics.rows_of(recipe, measured)
        if not rows:
            skipped.append(name)
            continue
        progress(f"fitting {name} to {len(rows)} rows")
        content, error = fabrics.fabric_document(recipe, fabrics.fit_recipe(recipe, rows), rows, date)
        write_whole(output / f"{name}.json", [json.dumps(content, indent=2) + "\n"])
        held = {"rows held out": content["about"]["held_out_rows"], "median error": None, "bias": None}
        records += [
            {"profile": name, "what": kind, **held, "mean error": round(value, 4)} for kind, value in error.items()
        ]
        fitted.append(name)
    if not fitted:
        raise DataError(
            f"{table}: no rows of {', '.join(names) or 'any fabric'}: nothing to fit (docs/accuracy/networks.md)"
        )
    return records, skipped


def fit_the_logs(
    logs: list[Path],
    cluster: str,
    collective: str,
    name: str,
    output: Path,
    date: str,
    progress: Progress = silent,
) -> list[dict[str, object]]:
    """Fits a cluster's fabrics to logs of nccl-tests; one record for each kind of collective held out."""
    from echograph.profiler.fit.fabric import KINDS, read_nccl_tests
    from echograph.workflow.calibration.fabrics import fit_logs

    if not cluster:
        raise UsageError("--nccl-tests: say what they ran on with --cluster (see echosim clusters)")
    if collective and collective not in KINDS:
        raise UnknownNameError("collective", collective, KINDS)
    kind: Any = collective or None
    progress(f"reading {len(logs)} logs")
    rows = [row for log in logs for row in read_nccl_tests(log, kind)]
    progress(f"fitting {len(rows)} rows")
    records = fit_logs(rows, cluster, name, output, date)
    return records
