"""`echoprof fit --nccl-tests`: from the logs of a user's cluster to a cluster that predicts it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from echograph.simulator.clusters import PRESETS, Cluster, load_cluster
from echograph.simulator.clusters.fabric import NodeFabric
from echograph.simulator.collectives import collective_time

SIZES = [2**power for power in range(12, 31, 2)]


def log(path: Path, cluster: Cluster, nodes: int, factor: float = 1.0, per_node: int = 8) -> Path:
    """What all_reduce_perf prints on nodes of a cluster, by the model's own times."""
    lines = ["# nThread 1 nGpus 1 minBytes 4096 maxBytes 1073741824 step: 4(factor)", "# Using devices"]
    for rank in range(nodes * per_node):
        host, device = divmod(rank, per_node)
        lines.append(
            f"#  Rank {rank:2} Group  0 Pid {1000 + rank} on node{host} device {device} [0x0{device}] NVIDIA GPU"
        )
    lines += ["# Collective test starting: all_reduce_perf", "NCCL version 2.21.5+cuda12.4"]
    place = cluster.place_strided(nodes * per_node)
    for size in SIZES:
        seconds = factor * collective_time("all_reduce", size, place, cluster).seconds
        bus = 2 * (place.ranks - 1) / place.ranks
        timing = f"{seconds * 1e6:.2f} {size / seconds / 1e9:.2f} {bus * size / seconds / 1e9:.2f} 0"
        lines.append(f"{size} {size // 4} float sum -1 {timing} {timing}")
    path.write_text("\n".join(lines))
    return path


def slower(cluster: Cluster) -> Cluster:
    """The cluster with three quarters of its NVLink bandwidth."""
    node = cluster.node_fabric
    assert isinstance(node, NodeFabric)
    levels = tuple((ranks, 0.75 * rate) for ranks, rate in node.levels)
    return replace(cluster, node_fabric=replace(node, levels=levels))


def test_logs_make_a_cluster_that_predicts_them(cli, tmp_path: Path) -> None:
    ours = slower(load_cluster("dgx-a100"))
    logs = [
        log(tmp_path / f"{nodes}-{ranks}.log", ours, nodes, per_node=ranks)
        for nodes, ranks in ((1, 2), (1, 4), (1, 8), (4, 8))
    ]
    asked = [word for path in logs for word in ("--nccl-tests", path)]
    outcome = cli(
        "echoprof", "fit", *asked, "--cluster", "dgx-a100", "--name", "lab", "-o", tmp_path / "out", "--json"
    )
    rows = {row["profile"]: row for row in outcome.json()}
    assert rows.keys() == {"lab-node", "lab-network"}
    assert all(row["mean error"] < 0.1 and row["rows held out"] >= 10 for row in rows.values())
    made = load_cluster(tmp_path / "out" / "lab.toml")
    assert made.device == ours.device
    for ranks in (8, 32):
        for size in SIZES[3:]:
            theirs = collective_time("all_reduce", size, ours.place_strided(ranks), ours).seconds
            assert collective_time("all_reduce", size, made.place_strided(ranks), made).seconds == pytest.approx(
                theirs, rel=0.05
            )
    about = json.loads((tmp_path / "out" / "lab-network.json").read_text())["about"]
    assert "NCCL 2.21.5" in about["source"] and about["origin"] == "fitted"


def test_logs_of_a_cluster_of_slower_links_are_not_scaled_twice(cli, tmp_path: Path) -> None:
    text = (PRESETS / "dgx-h100.toml").read_text().replace("nvlink_GBps = 450", "nvlink_GBps = 200")
    (tmp_path / "mine.toml").write_text(text.replace("nvls = true", "nvls = false"))
    ours = load_cluster(tmp_path / "mine.toml")
    path = log(tmp_path / "one.log", ours, 1)
    asked = ("--nccl-tests", path, "--cluster", tmp_path / "mine.toml", "--name", "lab", "-o", tmp_path / "out")
    assert cli("echoprof", "fit", *asked).status == 0
    made = load_cluster(tmp_path / "out" / "lab.toml")
    assert (made.node_fabric.link, made.node_fabric.about.origin) == (ours.node_fabric.link, "fitted")
    times = [collective_time("all_reduce", 2**29, c.place_strided(8), c).seconds for c in (ours, made)]
    assert times[1] == pytest.approx(times[0], rel=0.02)


def test_a_clusters_own_fabrics_stay_where_no_row_speaks_of_them(cli, tmp_path: Path) -> None:
    path = log(tmp_path / "one.log", load_cluster("dgx-a100"), 1, factor=1.2)
    first = ("echoprof", "fit", "--nccl-tests", path, "--cluster", "dgx-a100", "-o", tmp_path / "first")
    assert cli(*first).status == 0
    again = ("--cluster", tmp_path / "first" / "ours.toml", "-o", tmp_path / "second")
    network = log(tmp_path / "four.log", load_cluster("dgx-a100"), 4)
    assert cli("echoprof", "fit", "--nccl-tests", network, *again).status == 0
    second = load_cluster(tmp_path / "second" / "ours.toml")
    assert second.node_fabric == load_cluster(tmp_path / "first" / "ours.toml").node_fabric


def test_a_cluster_file_in_another_hand_is_changed_or_refused_in_one_line(cli, tmp_path: Path) -> None:
    path, mine = log(tmp_path / "one.log", load_cluster("dgx-a100"), 1), tmp_path / "mine.toml"
    text = (PRESETS / "dgx-a100.toml").read_text()
    asked = ("echoprof", "fit", "--nccl-tests", path, "--cluster", mine)
    mine.write_text(text.replace("[node]", "[node]  # ours").replace('fabric = "nvlink3"', "fabric = 'nvlink3'"))
    assert cli(*asked, "-o", tmp_path / "a").status == 0
    assert load_cluster(tmp_path / "a" / "ours.toml").node_fabric.name == "ours-node"
    mine.write_text(text.replace('fabric = "nvlink3"', '"fabric" = "nvlink3"'))
    outcome = cli(*asked, "-o", tmp_path / "b")
    assert outcome.status in (1, 2)
    assert "lines of its own" in outcome.err.strip().splitlines()[-1]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ((), "--cluster"),
        (("--cluster", "dgx-a10"), "dgx-a100"),
        (("--cluster", "dgx-a100", "--collective", "allreduce"), "all_reduce"),
        (("--cluster", "aws-p4de"), ""),
    ],
)
def test_what_cannot_be_fitted_is_one_line(cli, tmp_path: Path, extra: tuple[str, ...], line: str) -> None:
    path = log(tmp_path / "one.log", load_cluster("dgx-a100"), 1)
    if not line:
        path.write_text("\n".join(path.read_text().splitlines()[:-6]))
        line = "a fit takes"
    outcome = cli("echoprof", "fit", "--nccl-tests", path, *extra, "-o", tmp_path / "out")
    assert outcome.status in (1, 2)
    assert line in outcome.err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_published_logs_of_64_gpus_are_predicted_from_those_of_32_and_less(
    cli, measured_data: Path, tmp_path: Path
) -> None:
    from echograph.profiler.fit.fabric import read_nccl_tests

    logs = [measured_data / "nccl-tests" / f"a100_allreduce_{ranks}.log" for ranks in (16, 32)]
    asked = [word for path in logs for word in ("--nccl-tests", path)]
    assert cli("echoprof", "fit", *asked, "--cluster", "azure-nd-a100-v4", "-o", tmp_path).status == 0
    made, off = load_cluster(tmp_path / "ours.toml"), []
    for row in read_nccl_tests(measured_data / "nccl-tests" / "a100_allreduce_64.log"):
        if row.size_bytes >= 64 * 1024:
            seconds = collective_time("all_reduce", row.size_bytes, made.place_strided(64), made).seconds
            off.append(abs(seconds / row.seconds - 1))
    assert len(off) > 8 and sum(off) / len(off) < 0.12
