"""The graph of one step against what can be said of small models by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

import torch
import torch.distributed as dist
from networkx import DiGraph, ancestors, is_directed_acyclic_graph, read_gml
from torch import nn

from echograph.profiler.comms.tracer import shared_capture
from echograph.profiler.record.dependencies import StepObserver, dependencies, write_dependencies

pytestmark = pytest.mark.torch


class Residual(nn.Module):
    """Two linear layers, and a sum around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.first(x).relu()
        return self.second(y) + y


@pytest.fixture
def four() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def observe(step: Callable[[], None]) -> StepObserver:
    observer, capture = StepObserver(), shared_capture()
    observer.install()
    capture.add(observer)
    try:
        step()
    finally:
        capture.remove(observer)
        observer.remove()
    return observer


def replicate(model: Any, **options: Any) -> Any:
    """DDP as on real ranks, but for a hook: a group that moves nothing has no results for the reducer."""
    model = nn.parallel.DistributedDataParallel(model, init_sync=False, **options)

    # Without annotations: DDP compares them with its own.
    def reduce(state, bucket):  # type: ignore[no-untyped-def]
        dist.all_reduce(bucket.buffer(), async_op=True)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, reduce)
    return model


def train(model: Any, loss: Callable[[Any], Any] = lambda y: (y * y).sum()) -> Callable[[], None]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss(model(torch.ones(2, 4))).backward()
        sgd.step()
        sgd.zero_grad()

    return step


def test_operators_follow_autograds_graph() -> None:
    graph = dependencies(observe(train(Residual())))
    forward = {
        ("I/O", "FW.first.Addmm"),
        ("FW.first.Addmm", "FW.Relu"),
        ("FW.Relu", "FW.second.Mm"),
        ("FW.Relu", "FW.Add"),
        ("FW.second.Mm", "FW.Add"),
        ("FW.Add", "FW.Mul"),
        ("FW.Mul", "FW.Sum"),
        ("FW.Sum", "OUTPUT0"),
        ("OUTPUT0", "BW.Sum"),
    }
    # Transposes of weights stand between parameters and products.
    transposed = {
        ("I/O", "FW.first.T"), ("FW.first.T", "FW.first.Addmm"),
        ("I/O", "FW.second.T"), ("FW.second.T", "FW.second.Mm"),
    }  # fmt: skip
    edges = set(graph.edges)
    ours = {edge for edge in edges if edge[0] != "STEP" and not edge[0].startswith("BW")}
    assert ours == (forward | transposed) - {("I/O", "FW.first.Addmm")}
    pairs = {(a, b) for a, b in ours if a.startswith("FW") and b.startswith("FW")}
    backward = {(a, b) for a, b in edges if a.startswith("BW") and b.startswith("BW")}
    assert backward == {("BW" + b[2:], "BW" + a[2:]) for a, b in pairs}
    assert {a for a, b in edges if b == "STEP"} == {"BW.first.Addmm", "BW.first.T", "BW.second.T"}
    assert is_directed_acyclic_graph(graph)


def test_a_bucket_follows_the_operators_that_fill_it(four: None) -> None:
    model = Residual()
    observer = observe(train(replicate(model)))
    graph = dependencies(observer)
    assert [p.name for p in observer.parameters] == ["first.weight", "first.bias", "second.weight"]
    (bucket,) = [node for node, op in graph.nodes(data="op") if op == "Comm"]
    assert bucket == "Comm.0+1+2"
    assert graph.nodes[bucket]["bytes"] == 4 * (24 + 6 + 36)
    assert set(graph.predecessors(bucket)) == {"BW.first.Addmm", "BW.first.T", "BW.second.T"}
    assert set(graph.successors(bucket)) == {"STEP"}
    assert set(graph.predecessors("STEP")) == {bucket}


def test_buckets_share_the_gradients_by_their_sizes(four: None) -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    # Two layers of 16 floats fill a bucket.
    model = replicate(layers, bucket_cap_mb=2 * 64 / 2**20)
    step = train(model)
    step()
    observer = observe(step)
    # Beside them, DDP tells all ranks of its new buckets.
    buckets = [one for one in observer.communications if one.gradients]
    reduced = [sorted(one.gradients) for one in buckets]
    assert sorted(number for gradients in reduced for number in gradients) == list(range(6))
    assert [len(gradients) * 64 for gradients in reduced] == [one.call.kind.bytes for one in buckets]
    graph = dependencies(observer)
    for gradients in reduced:
        name = "Comm." + "+".join(map(str, gradients))
        assert set(graph.predecessors(name)) == {f"BW.{layer}.T" for layer in gradients}


def test_a_function_that_communicates_waits_for_itself(four: None) -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = x.clone()
            dist.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            return gradient

    class Split(Residual):
        def forward(self, x: Any) -> Any:
            return self.second(Sum.apply(self.first(x)))

    graph = dependencies(observe(train(Split())))
    assert set(graph.predecessors("Comm.all_reduce.0")) == {"FW.first.Addmm"}
    assert set(graph.successors("Comm.all_reduce.0")) == {"FW.Sum"}
    assert set(graph.predecessors("Comm.all_reduce.1")) == {"BW.second.Mm"}
    assert set(graph.successors("Comm.all_reduce.1")) == {"BW.Sum"}


def test_what_follows_the_optimizer_follows_step(four: None) -> None:
    model = Residual()
    step = train(model)

    def and_gather() -> None:
        step()
        dist.all_reduce(torch.ones(3))

    graph = dependencies(observe(and_gather))
    assert set(graph.predecessors("Comm.all_reduce.0")) == {"STEP"}


def test_shared_modules_checkpoints_and_frozen_parameters_make_a_graph() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return checkpoint(self.block, self.frozen(self.block(x)), use_reentrant=False)

    observer = observe(train(Twice()))
    graph = dependencies(observer)
    assert is_directed_acyclic_graph(graph)
    assert {"FW.block.Addmm", "FW.block.Addmm_1", "FW.frozen.Addmm"} <= set(graph)
    assert [p.name for p in observer.parameters] == ["block.weight", "block.bias"]
    assert "FW.block.Addmm" in ancestors(graph, "FW.block.Addmm_1")
    assert {"BW.block.Addmm", "BW.block.Addmm_1"} <= set(graph.predecessors("STEP"))


def test_the_file_reads_as_it_was(tmp_path: Path, four: None) -> None:
    observer = observe(train(replicate(Residual())))
    write_dependencies(observer, tmp_path)
    read, graph = read_gml(tmp_path / "dag.gml"), dependencies(observer)
    assert isinstance(read, DiGraph)
    assert set(read.edges) == set(graph.edges)
    assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
    names = (tmp_path / "gradient_name_list.txt").read_text().splitlines()
    assert names == ["first.weight", "first.bias", "second.weight"]


def test_nothing_is_left_behind(four: None) -> None:
    from torch.nn.modules import module

    backward = torch.autograd.backward
    step = train(replicate(Residual()))
    observer = observe(step)
    step()
    assert not observer._ready
    assert torch.autograd.backward is backward
    assert not module._global_forward_hooks and not module._global_forward_pre_hooks
    assert not observer._known
