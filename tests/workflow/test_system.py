"""What a system says of a device: nothing that its datasheet does not say."""

from __future__ import annotations

import pytest

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph, Workload
from echograph.ir.types import DType
from echograph.workflow.system import System


@pytest.mark.parametrize(
    ("cluster", "dtype", "teraflops"),
    [
        ("dgx-h100", DType.BF16, 989.4),
        ("dgx-h100", DType.FP16, 989.4),  # of the same units
        ("dgx-h100", DType.FP32, 66.9),
        ("dgx-h100", DType.FP64, 0.0),
        ("dgx-h100", DType.INT8, 0.0),
    ],
)
def test_a_type_without_a_peak_has_none(cluster: str, dtype: DType, teraflops: float) -> None:
    """Not fp32's: a utilisation over another type's peak would be some number that nothing stands for."""
    builder = GraphBuilder(name="step", workload=Workload(dtype=dtype))
    builder.program([])
    peak = System(cluster).peak_flops_per_s(builder.build(StepGraph))
    assert peak == pytest.approx(teraflops * 1e12)
