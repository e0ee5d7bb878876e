"""The fit of a device, on a table whose every time is a formula's: it finds what made the table."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from made_kernels import BATCHED, GROUPED, REACH, TRANSPOSED, write_table

from echograph.errors import DataError
from echograph.profiler.costs import DeviceProfile, gemm, load_device
from echograph.profiler.costs.attention import attention_backward, attention_forward
from echograph.profiler.fit.device import fit_device, write_profile
from echograph.profiler.fit.facts import device_facts
from echograph.profiler.fit.table import KernelTable, read_table


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> KernelTable:
    path = tmp_path_factory.mktemp("kernels") / "kernels.csv"
    write_table(path)
    return read_table(path)


@pytest.fixture(scope="module")
def fitted(table: KernelTable) -> DeviceProfile:
    return fit_device(table, "a100-sxm-80", device_facts("a100-sxm-80"), relative=None, date="2026-01-01")


def test_products_are_found(fitted: DeviceProfile) -> None:
    error = fitted.gemm["bf16"].label.held_out.long
    assert error is not None
    assert error.rows > 40
    assert error.median_abs < 0.02
    sizes = {"m": [4096, 8192], "n": [4096, 2048], "k": [4096, 8192]}
    bare = msgspec.structs.replace(load_device("a100-sxm-80").gemm["bf16"], residual=None)
    made = msgspec.structs.replace(fitted, gemm=fitted.gemm | {"bf16": bare})
    mine, theirs = (np.asarray(gemm(device, dtype="bf16", **sizes).seconds) for device in (fitted, made))
    assert mine == pytest.approx(theirs, rel=0.05)


def test_what_has_no_rows_is_assumed_and_says_so(fitted: DeviceProfile) -> None:
    assert fitted.gemm.keys() == load_device("a100-sxm-80").datasheet.peak_flops_per_s.keys()
    assert fitted.gemm["tf32"].label.source == "analytical"
    assert fitted.gemm["tf32"].label.basis == "assumed: bf16's model at the tf32 peak"
    assert fitted.memory["optimizer"].label.basis.startswith("assumed: as elementwise")
    assert fitted.provenance.tables == {"made": sum(fitted.provenance.tables.values())}


def test_shares_of_the_bandwidth_are_found_and_the_timer_is_taken_out(fitted: DeviceProfile) -> None:
    for kind, op in (("elementwise", "add"), ("norm", "ln"), ("softmax", "softmax"), ("copy", "gelu")):
        assert fitted.memory[kind].bandwidth_fraction == pytest.approx(
            [REACH[op]] * len(fitted.memory[kind].bandwidth_fraction), rel=0.02
        )
    assert "timer overhead of 20 us a row removed" in fitted.memory["elementwise"].label.basis


def test_layouts_and_groups_are_found_in_the_second_source(fitted: DeviceProfile) -> None:
    assert fitted.gemm["bf16"].transposed_scale == pytest.approx(TRANSPOSED, rel=0.02)
    stages = ("forward", "input_gradient", "weight_gradient")
    expected = dict(zip(stages, GROUPED.values(), strict=True))
    assert fitted.grouped.scale == pytest.approx(expected, rel=0.05)


def test_attention_is_found_of_the_kernels_that_are_charted(fitted: DeviceProfile) -> None:
    made = load_device("a100-sxm-80")
    assert set(fitted.attention) == {"trtllm", "flash2"}
    sizes = {"batch": 4, "heads": 16, "seq": [2048, 4096], "head_dim": 128}
    ahead = [np.asarray(attention_forward(d, kernel="trtllm", **sizes).seconds) for d in (fitted, made)]
    assert ahead[0] == pytest.approx(ahead[1], rel=0.03)
    both = [
        np.asarray(attention_forward(d, kernel="flash2", **sizes).seconds)
        + np.asarray(attention_backward(d, kernel="flash2", **sizes).seconds)
        for d in (fitted, made)
    ]
    assert both[0] == pytest.approx(both[1], rel=0.06)


def test_batches_of_narrow_products_are_found(fitted: DeviceProfile) -> None:
    assert fitted.gemm["bf16"].batched_scale == pytest.approx(BATCHED, rel=0.05)
    assert fitted.gemm["bf16"].batched_spread < 0.1


def test_a_relative_lends_what_a_table_does_not_measure(table: KernelTable, fitted: DeviceProfile) -> None:
    lent = fit_device(table, "h100-sxm", device_facts("h100-sxm"), relative=fitted, date="2026-01-01")
    assert lent.gemm["bf16"].label.basis == "scaled from a100-sxm-80"
    assert lent.gemm["fp8"].label.basis == "scaled from a100-sxm-80: bf16's model at the fp8 peak"
    assert all(lent.grouped.scale[stage] >= 1.0 for stage in lent.grouped.scale)
    assert lent.attention["flash2"].forward.label.source == "fitted"
    backward = lent.attention["flash2"].backward
    assert backward is not None and "less the fitted forward" in backward.label.basis
    with pytest.raises(DataError, match="no rows for mi300x"):
        fit_device(table, "mi300x", device_facts("mi300x"), relative=None, date="2026-01-01")


def test_a_fit_is_written_and_read(fitted: DeviceProfile, tmp_path: Path) -> None:
    write_profile(fitted, tmp_path / "made.json")
    assert load_device(tmp_path / "made.json") == fitted
