"""Every key of a cluster's file acts on a prediction, or is refused by name.

Keys come from the types that files are read into, so that a new one is tried as well. A key is changed to several
values, in one mode after the other, until something of a prediction is another, or an error names the key.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cluster_files import KEYS, Keys, places, prepared, written
from flow_jobs import IDLE, communications
from layered import layered_step, product_step

from echograph.errors import EchoError
from echograph.ir.graph import StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.simulator.clusters import cluster_names, fabric_names, load_cluster
from echograph.simulator.simulate import simulate
from echograph.workflow.formats.timed import dimensions
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System

EXPORT, FLOWS = "export", "flows"
NAMES = {
    "device": ("a100-sxm-80", "h100-sxm"),
    "fabric": fabric_names(),
    "link": ("node 1 nic 0",),
    "all_reduce": ("tree", "hierarchical"),
}


def others(name: str | int, value: Any) -> list[Any]:
    """Other values of a key."""
    return [other for other in changes(name, value) if other != value]


def changes(name: str | int, value: Any) -> Iterator[Any]:
    """Values of a key's type, far from its own and near."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, max(1, value // 2), max(1, value // 100), value + 1)
    elif isinstance(value, float):
        yield from (2 * value, value / 2, value / 100, value + 1)
    else:
        yield from NAMES.get(str(name), (f"{value}x",))


def modes(document: dict[str, Any], path: Keys) -> list[str | int]:
    """Where a key may act: on so many GPUs in closed form, in what is exported, and as flows over links."""
    if path[0] == "degraded":
        return [FLOWS]
    levels = [level["gpus"] for level in document["network"]["level"]]
    sizes = {document["node"]["gpus"], document["node"]["nvlink_domain"], *levels, document["max_gpus"]}
    return [*sorted(size for size in sizes if size <= document["max_gpus"]), EXPORT, FLOWS]


@cache
def step() -> StepGraph:
    return Fold()(layered_step(1))


def of_a_product(gpus: int, path: Path) -> int:
    """Picoseconds of a product, whose pace the slowest GPU of a job sets."""
    system = System(path)
    job = system.annotate(DataParallel(replicas=gpus)(product_step()))
    return simulate(job, system.cluster, IDLE, memory=False).step_ps


def outcome(document: dict[str, Any], mode: str | int, base: dict[str, Any], folder: Path) -> Any:
    """What is predicted on a cluster, or the line that refuses it."""
    path = folder / "mine.toml"
    path.write_text(written(document))
    top, domain = base["max_gpus"], base["node"]["nvlink_domain"]
    try:
        if mode == EXPORT:
            return dimensions(load_cluster(path), top // domain * domain)
        gpus = min(top, 2 * base["network"]["level"][0]["gpus"], 1152) if mode == FLOWS else mode
        scenario = Scenario(network="flows" if mode == FLOWS else "auto")
        result, job = predict(step(), Plan(gpus=gpus, cluster=str(path)), scenario=scenario)
        record = result.to_json()
        if mode != FLOWS:
            record["product"] = of_a_product(gpus, path)
            reduced = communications({"dp": job.world_size}, ("all_reduce", "dp", 2**30, 0))
            record["reduced"] = simulate(reduced, load_cluster(path), IDLE, memory=False).step_ps
    except EchoError as error:
        return error
    record["simulation"].pop("wall_s")
    return json.dumps(record, sort_keys=True)


def acts(name: str, path: Keys, folder: Path) -> bool:
    """Whether some other value of a key gives another prediction or, if none does, is refused by name."""
    base = prepared(name, path)
    before: dict[str | int, Any] = {}
    refused = False
    for number, (holder, key) in enumerate(places(base, path)):
        for value in others(key, holder[key]):
            document = copy.deepcopy(base)
            other, _ = list(places(document, path))[number]
            other[key] = value
            for mode in modes(base, path):
                if mode not in before:
                    before[mode] = outcome(base, mode, base, folder)
                    assert not isinstance(before[mode], EchoError), (name, mode, before[mode])
                after = outcome(document, mode, base, folder)
                if isinstance(after, EchoError):
                    assert re.search(rf"\b{key}\b|{re.escape(str(value))}", str(after)), (name, path, after)
                    refused = True
                    break
                if after != before[mode]:
                    return True
    return refused


FEW = ("dgx-h100",)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in cluster_names()]
)
def test_every_key_acts_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    assert len(KEYS) > 20
    idle = [".".join(map(str, path)) for path in KEYS if not acts(name, path, tmp_path)]
    assert idle == []
