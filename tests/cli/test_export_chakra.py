"""`echoc export --to chakra`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echograph.ir import serde
from echograph.ir.chakra.messages import NodeType, read_nodes

pytestmark = pytest.mark.torch


def test_traces_and_the_configuration_of_the_cluster_are_written(cli, job_graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = cli("echoc", "export", job_graph, "--to", "chakra", "-o", out, "--name", "small", "--json").json()
    ranks = serde.load(job_graph).world_size
    names = {path.name for path in out.iterdir()}
    assert names == {
        *(f"small.{rank}.et" for rank in range(ranks)),
        *("comm_groups.json", "chakra.json", "astra_network.yml", "astra_system.json", "astra_memory.json"),
    }
    assert (done["ranks"], done["files"]) == (ranks, len(names))
    assert done["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert done["nodes"] == sum(1 for rank in range(ranks) for _ in read_nodes(out / f"small.{rank}.et"))
    system = json.loads((out / "astra_system.json").read_text())
    assert system["local-mem-bw"] == 3350


def test_kernels_take_what_the_cluster_of_the_option_takes(cli, job_graph: Path, tmp_path: Path) -> None:
    """A graph without durations gets those of `echosim run` on the same cluster."""
    totals = {}
    for cluster in ("dgx-h100", "dgx-a100"):
        out = tmp_path / cluster
        cli("echoc", "export", job_graph, "--to", "chakra", "-o", out, "--cluster", cluster, "--json").json()
        (trace,) = out.glob("*.0.et")
        totals[cluster] = sum(node.duration_us for node in read_nodes(trace) if node.type == NodeType.COMP)
    result = cli("echosim", "run", job_graph, "--cluster", "dgx-a100", "--json").json()
    assert totals["dgx-a100"] > totals["dgx-h100"]
    assert totals["dgx-a100"] * 1e-6 == pytest.approx(result["breakdown_s"]["compute"], rel=0.02)


def test_people_read_what_is_lost_beside_the_result(cli, job_graph: Path, tmp_path: Path) -> None:
    done = cli("echoc", "export", job_graph, "--to", "chakra", "-o", tmp_path / "out")
    assert done.status == 0
    assert "chakra" in done.out
    assert "note: whole microseconds" in done.err
    assert "note: no time of the host" in done.err
    assert "no trees, NVLS or protocols" in done.err


def test_a_file_a_role(cli, job_graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cli("echoc", "export", job_graph, "--to", "chakra", "-o", out, "--per-role", "--json").json()
    roles = json.loads((out / "roles.json").read_text())
    assert [role["file"] for role in roles] == [path.name for path in sorted(out.glob("*.et"))]
    assert sorted(r for role in roles for r in role["ranks"]) == list(range(serde.load(job_graph).world_size))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--cluster", "dgx-h200-typo"), "unknown cluster"),
        (("--name", "a/b"), "give letters"),
    ],
)
def test_wrong_options_write_nothing(
    cli, job_graph: Path, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    done = cli("echoc", "export", job_graph, "--to", "chakra", "-o", tmp_path / "out", *options)
    assert done.status != 0
    assert says in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_step_graph_is_refused(cli, graph: Path, tmp_path: Path) -> None:
    done = cli("echoc", "export", graph, "--to", "chakra", "-o", tmp_path / "out")
    assert (done.status, "echoc lower" in done.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(cli, job_graph: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = cli("echoc", "export", job_graph, "--to", "chakra", "-o", tmp_path)
    assert done.status == 1
    assert "not empty" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_earlier_export_is_replaced(cli, job_graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("one", "two"):
        cli("echoc", "export", job_graph, "--to", "chakra", "-o", out, "--name", name, "--json").json()
    assert list(out.glob("one.*")) == []


def test_what_is_degraded_is_said_to_be_lost(cli, job_graph: Path, tmp_path: Path) -> None:
    from echograph.simulator.clusters import PRESETS

    text = (PRESETS / "dgx-h100.toml").read_text() + "\n[[degraded]]\nnode = 0\ncompute = 0.5\n"
    (tmp_path / "slow.toml").write_text(text)
    done = cli(
        "echoc",
        "export",
        job_graph,
        "--to",
        "chakra",
        "-o",
        tmp_path / "empty",
        "--cluster",
        tmp_path / "slow.toml",
    )
    assert done.status == 0
    assert "what is degraded is not in ASTRA-sim's files" in done.err
    assert "'empty' in it" in done.err
