"""Fits the fabrics of a user's cluster to logs of nccl-tests, and writes a cluster that has them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echograph.errors import UsageError
from echograph.ir.files import write_whole
from echograph.profiler.fit.fabric import CollectiveRow, FabricFit, error_by_kind, fit_fabric, size_fold
from echograph.simulator.clusters import Cluster
from echograph.simulator.clusters.cluster import PRESETS, load_cluster
from echograph.simulator.clusters.fabric import over_link, read_fabric_document
from echograph.simulator.collectives.calibrate import LIMITS, Calibration, place_measured

FOLDS = 4
MIN_ROWS = 8


def fit_logs(
    rows: Sequence[CollectiveRow], cluster: str, name: str, output: Path, date: str
) -> list[dict[str, Any]]:
    """Writes `name.toml` and the fabrics that rows speak of, beside it.

    Links inside a domain are fitted first, to the rows of one domain; then what joins domains, to the others.

    Args:
        rows: measured collectives.
        cluster: what they ran on: a preset, or the path of a TOML file.
        name: name of the new cluster.
        output: folder.
        date: date of the fit, as it stands in the profiles.

    Returns:
        A record for each kind of collective of a fabric: rows, and the error on sizes that its fit has not seen.

    Raises:
        UsageError: too few rows to fit anything to, or a cluster file that does not name its fabrics on lines of
            their own.
        DataError: a row does not fit the cluster.
    """
    where, records = load_cluster(cluster), []
    path = Path(cluster) if cluster.endswith(".toml") else PRESETS / f"{cluster}.toml"
    text = path.read_text(encoding="utf-8")
    rows = [row for row in rows if row.ranks > 1]
    inside = [place_measured(row.ranks, row.nodes, where).domains == 1 for row in rows]
    for table in ("node", "network"):
        mine = [row for row, within in zip(rows, inside, strict=True) if within == (table == "node")]
        if len(mine) < MIN_ROWS:
            text = _point_at(text, table, path.parent)
            continue
        start = read_fabric_document(_shipped_or_beside(text, table, path.parent))
        if table == "node":
            # The rows are of this cluster's links, so that is what the new fabric says of its bandwidths.
            start = dict(over_link(start, where.node_fabric.link, f"{name}-node"))
            start |= {} if where.node_fabric.nvls else {"nvls": None}
        document, error = _fitted(mine, where, f"{name}-{table}", start, date)
        write_whole(output / f"{name}-{table}.json", [json.dumps(document, indent=2) + "\n"])
        text = _with_fabric(text, table, f"{name}-{table}.json")
        records += [
            {"profile": f"{name}-{table}", "what": kind, "rows held out": document["about"]["held_out_rows"],
             "median error": None, "mean error": round(value, 4), "bias": None}
            for kind, value in error.items()
        ]  # fmt: skip
        write_whole(output / f"{name}.toml", [text])
        where = load_cluster(output / f"{name}.toml")
    if not records:
        raise UsageError(f"--nccl-tests: {len(rows)} rows; a fit takes {MIN_ROWS} inside a node or between nodes")
    write_whole(output / f"{name}.toml", [text])
    return records


def _fitted(
    rows: list[CollectiveRow], cluster: Cluster, name: str, start: dict[str, Any], date: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """The fabric's file, fitted on all rows, and its errors on rows whose size another fit had not seen."""

    def fit(seen: list[CollectiveRow]) -> tuple[Calibration, FabricFit]:
        calibration = Calibration(cluster, name, start, seen)
        return calibration, fit_fabric(seen, calibration.predict, calibration.start(), upper=LIMITS)

    judged: list[CollectiveRow] = []
    seconds: list[np.ndarray] = []
    for fold in range(FOLDS):
        seen = [row for row in rows if size_fold(row, FOLDS) != fold]
        test = [row for row in rows if size_fold(row, FOLDS) == fold]
        if seen and test:
            judged += test
            parameters = fit(seen)[1].parameters
            seconds.append(Calibration(cluster, name, start, test).predict(parameters))
    error = error_by_kind(judged, np.concatenate(seconds)) if judged else {}
    calibration, made = fit(rows)
    document = calibration.document({key: float(f"{value:.4g}") for key, value in made.parameters.items()})
    ranks = sorted({row.ranks for row in rows})
    document["about"] |= {
        "origin": "fitted",
        "source": f"nccl-tests on {ranks[0]} to {ranks[-1]} {rows[0].gpu or 'GPUs'}, NCCL {rows[0].nccl or '?'}",
        "date": date,
        "rows": len(rows),
        "held_out_rows": len(judged),
        "held_out_error": {kind: round(value, 4) for kind, value in error.items()},
        "note": f"no row speaks of: {', '.join(made.undetermined) or 'nothing'}",
    }
    return document, error


def _section(text: str, table: str) -> re.Match[str]:
    found = re.search(rf"^\[{table}\][ \t]*(#.*)?$.*?(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    return _written_plainly(found, f"[{table}]")


def _named(text: str, table: str) -> str:
    found = re.search(r"""^fabric\s*=\s*["']([^"']*)["']""", _section(text, table)[0], re.MULTILINE)
    return _written_plainly(found, f"fabric of [{table}]")[1]


def _written_plainly(found: re.Match[str] | None, what: str) -> re.Match[str]:
    if found is None:
        raise UsageError(
            f"--cluster: its file writes {what} in a way that cannot be changed: give it lines of its own"
        )
    return found


def _shipped_or_beside(text: str, table: str, folder: Path) -> str | Path:
    name = _named(text, table)
    return folder / name if name.endswith(".json") else name


def _point_at(text: str, table: str, folder: Path) -> str:
    """The file with a fabric of its own folder named from wherever it lies."""
    where = _shipped_or_beside(text, table, folder)
    return _with_fabric(text, table, str(where.resolve())) if isinstance(where, Path) else text


def _with_fabric(text: str, table: str, fabric: str) -> str:
    section = _section(text, table)
    changed = re.sub(r"^fabric\s*=.*$", lambda _: f'fabric = "{fabric}"', section[0], count=1, flags=re.MULTILINE)
    return text[: section.start()] + changed + text[section.end() :]
