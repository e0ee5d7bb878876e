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
    assert names(fused) == ["compiled.dropout_add", "aten.keep"]
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


def in_place(job: Job, name: str, over: int, read: list[int], region: KernelRegion | None) -> int:
    """An operation that writes its result over a tensor."""
    made = job.builder.tensor(
        f"{name}.{len(job.regions)}", (SIZE, SIZE), DType.BF16, TensorRole.ACTIVATION, alias_of=over
    )
    job.builder.compute(
        f"aten.{name}", phase=Phase.FORWARD, inputs=[over, *read], outputs=[made],
        bytes_read=2 * SIZE * SIZE, bytes_written=2 * SIZE * SIZE,
    )  # fmt: skip
    job.regions.append(region)
    return made


def softmax_in_place(maker: str) -> JobGraph:
    """As Megatron-LM's fused cross-entropy has it: a copy, then less its rows' most, then its exponentials."""
    job, region = Job(), KernelRegion(maker, 1)
    given, most = job.tensor("given", TensorRole.INPUT), job.tensor("most", TensorRole.INPUT)
    (copied,) = job.add("mm", [given], None)
    less = in_place(job, "sub_", copied, [most], region)
    exponentials = in_place(job, "exp", less, [], region)
    job.add("mm", [exponentials], None)
    return job.fused()


def test_what_a_compiled_region_writes_in_place_is_written_once() -> None:
    fused = softmax_in_place(COMPILED)
    assert names(fused) == ["aten.mm", "compiled.exp", "aten.mm"]
    kernel = fused.ops[1]
    assert isinstance(kernel, Compute)
    # The most of each row is as large as all here.
    assert (kernel.bytes_read, kernel.bytes_written) == (4 * SIZE * SIZE, 2 * SIZE * SIZE)
    # What is written over the copy is still the copy's memory.
    (made,) = kernel.outputs
    assert fused.tensors[made].alias_of == fused.ops[0].outputs[0]


def test_a_kernel_written_by_hand_is_told_by_its_own_functions() -> None:
    assert names(softmax_in_place(FUSED)) == ["aten.mm", "aten.sub_", "aten.exp", "aten.mm"]


def test_a_maximum_whose_place_nobody_reads_joins_a_compiled_region() -> None:
    def found(*, read: bool) -> list[str]:
        job, region = Job(), KernelRegion(COMPILED, 1)
        (scaled,) = job.add("mul", [job.tensor("given", TensorRole.INPUT)], region)
        rows = [job.builder.tensor(f"rows{i}", (SIZE, 1), DType.BF16, TensorRole.ACTIVATION) for i in range(2)]
        job.builder.compute(
            "aten.max", phase=Phase.FORWARD, inputs=[scaled], outputs=rows, bytes_read=2 * SIZE * SIZE,
            bytes_written=4 * SIZE,
        )  # fmt: skip
        job.regions.append(region)
        job.add("mm", [scaled, rows[read]], None)
        return names(job.fused())

    assert found(read=False) == ["compiled.norm", "aten.mm"]
    assert found(read=True) == ["aten.mul", "aten.max", "aten.mm"]
