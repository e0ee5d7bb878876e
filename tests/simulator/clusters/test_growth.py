"""Networks beyond what their files state, by the rule that the files give."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.errors import DataError, PlanError
from echograph.simulator.clusters import PRESETS, cluster_names, load_cluster
from echograph.simulator.collectives import collective_time
from echograph.simulator.network.topology import Topology

MILLION = 2**20
GROWING = (
    *("dgx-a100", "dgx-b200", "dgx-b300", "dgx-h100", "dgx-h200"),
    *("ethernet-100g", "gb200-nvl72", "gb300-nvl72"),
)


def test_these_presets_grow_to_a_million() -> None:
    assert tuple(n for n in cluster_names() if load_cluster(n).max_gpus >= MILLION) == GROWING


@pytest.mark.parametrize("name", GROWING)
def test_levels_grow_by_the_ratio_until_they_join_all(name: str) -> None:
    cluster = load_cluster(name)
    stated = [level for level in cluster.network.levels if level.gpus <= cluster.stated_gpus]
    grown = cluster.network.levels[len(stated) :]
    assert grown and stated[-1].gpus == cluster.stated_gpus
    ratio = grown[0].gpus // stated[-1].gpus
    assert [level.gpus for level in grown] == [
        stated[-1].gpus * ratio**power for power in range(1, len(grown) + 1)
    ]
    assert [level.name for level in grown] == [f"{stated[-1].name}-{n + 2}" for n in range(len(grown))]
    assert {(level.hop_s, level.oversubscription) for level in grown} == {
        (stated[-1].hop_s, stated[-1].oversubscription)
    }
    assert grown[-1].gpus >= cluster.max_gpus


@pytest.mark.parametrize("name", GROWING)
def test_growth_changes_nothing_below(name: str) -> None:
    grown = load_cluster(name)
    small = load_cluster(name, {"max_gpus": str(grown.stated_gpus)})
    assert small.network.levels == grown.network.levels[: len(small.network.levels)]
    for ranks in (8, 64, small.max_gpus):
        for kind in ("all_reduce", "all_to_all"):
            times = [collective_time(kind, 2**26, c.place(range(ranks)), c) for c in (small, grown)]  # type: ignore[arg-type]
            assert times[0] == times[1]


def test_larger_groups_take_longer() -> None:
    cluster = load_cluster("dgx-h100")
    times = [
        collective_time("all_reduce", 2**28, cluster.place(range(n)), cluster).seconds
        for n in (2**16, 2**17, 2**18, 2**20)
    ]
    assert times == sorted(times) and len(set(times)) == 4


def test_links_of_grown_levels_have_names() -> None:
    cluster = load_cluster("dgx-h100")
    links = Topology(cluster=cluster, gpus=2**18)
    assert [tier.name for tier in links.tiers] == ["leaf", "spine", "core"]
    assert len(links.find("core 1 up")) == 1


def test_without_a_rule_a_network_ends(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"max_gpus = 417 is above the last level's gpus, 416: give \[network\.growth\]"
    ):
        load_cluster("jean-zay-a100", {"max_gpus": "417"})
    with pytest.raises(PlanError, match="rank 416 is beyond its 416 GPUs"):
        load_cluster("jean-zay-a100").place(range(417))
    path = tmp_path / "mine.toml"
    rule = "\n[network.growth]\nratio = 4\nhop_us = 1\noversubscription = 3\n"
    path.write_text(
        (PRESETS / "jean-zay-a100.toml").read_text().replace("max_gpus = 416", "max_gpus = 6656") + rule
    )
    assert [level.gpus for level in load_cluster(path).network.levels] == [416, 1664, 6656]
