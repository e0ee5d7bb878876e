from __future__ import annotations

import json
from pathlib import Path

import pytest

from echograph.errors import DataError, InputError, PlanError, UnknownNameError
from echograph.simulator.clusters import (
    PRESETS,
    Cluster,
    cluster_names,
    fabric_names,
    load_cluster,
    load_network_fabric,
    load_node_fabric,
)
from echograph.simulator.clusters.fabric import parse_fabric, read_fabric_document

# GPU, GPUs a node, NVLink domain, NVLink GB/s a GPU, NIC GB/s a node: from the vendors' data sheets.
DATA_SHEETS = {
    "dgx-2": ("v100-sxm2", 16, 16, 150, 100),
    "dgx-a100": ("a100-sxm-80", 8, 8, 300, 200),
    "dgx-h100": ("h100-sxm", 8, 8, 450, 400),
    "dgx-h200": ("h200", 8, 8, 450, 400),
    "dgx-b200": ("b200", 8, 8, 900, 400),
    "azure-nd-a100-v4": ("a100-sxm-40", 8, 8, 300, 200),
    "aws-p4de": ("a100-sxm-80", 8, 8, 300, 50),
    "aws-p5": ("h100-sxm", 8, 8, 450, 400),
    "ethernet-100g": ("l40s", 8, 8, 0, 12.5),
    "a100-4x-hdr200": ("a100-sxm-80", 8, 8, 300, 100),
    "jean-zay-a100": ("a100-sxm-80", 8, 8, 300, 50),
    "grand-teton-h100": ("h100-sxm-hbm2e", 8, 8, 450, 400),
    "gb200-nvl72": ("gb200", 4, 72, 900, 200),
    "alps-gh200": ("gh200", 4, 4, 450, 100),
    "dgx-b300": ("b300", 8, 8, 900, 800),
    "gb300-nvl72": ("gb300", 4, 72, 900, 400),
    "hgx-h800": ("h800", 8, 8, 200, 400),
    "hgx-h20": ("h20", 8, 8, 450, 400),
    "rtx-pro-6000-node": ("rtx-pro-6000", 8, 8, 0, 400),
    "mi300x-node": ("mi300x", 8, 8, 448, 400),
    "mi325x-node": ("mi325x", 8, 8, 448, 400),
}


def test_every_preset_has_its_data_sheet() -> None:
    assert set(cluster_names()) == set(DATA_SHEETS)
    for name, expected in DATA_SHEETS.items():
        cluster = load_cluster(name)
        network = cluster.network
        found = (
            cluster.device,
            cluster.gpus_per_node,
            cluster.domain_gpus,
            cluster.nvlink_bytes_per_s / 1e9,
            network.nics_per_node * network.nic_bytes_per_s / 1e9,
        )
        assert found == expected, name


def test_default_is_dgx_h100() -> None:
    assert load_cluster().name == "dgx-h100"


def test_no_fabric_is_faster_than_its_nvlink() -> None:
    for name in cluster_names():
        cluster = load_cluster(name)
        if cluster.nvlink_bytes_per_s:
            assert cluster.node_fabric.bytes_per_s(2) < cluster.nvlink_bytes_per_s


@pytest.mark.parametrize("name", fabric_names())
def test_every_fabric_names_its_source(name: str) -> None:
    fabric = parse_fabric(read_fabric_document(name), name)
    about = fabric.about
    assert about.source and about.date
    assert about.origin != "fitted" or (about.rows and about.held_out_error["all_reduce"] < 0.12)


def test_unknown_names_list_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'dgx-h100'"):
        load_cluster("dgx-h10")
    with pytest.raises(UnknownNameError, match="unknown fabric 'nvlink9'"):
        load_node_fabric("nvlink9")


def test_fabric_of_the_wrong_kind() -> None:
    with pytest.raises(DataError, match="ndr400: is a network fabric"):
        load_node_fabric("ndr400")
    with pytest.raises(DataError, match="nvlink4: is a node fabric"):
        load_network_fabric("nvlink4")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nvls = true", "nvls = 1", r"node\.nvls = 1: give true or false"),
        ("gpus = 8", "gpus = 0", r"node\.gpus = 0: give a whole number from 1 to 1,024"),
        ("memory_GiB = 79.6", "memory_GB = 80", r"memory_GB"),
        ("nvlink_domain = 8", "nvlink_domain = 12", r"nvlink_domain is a multiple of gpus"),
        ("nic_GBps = 50", "nic_GBps = -1", r"network\.nic_GBps = -1: give a number from 0\.001 to 1e\+06"),
        ("ratio = 8", "ratio = 1", r"network\.growth\.ratio = 1: give a whole number from 2"),
        ("nic_GBps = 50", "", r"missing required field `nic_GBps`"),
        ("[node]", "[node", r"is not TOML"),
    ],
)
def test_broken_file_gives_one_line_with_file_key_and_rule(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = (PRESETS / "dgx-h100.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(DataError, match=message) as caught:
        load_cluster(path)
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.toml: No such file"):
        load_cluster(tmp_path / "gone.toml")


def test_own_file_loads_as_the_preset_does(tmp_path: Path) -> None:
    path = tmp_path / "dgx-h100.toml"
    path.write_text((PRESETS / "dgx-h100.toml").read_text())
    assert load_cluster(path) == load_cluster("dgx-h100")


def test_own_fabric_lies_beside_its_cluster(tmp_path: Path) -> None:
    document = read_fabric_document("nvlink4") | {"fill": 0.25}
    (tmp_path / "measured.json").write_text(json.dumps(document))
    text = (PRESETS / "dgx-h100.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('"nvlink4"', '"measured.json"'))
    fabric = load_cluster(tmp_path / "mine.toml").node_fabric
    assert (fabric.name, fabric.fill) == ("measured", 0.25)


def test_own_fabric_that_is_broken_or_gone(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(DataError, match=r"half\.json"):
        load_node_fabric(tmp_path / "half.json")
    with pytest.raises(InputError, match=r"gone\.json: No such file"):
        load_node_fabric(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"fill": 3}, "fill = 3: give a number from 0 to 1"),
        ({"link": {"kind": "pcie"}}, "link: .*missing required field `bandwidth_GBps`"),
        ({"kind": "bridge"}, "kind = 'bridge': give one of node, network"),
        ({"levels": []}, "levels is not empty"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_broken_fabric(edit: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_fabric(read_fabric_document("nvlink4") | edit, "mine")


def test_rank_beyond_the_cluster(cluster: Cluster) -> None:
    with pytest.raises(PlanError, match="rank 1048576 is beyond its 1048576 GPUs"):
        cluster.place(range(1048577))


@pytest.fixture
def cluster() -> Cluster:
    return load_cluster("dgx-h100")
