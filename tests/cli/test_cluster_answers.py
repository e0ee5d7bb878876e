"""What the commands answer of clusters: a million GPUs, links that are set, precisions that a device lacks."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import pytest

from echograph.profiler.costs import load_device

MILLION = 2**20


@pytest.mark.parametrize("cluster", ["dgx-h100", "gb200-nvl72", "ethernet-100g"])
def test_a_million_gpus_are_one_rank_and_a_note(cli: Any, graph: Path, cluster: str) -> None:
    done = cli("echosim", "run", graph, "--gpus", MILLION, "--cluster", cluster, "--json")
    found = done.json()
    assert (found["gpus"], found["simulation"]["ranks"]) == (MILLION, 1)
    assert "[network.growth], which is assumed" in done.err
    small = cli("echosim", "run", graph, "--gpus", 2048, "--cluster", cluster, "--json")
    assert small.json()["step_time_s"] < found["step_time_s"]
    assert "note:" not in small.err


def test_more_than_a_cluster_has_is_one_line(cli: Any, graph: Path) -> None:
    for cluster, most in (("jean-zay-a100", 416), ("aws-p5", 20_000), ("dgx-h100", MILLION)):
        done = cli("echosim", "run", graph, "--gpus", 2 * MILLION, "--cluster", cluster)
        assert done.status == 2
        assert done.err.count("\n") == 1
        assert f"cluster {cluster} has 1 to {most} GPUs (max_gpus of its file)" in done.err


@pytest.mark.parametrize(
    ("cluster", "key"), [("dgx-h100", "cluster.node.nvlink_GBps"), ("ethernet-100g", "cluster.node.pcie_GBps")]
)
def test_a_slower_link_gives_a_longer_step(cli: Any, graph: Path, cluster: str, key: str) -> None:
    def step(rate: float) -> float:
        run = cli("echosim", "run", graph, "--gpus", 8, "--cluster", cluster, "--set", f"{key}={rate}", "--json")
        return float(run.json()["step_time_s"])

    times = [step(rate) for rate in (0.01, 0.1, 1)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 5 * times[1]


def test_the_link_and_what_a_gpu_gets_of_it_are_shown(cli: Any) -> None:
    shown = {row["name"]: row for row in cli("echosim", "clusters", "--json").json()}
    assert (shown["dgx-h100"]["pcie_GBps"], shown["dgx-h100"]["domain_GBps"]) == (64, 392.3)
    ethernet = shown["ethernet-100g"]
    assert (ethernet["pcie_GBps"], ethernet["node_fabric"]) == (32, "pcie5 (partly assumed)")
    assert 10 < ethernet["domain_GBps"] < 32


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "mxfp8"])
def test_a_device_without_fp8_units_is_said_to_have_none(cli: Any, graph: Path, precision: str) -> None:
    done = cli("echosim", "run", graph, "--cluster", "dgx-a100", "--precision", precision)
    assert done.status == 2
    assert "device a100-sxm-80 has no FP8 units; available: bf16, fp16, fp32, tf32" in done.err
    assert "did you mean" not in done.err


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("echoc", "import", "dot", "x.dot", "-o", "y.pb"), "format 'dot' cannot be imported; available: chakra,"),
        (("echoc", "export", "GRAPH", "--to", "kineto", "-o", "y"), "format 'kineto' cannot be exported"),
        (("echoc", "check", "GRAPH", "--as", "onnx"), "format 'onnx' cannot be checked; available: chakra, graph"),
        (
            ("echosim", "run", "GRAPH", "--set", "cluster.collectives.all_reduce=pat"),
            "algorithm 'pat' does not run all_reduce; available: hierarchical, nvls,",
        ),
        (
            ("echoprof", "fit", "--collectives", "TABLE", "--fabric", "ethernet", "-o", "y"),
            "fabric 'ethernet' is assumed: no measured rows make it; available: efa-p4de,",
        ),
    ],
)
def test_what_is_known_but_not_here_is_not_called_unknown(
    cli: Any, graph: Path, tmp_path: Path, command: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text("collective,n_gpus,n_nodes,size_bytes,time_us\n")
    done = cli(*({"GRAPH": graph, "TABLE": "table.csv"}.get(word, word) for word in command))
    assert done.status == 2
    assert line in done.err
    assert "unknown" not in done.err


@pytest.mark.parametrize("value", ["1e300", "nan", "-1", "word", "9" * 5000, "[" * 3000])
@pytest.mark.parametrize("key", ["node.memory_GiB", "network.nic_GBps", "max_gpus"])
def test_values_that_cannot_be_are_one_line(cli: Any, graph: Path, key: str, value: str) -> None:
    done = cli("echosim", "run", graph, "--set", f"cluster.{key}={value}")
    assert done.status == 1
    assert done.err.count("\n") == 1
    assert f"{key} = " in done.err and ": give a " in done.err and "internal error" not in done.err


def test_a_page_tells_of_the_device_that_is_set(cli: Any, graph: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run = cli("echosim", "run", graph, "--gpus", 8, "--set", "cluster.node.device=v100-sxm2", "--html", page)
    assert run.status == 0, run.err
    host, other = (escape(load_device(name).host.basis) for name in ("v100-sxm2", "h100-sxm"))
    assert host != other
    assert host in page.read_text() and other not in page.read_text()
