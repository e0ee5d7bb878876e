from __future__ import annotations

from typing import Any

import pytest

from echograph.errors import DataError
from echograph.profiler.fit.fabric import CollectiveRow, fit_fabric
from echograph.simulator.clusters import load_cluster
from echograph.simulator.clusters.fabric import read_fabric_document
from echograph.simulator.collectives import collective_time
from echograph.simulator.collectives.calibrate import HELD, LIMITS, Calibration, place_measured


def rows(fabric: str, ranks: tuple[int, ...], scale: float = 1.0) -> list[CollectiveRow]:
    """What the cluster of a preset would measure."""
    cluster = load_cluster(fabric)
    return [
        CollectiveRow(
            kind="all_reduce",
            ranks=n,
            nodes=max(1, n // 8),
            size_bytes=2**power,
            seconds=scale * collective_time("all_reduce", 2**power, cluster.place(range(n)), cluster).seconds,
        )
        for n in ranks
        for power in range(10, 31)
    ]


@pytest.mark.parametrize(("name", "ranks"), [("nvlink3", (2, 4, 8)), ("hdr200", (16, 32, 64))])
def test_a_fit_finds_a_machine_that_is_half_as_fast(name: str, ranks: tuple[int, ...]) -> None:
    cluster = load_cluster("azure-nd-a100-v4")
    measured = rows("azure-nd-a100-v4", ranks, scale=2.0)
    calibration = Calibration(cluster, "mine", read_fabric_document(name), measured, fixed=("peer",))
    fit = fit_fabric(measured, calibration.predict, calibration.start(), upper=LIMITS)
    assert fit.error["all_reduce"] < 0.05
    assert not set(fit.parameters) & set(HELD[calibration.document({})["kind"]])


def test_document_holds_what_was_fitted_and_nothing_else_moves() -> None:
    cluster = load_cluster("dgx-h100")
    document = read_fabric_document("nvlink4")
    calibration = Calibration(cluster, "mine", document, [])
    changed = calibration.document({"fill": 0.125, "levels.0.bandwidth_GBps": 111.0})
    assert (changed["fill"], changed["levels"][0]["bandwidth_GBps"]) == (0.125, 111.0)
    assert without(changed) == without(document)
    assert document == read_fabric_document("nvlink4")


def without(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("fill", "levels")}


def test_rows_that_do_not_fit_the_cluster() -> None:
    with pytest.raises(DataError, match="16 ranks on 1 nodes: dgx-h100 has 8 GPUs a node"):
        place_measured(16, 1, load_cluster("dgx-h100"))


def test_half_filled_nodes_are_spread() -> None:
    placed = place_measured(16, 4, load_cluster("dgx-h100"))
    assert (placed.nodes, placed.ranks_per_node) == (4, 4)
