"""Exchanges of experts and sends of tables that no fit has seen, by the closed forms over the shipped fabrics."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from echograph.ir.passes.expert_parallel import places
from echograph.simulator.clusters import load_cluster
from echograph.simulator.collectives import collective_time
from echograph.workflow.calibration.fabrics import RECIPES

NODE = 8
FP8_WITH_SCALES = 1 + 4 / 128
BYTES = {"moe_dispatch": FP8_WITH_SCALES, "moe_combine": 2.0}
"""Of an element: DeepEP's benchmark dispatches FP8 with a scale for 128, and combines bf16."""
HOPPER = {"NVIDIA H100": "dgx-h100", "NVIDIA H100 80GB HBM3": "dgx-h100", "NVIDIA H200": "dgx-h200"}


@pytest.fixture(scope="module")
def table(measured_data: Path) -> list[dict[str, str]]:
    with gzip.open(measured_data / "expert_comms.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


def deepep(table: list[dict[str, str]], nodes: int) -> Iterator[float]:
    """Errors on DeepEP's normal kernels with 20 SMs and more, 1,024 tokens and more, 8 experts a token."""
    for row in table:
        if row["kernel"] != "deepep_normal" or row["gpu"] not in HOPPER or float(row["nodes"]) != nodes:
            continue
        tokens, experts, chosen = (int(float(row[name])) for name in ("tokens", "experts", "topk"))
        if tokens < 1024 or float(row["sms"]) < 20 or chosen != 8:
            continue
        cluster, ranks = load_cluster(HOPPER[row["gpu"]]), NODE * nodes
        parts = nodes if nodes > 1 else ranks
        size = tokens * float(row["hidden"]) * BYTES[row["op"]] * places(parts, experts, chosen)
        found = collective_time("all_to_all", size, cluster.place(range(ranks)), cluster)
        yield found.seconds / (float(row["latency_us"]) * 1e-6) - 1


def test_exchange_of_experts_in_a_node(table: list[dict[str, str]]) -> None:
    assert np.abs(list(deepep(table, 1))).mean() <= 0.13


def test_exchange_of_experts_between_nodes(table: list[dict[str, str]]) -> None:
    """On 32 GPUs within 3 %; on 16 the SMs bound it, and on 64 that cluster's network gave half of its NICs."""
    off = {nodes: np.abs(list(deepep(table, nodes))) for nodes in (2, 4, 8)}
    assert off[4].mean() <= 0.03
    spread = next(recipe.unseen["all_to_all"] for recipe in RECIPES if recipe.fabric == "ndr400")
    assert np.mean([error.mean() for error in off.values()]) == pytest.approx(spread, abs=0.01)


def test_sends_between_nodes(table: list[dict[str, str]]) -> None:
    cluster, off = load_cluster("dgx-h100"), []
    for row in table:
        sent = row["op"] == "send_recv" and row["gpu"] == "h100_dgx" and row["notes"] == "devices_per_node=1"
        if sent and float(row["bytes"]) >= 65536:
            found = collective_time("send_recv", float(row["bytes"]), cluster.place((0, NODE)), cluster)
            off.append(abs(found.seconds / (float(row["latency_us"]) * 1e-6) - 1))
    spread = next(recipe.unseen["send_recv"] for recipe in RECIPES if recipe.fabric == "ndr400")
    assert np.mean(off) == pytest.approx(spread, abs=0.01)
