"""`echoprof fit` on the published measurements: what it writes is what ships, and what `echosim` reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from echograph.profiler.costs import load_device
from echograph.profiler.fit.facts import DATASHEETS
from echograph.simulator.clusters import PRESETS, load_cluster
from echograph.simulator.clusters.fabric import read_fabric_document
from echograph.simulator.collectives import collective_time
from echograph.simulator.collectives.calibrate import place_measured

KERNELS = ("kernels.csv.gz", "kernels2/gemm.csv.gz", "kernels2/attention.csv.gz")
KERNELS += ("kernels2/experts.csv.gz", "kernels2/other.csv.gz")
"""The tables that the shipped devices are fitted on, in their order: no step times among them."""


DEVICES, FABRICS = DATASHEETS.parent, PRESETS.parent / "fabrics"


@pytest.mark.slow
def test_a_fitted_device_is_the_one_that_ships(cli, measured_data: Path, tmp_path: Path) -> None:
    tables = [measured_data / name for name in KERNELS]
    if not all(table.is_file() for table in tables):
        pytest.skip("no kernels2 among the measured tables")
    given = [word for table in tables for word in ("--kernels", table)]
    rows = cli("echoprof", "fit", *given, "--device", "a100-sxm-80", "-o", tmp_path, "--json").json()
    assert {"gemm bf16", "memory elementwise"} <= {row["what"] for row in rows}
    assert all(row["rows held out"] > 0 for row in rows)
    fitted, shipped = load_device(str(tmp_path / "a100-sxm-80.json")), load_device("a100-sxm-80")
    mine, theirs = (d.gemm["bf16"].label.held_out.long for d in (fitted, shipped))
    assert mine.rows == theirs.rows
    # The search ends in the same valley on every machine, though not on the same point: its arithmetic is the
    # processor's.
    assert mine.median_abs == pytest.approx(theirs.median_abs, rel=0.1)
    assert mine.mean_abs == pytest.approx(theirs.mean_abs, rel=0.1)
    assert fitted.datasheet == shipped.datasheet


SAME_ARITHMETIC = {
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4",
}
"""With which the shipped profiles are fitted: the same instructions on every x86-64 processor since 2013, as a
search for parameters ends elsewhere in the last digits where sums are added up in another order."""


def fit_elsewhere(*arguments: object) -> None:
    """`echoprof fit` in a process of its own, with that arithmetic."""
    words = [sys.executable, "-c", "from echograph.cli.echoprof import main; main()", "fit", *map(str, arguments)]
    done = subprocess.run(
        words, env={**os.environ, **SAME_ARITHMETIC}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def rebuilt(measured_data: Path, folder: Path, tables: Sequence[str], *devices: str) -> dict[str, bytes]:
    """Profiles fitted where nothing but tables of kernels is: no step times, no profiles of before."""
    given: list[object] = []
    for table in tables:
        if not (measured_data / table).is_file():
            pytest.skip(f"no {table} among the measured tables")
        (folder / table).parent.mkdir(parents=True, exist_ok=True)
        given += ["--kernels", shutil.copy(measured_data / table, folder / table)]
    given += [word for device in devices for word in ("--device", device)]
    shipped = load_device(devices[0] if devices else "h100-sxm").provenance.date
    fit_elsewhere(*given, "--date", shipped, "-o", folder / "made")
    assert not list(folder.rglob("ground_truth*"))
    return {path.name: path.read_bytes() for path in sorted((folder / "made").glob("*.json"))}


def test_a_profile_rebuilds_bit_for_bit_from_kernels_alone(
    measured_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V100 is a table's two thousand rows, all of one file."""
    pytest.importorskip("scipy", reason="fitting needs the [dev] extra")
    monkeypatch.setenv("ECHOGRAPH_DATA", str(tmp_path))
    (made,) = rebuilt(measured_data, tmp_path, KERNELS[:1], "v100-sxm2").items()
    assert made == ("v100-sxm2.json", (DEVICES / "v100-sxm2.json").read_bytes())


@pytest.mark.parametrize(
    ("fabric", "table"), [("nvlink3", "collectives.csv.gz"), ("nvlink4-gh200x4", "collectives_alps.csv")]
)
def test_a_fabric_rebuilds_bit_for_bit_from_collectives_alone(
    cli, measured_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fabric: str, table: str
) -> None:
    pytest.importorskip("scipy", reason="fitting needs the [dev] extra")
    monkeypatch.setenv("ECHOGRAPH_DATA", str(tmp_path))
    copied = shutil.copy(measured_data / table, tmp_path / table)
    shipped = FABRICS / f"{fabric}.json"
    date = json.loads(shipped.read_text())["about"]["date"]
    made = tmp_path / "made"
    cli("echoprof", "fit", "--collectives", copied, "--fabric", fabric, "--date", date, "-o", made)
    assert (made / shipped.name).read_bytes() == shipped.read_bytes()


@pytest.mark.slow
def test_all_profiles_rebuild_bit_for_bit_from_kernels_alone(
    measured_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy", reason="fitting needs the [dev] extra")
    monkeypatch.setenv("ECHOGRAPH_DATA", str(tmp_path))
    made = rebuilt(measured_data, tmp_path, KERNELS)
    shipped = {path.name: path.read_bytes() for path in sorted(DEVICES.glob("*.json"))}
    assert made.keys() == shipped.keys()
    assert [name for name in shipped if made[name] != shipped[name]] == []


def test_a_fitted_fabric_says_how_far_it_is_off(cli, measured_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="fitting needs the [dev] extra")
    table = measured_data / "collectives.csv.gz"
    outcome = cli("echoprof", "fit", "--collectives", table, "--fabric", "nvlink3", "-o", tmp_path, "--json")
    rows = outcome.json()
    assert {row["profile"] for row in rows} == {"nvlink3"}
    about = json.loads((tmp_path / "nvlink3.json").read_text())["about"]
    assert about["held_out_rows"] == rows[0]["rows held out"] > 0


# What the tables of collectives say of the rows that make each of these fabrics.
MADE = {
    "nvlink3": ("dgx-a100", "made:aiconfigurator", "A100-SXM4-80GB", (2, 4, 8)),
    "hdr200": ("azure-nd-a100-v4", "made:Echo", "A100-SXM4-40GB", (16, 32, 64)),
}


@pytest.mark.parametrize("fabric", MADE)
def test_a_fabric_is_found_in_a_table_that_its_own_formulas_made(cli, tmp_path: Path, fabric: str) -> None:
    pytest.importorskip("scipy", reason="fitting needs the [dev] extra")
    preset, source, gpu, sizes = MADE[fabric]
    cluster = load_cluster(preset)
    lines = ["collective,n_gpus,n_nodes,size_bytes,time_us,dtype,gpu,source"]
    for ranks in sizes:
        nodes = max(1, ranks // 8)
        for power in range(13, 31):
            made = collective_time("all_reduce", 2**power, place_measured(ranks, nodes, cluster), cluster)
            lines.append(f"all_reduce,{ranks},{nodes},{2**power},{made.seconds * 1e6!r},half,{gpu},{source}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    asked = ("--collectives", tmp_path / "table.csv", "--fabric", fabric, "-o", tmp_path / "out", "--json")
    rows = cli("echoprof", "fit", *asked).json()
    assert {(row["profile"], row["what"]) for row in rows} == {(fabric, "all_reduce")}
    assert all(row["mean error"] < 0.08 and row["rows held out"] > 10 for row in rows)
    document = json.loads((tmp_path / "out" / f"{fabric}.json").read_text())
    assert document["about"]["rows"] == len(lines) - 1
    assert document["kind"] == read_fabric_document(fabric)["kind"]


def test_a_table_without_rows_for_a_fabric_says_so(cli, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("collective,n_gpus,n_nodes,size_bytes,time_us\nall_reduce,8,1,1024,9\n")
    outcome = cli(
        "echoprof", "fit", "--collectives", tmp_path / "table.csv", "--fabric", "nvlink3", "-o", tmp_path
    )
    assert (outcome.status, outcome.err.count("\n")) == (1, 1)
    assert "no rows of nvlink3: nothing to fit" in outcome.err
    wrong = cli("echoprof", "fit", "--collectives", tmp_path / "table.csv", "--fabric", "nvlink33")
    assert (wrong.status, wrong.err.count("\n")) == (2, 1)
    wrong = cli("echoprof", "fit", "--kernels", tmp_path / "table.csv", "--device", "h1000")
    assert (wrong.status, wrong.err.count("\n")) == (2, 1)
