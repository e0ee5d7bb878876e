"""Fits the fabrics that ship: the profiler's fit of the simulator's formulas to a table of collectives."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from echograph.profiler.fit.fabric import CollectiveRow, FabricFit, error_by_kind, fit_fabric, size_fold
from echograph.simulator.clusters import Cluster, load_cluster, load_network_fabric, load_node_fabric
from echograph.simulator.clusters.fabric import FABRICS
from echograph.simulator.collectives.calibrate import LIMITS, Calibration
from echograph.workflow.calibration.recipes import FabricRecipe

ASSUMED_ERROR = 0.3
FOLDS = 4


def with_fabric(cluster: Cluster, fabric: str) -> Cluster:
    """The cluster with another shipped fabric in its place."""
    document = json.loads((FABRICS / f"{fabric}.json").read_text())
    if document["kind"] == "node":
        return replace(cluster, node_fabric=load_node_fabric(fabric))
    return replace(cluster, network=replace(cluster.network, fabric=load_network_fabric(fabric)))


def rows_of(recipe: FabricRecipe, rows: list[CollectiveRow]) -> list[CollectiveRow]:
    """The rows that make a fabric."""
    return [row for row in rows if recipe.rows(row)]


def fit(recipe: FabricRecipe, rows: list[CollectiveRow]) -> FabricFit:
    """Fits a recipe's fabric on given rows."""
    calibration = _calibration(recipe, rows)
    return fit_fabric(rows, calibration.predict, calibration.start(), upper=LIMITS)


def cross_validate(recipe: FabricRecipe, rows: list[CollectiveRow]) -> tuple[list[CollectiveRow], np.ndarray]:
    """Predicts every row that is judged by a fit that has not seen its size; rows and seconds."""
    judged: list[CollectiveRow] = []
    seconds: list[np.ndarray] = []
    for fold in range(FOLDS):
        test = [row for row in rows if size_fold(row, FOLDS) == fold and recipe.judged(row)]
        made = fit(recipe, [row for row in rows if size_fold(row, FOLDS) != fold])
        judged += test
        seconds.append(predict(recipe, made, test))
    return judged, np.concatenate(seconds)


def predict(recipe: FabricRecipe, made: FabricFit, rows: list[CollectiveRow]) -> np.ndarray:
    """Seconds of rows by a fit."""
    return _calibration(recipe, rows).predict(made.parameters)


def _calibration(recipe: FabricRecipe, rows: list[CollectiveRow]) -> Calibration:
    return Calibration(load_cluster(recipe.cluster), recipe.fabric, _start(recipe), rows, recipe.fixed)


def _start(recipe: FabricRecipe, date: str = "") -> dict[str, Any]:
    about = {"origin": recipe.origin, "source": recipe.source, "date": date, "assumed_error": ASSUMED_ERROR}
    return {"about": about, **recipe.start()}


def document(
    recipe: FabricRecipe, made: FabricFit, rows: list[CollectiveRow], date: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """The fabric's file, and the errors by collective on rows unseen by their fit."""
    judged, seconds = cross_validate(recipe, rows) if recipe.hold_out else ([], np.empty(0))
    error = error_by_kind(judged, seconds) if judged else {}
    about = {
        "rows": len(rows),
        "held_out_rows": len(judged),
        "held_out_error": {kind: round(value, 4) for kind, value in error.items()},
        "note": recipe.note,
    }
    rounded = {name: float(f"{value:.4g}") for name, value in made.parameters.items()}
    content = _calibration(recipe, rows).document(rounded)
    return content | {"about": content["about"] | about | {"date": date}}, error
