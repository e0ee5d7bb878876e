"""Every number of a fabric acts on the time or the error of some collective; what its `about` tells is told."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echograph.errors import FormatError, UnavailableError
from echograph.simulator.clusters import Cluster, NodeFabric, fabric_names, load_cluster
from echograph.simulator.clusters.fabric import over_link, parse_fabric, read_fabric_document
from echograph.simulator.collectives import ALGORITHMS, KINDS, collective_time

# These say how much was measured, and when; no prediction rests on a count.
TOLD = ("about.origin", "about.source", "about.date", "about.rows", "about.held_out_rows", "about.note", "kind")
NODES = (*map(range, range(2, 9)), range(16), range(72))
GROUPS = (*NODES, range(144), range(0, 16, 8), range(0, 256, 8))
FEW = ("nvlink4", "ndr400", "pcie5")


def leaves(document: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if isinstance(value, dict | list):
            yield from leaves(value, (*way, key))
        elif value is not None:
            yield (*way, key), value


def changed(document: dict[str, Any], way: tuple[Any, ...], value: Any) -> dict[str, Any]:
    other = copy.deepcopy(document)
    holder = other
    for step in way[:-1]:
        holder = holder[step]
    holder[way[-1]] = value
    return other


def cluster_with(document: dict[str, Any], link: Any) -> Cluster:
    """A cluster with a fabric, over the same link whatever the fabric says it was measured on."""
    base = load_cluster("gb200-nvl72" if document.get("levels", [{}])[-1].get("ranks") == 72 else "dgx-h100")
    fabric = parse_fabric(document if link is None else over_link(document, link, "mine"), "mine")
    if isinstance(fabric, NodeFabric):
        return replace(base, node_fabric=fabric)
    return replace(base, network=replace(base.network, fabric=fabric))


def answers(cluster: Cluster) -> list[tuple[float, float]]:
    """Seconds and spread of all collectives, with each algorithm and protocol that runs them."""
    found = []
    for kind in KINDS:
        for group in GROUPS:
            place = cluster.place(group)
            for name in (name for name in ALGORITHMS if kind in ALGORITHMS[name].kinds):
                for protocol in ("LL", "LL128", "Simple"):
                    for size in (1e3, 1e9):
                        try:
                            one = collective_time(kind, size, place, cluster, algorithm=name, protocol=protocol)  # type: ignore[arg-type]
                        except UnavailableError:
                            continue
                        found.append((one.seconds, one.spread))
    return found


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in fabric_names()]
)
def test_every_number_acts(name: str) -> None:
    document = read_fabric_document(name)
    fabric = parse_fabric(document, name)
    link = fabric.link if isinstance(fabric, NodeFabric) else None
    before, idle = answers(cluster_with(document, link)), []
    for way, value in leaves(document):
        path = ".".join(map(str, way))
        if path in TOLD or path == "link.kind":
            continue
        if fabric.about.origin == "assumed" and path == f"levels.{len(document.get('levels', [])) - 1}.ranks":
            continue  # what lies beyond the largest measured group is less sure; here nothing was measured
        other = not value if isinstance(value, bool) else 0.9 * value
        if path.endswith(".ranks"):
            sizes = {level["ranks"] for level in document["levels"]}
            other = next((size for size in (value - 1, 3) if size > 1 and size not in sizes), None)
            if other is None:  # between its neighbours there is no other size: the level itself has to act
                levels = [level for level in document["levels"] if level["ranks"] != value]
                if answers(cluster_with({**document, "levels": levels}, link)) == before:
                    idle.append(path)
                continue
        if path == "two_domain_volume":
            other = 1.5
        if path == "ring_nics":
            other = value / 2
        if answers(cluster_with(changed(document, way, other), link)) == before:
            idle.append(path)
    assert idle == []


def test_what_is_told_is_in_the_origin() -> None:
    document = read_fabric_document("nvlink4")
    about = parse_fabric(document, "mine").about
    for path in TOLD:
        if path.startswith("about."):
            key = path.removeprefix("about.")
            assert getattr(about, key) == document["about"][key]


def test_a_fabric_is_at_most_a_mebibyte(tmp_path: Path) -> None:
    path, text = tmp_path / "mine.json", json.dumps(read_fabric_document("nvlink4"))
    path.write_text(text + " " * (2**20 - len(text)))
    assert read_fabric_document(path) == json.loads(text)
    path.write_text(text + " " * (2**20 + 1 - len(text)))
    with pytest.raises(FormatError, match=r"mine\.json: larger than 1 MiB"):
        read_fabric_document(path)
