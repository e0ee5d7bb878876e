"""Corrections of kernel costs by a trace: what helps on kernels held out is kept, what does not is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echograph.errors import DataError
from echograph.ir.types import Compute, DType, Gemm, Phase, Tensor, TensorRole
from echograph.profiler.costs import load_device
from echograph.profiler.costs.device import read_profile
from echograph.profiler.costs.estimate import cost_of, kernel_key
from echograph.profiler.fit.device import write_profile
from echograph.profiler.fit.traced import TracedKernel, fit_traced, with_traced

PREDICTED = [1e-5 * 1.5**n for n in range(12)]


def kernels(key: str, factors: list[float]) -> list[TracedKernel]:
    return [
        TracedKernel(key=key, predicted_s=seconds, measured_s=seconds * factor)
        for seconds, factor in zip(PREDICTED, factors, strict=True)
    ]


def test_kernels_that_all_take_twice_as_long_are_corrected_by_two() -> None:
    (fit,) = fit_traced(kernels("product forward bf16", [2.0] * 12), "a test")
    assert fit.before == pytest.approx(0.5)
    assert fit.after == pytest.approx(0.0, abs=1e-9)
    assert fit.correction is not None
    assert [fit.correction.at(s) for s in (1e-7, 3e-5, 1.0)] == pytest.approx([2.0] * 3)
    assert fit.correction.label.held_out.long is not None
    assert fit.correction.label.held_out.long.rows == 12


def test_a_correction_that_depends_on_size_is_between_its_knots() -> None:
    (fit,) = fit_traced(kernels("copy forward bf16", [3.0] * 6 + [1.0] * 6), "a test")
    assert fit.correction is not None
    assert fit.correction.at(PREDICTED[0]) > 2.5
    assert fit.correction.at(PREDICTED[-1]) < 1.3
    middle = fit.correction.at(float(np.sqrt(PREDICTED[5] * PREDICTED[6])))
    assert 1.3 < middle < 2.5


def test_what_kernels_held_out_do_not_bear_out_is_left_alone() -> None:
    scattered = [1.0, 1.0, 1.5, 1 / 1.5] * 3  # either half says something else of the other
    (fit,) = fit_traced(kernels("softmax forward bf16", scattered), "a test")
    assert fit.correction is None
    (few,) = fit_traced(kernels("softmax forward bf16", [2.0] * 12)[:3], "a test")
    assert few.correction is None


def test_calls_of_one_kernel_count_once_by_their_median() -> None:
    calls = kernels("product forward bf16", [2.0] * 12)
    slow = [replace(call, measured_s=1.0) for call in calls]
    (fit,) = fit_traced([*calls, *calls, *slow], "a test")
    assert (fit.kernels, fit.correction and fit.correction.at(1e-4)) == (12, pytest.approx(2.0))


def product(m: int, phase: Phase = Phase.FORWARD) -> tuple[Compute, tuple[list[Tensor], list[Tensor]]]:
    shapes = ((m, 1024), (1024, 512), (m, 512))
    a, b, c = (
        Tensor(id=at, name="", shape=shape, dtype=DType.BF16, role=TensorRole.ACTIVATION)
        for at, shape in enumerate(shapes)
    )
    op = Compute(
        id=0, name="aten.mm", phase=phase, flops=2 * m * 1024 * 512, bytes_read=a.nbytes + b.nbytes,
        bytes_written=c.nbytes, attributes=Gemm(),
    )  # fmt: skip
    return op, ([a, b], [c])


def test_a_corrected_profile_is_stored_and_changes_costs_of_its_kind_alone(tmp_path: Path) -> None:
    device = load_device("a100-sxm-80")
    op, operands = product(4096)
    backward, _ = product(4096, Phase.BACKWARD)
    key = kernel_key(op, operands)
    assert key == "product forward bf16"
    corrected = with_traced(device, fit_traced(kernels(key, [1.25] * 12), "a test"))
    write_profile(corrected, tmp_path / "a100-sxm-80.json")
    stored = read_profile(tmp_path / "a100-sxm-80.json")
    assert stored == corrected
    plain = cost_of(op, operands, device)
    assert cost_of(op, operands, stored).seconds == pytest.approx(1.25 * float(plain.seconds))
    assert cost_of(backward, operands, stored) == cost_of(backward, operands, device)


def test_a_correction_that_is_none_is_refused(tmp_path: Path) -> None:
    write_profile(
        with_traced(load_device("a100-sxm-80"), fit_traced(kernels("copy forward bf16", [2.0] * 12), "a test")),
        tmp_path / "p.json",
    )
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace('"predicted_s": [', '"predicted_s": [1.0, '))
    with pytest.raises(DataError, match="predicted_s grow"):
        read_profile(tmp_path / "p.json")
