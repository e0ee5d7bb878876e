"""`echoprof fit` on the published measurements: what it writes is what ships, and what `echosim` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echograph.profiler.costs import load_device


def test_a_fitted_device_is_the_one_that_ships(cli, measured_data: Path, tmp_path: Path) -> None:
    table = measured_data / "kernels.csv.gz"
    rows = cli("echoprof", "fit", "--kernels", table, "--device", "a100-sxm-80", "-o", tmp_path, "--json").json()
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


def test_a_fitted_fabric_says_how_far_it_is_off(cli, measured_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="fitting needs the [dev] extra")
    table = measured_data / "collectives.csv.gz"
    outcome = cli("echoprof", "fit", "--collectives", table, "--fabric", "nvlink3", "-o", tmp_path, "--json")
    rows = outcome.json()
    assert {row["profile"] for row in rows} == {"nvlink3"}
    about = json.loads((tmp_path / "nvlink3.json").read_text())["about"]
    assert about["held_out_rows"] == rows[0]["rows held out"] > 0
