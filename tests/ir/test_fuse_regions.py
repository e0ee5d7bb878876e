"""Regions of a captured job become kernels, and nothing else of it does."""

from __future__ import annotations

import pytest

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph, Workload
from echograph.ir.passes.fuse import COMPILED, FUSED, KernelRegion, fuse_regions
from echograph.ir.types import Compute, DType, Phase, TensorRole

SIZE = 1024


class Job:
    """A job of elementwise operations on [SIZE, SIZE] in bf16, written one after the other."""

    def __init__(self) -> None:
        self.builder = GraphBuilder(name="job", workload=Workload(dtype=DType.BF16))
        self.builder.stream("compute")
        self.regions: list[KernelRegion | None] = []
        self.last: dict[str, int] = {}

    def tensor(self, name: str, role: TensorRole = TensorRole.ACTIVATION) -> int:
        return self.builder.tensor(name, (SIZE, SIZE), DType.BF16, role)

    def add(
        self, name: str, read: list[int], region: KernelRegion | None, made: int = 1, after: tuple[int, ...] = ()
    ) -> list[int]:
        outputs = [self.tensor(f"{name}.{len(self.regions)}.{i}") for i in range(made)]
        nbytes = SIZE * SIZE * 2
        self.last[name] = self.builder.compute(
            f"aten.{name}", phase=Phase.FORWARD, inputs=read, outputs=outputs, deps=after,
            bytes_read=nbytes * len(read), bytes_written=nbytes * made,
        )  # fmt: skip
        self.regions.append(region)
        return outputs

    def fused(self) -> JobGraph:
        self.builder.program([(0, 0, self.builder.op_count(), 0, 0)], role="every rank", ranks=(0,))
        return fuse_regions(self.builder.build(JobGraph), self.regions)


def names(job: JobGraph) -> list[str]:
    return [job.strings[name] for name in job.ops.name.tolist()]


@pytest.mark.parametrize("maker", [FUSED, COMPILED])
def test_a_region_is_a_kernel_that_moves_what_goes_in_and_out(maker: str) -> None:
    job, region = Job(), KernelRegion(maker, 1)
    given = job.tensor("given", TensorRole.INPUT)
    (scaled,) = job.add("mul", [given], region)
    (made,) = job.add("tanh", [scaled], region)
    job.add("mm", [made], None)
    fused = job.fused()
    assert names(fused) == [f"{maker}.tanh", "aten.mm"]
    kernel = fused.ops[0]
    assert isinstance(kernel, Compute)
    assert kernel.bytes_read == kernel.bytes_written == SIZE * SIZE * 2


def test_neighbouring_regions_and_what_is_in_none_stay_apart() -> None:
    job = Job()
    (one,) = job.add("mul", [job.tensor("given", TensorRole.INPUT)], KernelRegion(COMPILED, 1))
    (two,) = job.add("tanh", [one], KernelRegion(COMPILED, 2))
    (three,) = job.add("add", [two], None)
    job.add("add", [three], None)
    assert names(job.fused()) == ["aten.mul", "aten.tanh", "aten.add", "aten.add"]


def test_random_numbers_of_a_dropout_are_drawn_within() -> None:
    job, region = Job(), KernelRegion(COMPILED, 1)
    given, residual = job.tensor("given", TensorRole.INPUT), job.tensor("residual", TensorRole.INPUT)
    (biased,) = job.add("add", [given], region)
    dropped, mask = job.add("native_dropout", [biased], region, made=2)
    (made,) = job.add("add", [dropped, residual], region)
    job.add("keep", [mask, made], None)
    fused = job.fused()
    assert names(fused) == ["compiled.add", "aten.keep"]
    assert len(fused.ops.outputs.row(0)) == 2, "the mask is written, what it was multiplied with is not"


def test_a_kernel_runs_before_what_waits_for_a_part_of_it_and_after_what_a_part_waits_for() -> None:
    job, region = Job(), KernelRegion(COMPILED, 1)
    given = job.tensor("given", TensorRole.INPUT)
    job.add("first", [given], None)
    (one,) = job.add("mul", [given], region, after=(job.last["first"],))
    (two,) = job.add("tanh", [one], region)
    job.add("waits", [given], None, after=(job.last["tanh"],))
    (three,) = job.add("sin", [two], region)
    job.add("reads", [three], None)
    fused = job.fused()
    kernel = names(fused).index("compiled.sin")
    assert list(fused.ops.deps.row(kernel)) == [names(fused).index("aten.first")]
    assert list(fused.ops.deps.row(names(fused).index("aten.waits"))) == [kernel]
    assert kernel < names(fused).index("aten.waits")
