"""The host's work is counted: not timed, not the capture's own, equal for equal layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from echograph.errors import UsageError
from echograph.frontend.megatron import shims
from echograph.frontend.pytorch.call_nodes import is_getitem
from echograph.frontend.scripts import ADAPTERS, host_work
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.host_work import WORK, HostWork, WorkCounter, compiled, wait_for_value
from echograph.frontend.scripts.recorder import COMMUNICATION
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.world import World
from echograph.ir.columns import NONE
from echograph.ir.graph import JobGraph
from echograph.ir.types import OpKind
from echograph.profiler.costs.host import load_units, slower, told_by
from echograph.workflow import predict
from echograph.workflow.system import System

TRAINING = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).relu()


model = nn.Sequential(*(Layer() for _ in range(4))){device}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 8{on})).sum()
    loss.backward()
    {before}
    optimizer.step()
"""
WORLD = World(size=1, local_size=1)


def _script(folder: Path, before: str = "pass") -> Script:
    path = folder / "train.py"
    path.write_text(TRAINING.format(device=".cuda()", on=", device='cuda'", before=before))
    return Script(path=path, host=load_units())


def _run(script: Script) -> ScriptRun:
    return run_script(script, WORLD, ADAPTERS["torch"]())


def _job(script: Script) -> JobGraph:
    graph = capture_script(script, WORLD, ADAPTERS["torch"]()).graph
    assert isinstance(graph, JobGraph)
    return graph


def _work(run: ScriptRun) -> list[tuple[str, str, str, HostWork]]:
    return [
        (n.meta["phase"], n.meta["module"], str(n.target), n.meta[WORK])
        for n in run.recorder.graph.nodes
        if WORK in n.meta and not is_getitem(n)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ScriptRun:
    """A recorded step with the host's work."""
    return _run(_script(tmp_path_factory.mktemp("work")))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobGraph:
    """The same as a job."""
    return _job(_script(tmp_path_factory.mktemp("job")))


def test_the_same_script_has_the_same_counts(run: ScriptRun, tmp_path: Path) -> None:
    once, again = _work(run), _work(_run(_script(tmp_path)))
    assert [place for *place, _ in again] == [place for *place, _ in once]
    counts = [sum(work.instructions for *_, work in each) for each in (once, again)]
    assert counts[1] == pytest.approx(counts[0], rel=0.02)  # what is done once a process is done already


def test_equal_layers_have_equal_counts(run: ScriptRun) -> None:
    layers = [[(target, work) for phase, module, target, work in _work(run)
               if phase == "forward" and module.split(".")[0] == number] for number in "123"]  # fmt: skip
    assert layers[0]
    assert layers[0] == layers[1] == layers[2]


def test_a_script_s_own_python_counts_and_the_capture_s_does_not(run: ScriptRun, tmp_path: Path) -> None:
    before = sum(work.instructions for *_, work in _work(run))
    loop = "for _ in range(1000): pass"
    after = sum(work.instructions for *_, work in _work(_run(_script(tmp_path, loop))))
    assert 2_990 <= after - before <= 3_100  # an iteration is a FOR_ITER, a STORE_NAME and a jump
    # Each operator is hundreds of the capture's own instructions; a linear layer's two are of one call, in C++.
    products = [work.instructions for phase, _, target, work in _work(run) if "addmm" in target]
    assert products == [0, 0, 0, 0]


def test_what_the_capture_calls_of_others_does_not_count(tmp_path: Path) -> None:
    """Where the host waits, the capture writes a node: torch.fx runs for it, not for the script."""
    counts = [
        sum(work.instructions for *_, work in _work(_run(_script(tmp_path, f"for _ in range(100): {what}"))))
        for what in ("pass", "torch.cuda.synchronize()")
    ]
    assert counts[1] - counts[0] < 100 * 30


def test_what_the_script_calls_of_the_standard_library_counts(tmp_path: Path) -> None:
    begin = "from contextlib import contextmanager, nullcontext; none = contextmanager(lambda: iter([1]))"
    inside = [
        sum(
            work.instructions
            for *_, work in _work(_run(_script(tmp_path, f"{begin}; [{what} for _ in range(100)]")))
        )
        for what in ("none", "none().__enter__()")
    ]
    assert inside[1] - inside[0] > 100 * 20


def test_modules_autograd_and_views_count(run: ScriptRun) -> None:
    forward = [work for phase, _, _, work in _work(run) if phase == "forward"]
    backward = [work for phase, _, _, work in _work(run) if phase == "backward"]
    assert sum(work.modules for work in forward) == 9  # the whole, four layers, a linear in each
    assert sum(work.gradients for work in forward) > 8
    assert sum(work.nodes for work in backward) >= 4 * 4
    assert not any(work.nodes for work in forward)


def test_work_is_of_the_operations_and_scaled_to_a_cluster_s_processor(job: JobGraph) -> None:
    units = load_units()
    told = job.ops.duration_on(units.name)[0]
    assert (told != NONE).any()
    on = {name: System(name).host_of_script(job) for name in ("dgx-h100", "dgx-a100")}
    for name, processor in (("dgx-h100", "xeon-8480c"), ("dgx-a100", "epyc-7742")):
        host = on[name]
        assert host is not None
        assert host.slower == pytest.approx(units.in_training * slower(units.processor, processor))
        issue = host.issue(job)
        views = job.ops.is_view & (told != NONE)
        assert np.abs(issue[views] - host.slower * told[views]).max() <= 0.5
        kernels = ~job.ops.is_view & (told != NONE) & (job.ops.kind == OpKind.COMPUTE)
        assert ((issue - np.rint(host.slower * told))[kernels] == host.kernel_ps).all()


def test_the_step_takes_as_long_as_its_host_issues(job: JobGraph) -> None:
    system = System("dgx-h100")
    host = system.host_of_script(job)
    assert host is not None
    issued = int((host.issue(job) * job.run_counts(0)).sum())
    assert issued <= predict.simulate(job, system, memory=False).step_ps <= 1.2 * issued  # kernels are tiny


def test_without_the_option_nothing_is_told(tmp_path: Path) -> None:
    plain = _job(replace(_script(tmp_path), host=None))
    assert not len(plain.ops.duration.values)
    assert System("dgx-h100").host_of_script(plain) is None


def test_hosts_whose_processor_is_not_known_are_refused(job: JobGraph) -> None:
    system = System("dgx-b300")
    assert not system.cluster.processor
    with pytest.raises(UsageError, match="does not say which processor"):
        system.host_of_script(job)


def test_the_host_waits_where_a_value_is_read(tmp_path: Path) -> None:
    script = _script(tmp_path, "print(loss.item())")
    waits = [n for n in _run(script).recorder.graph.nodes if n.target is wait_for_value]
    assert len(waits) == 1
    read = _job(script)
    rows = np.flatnonzero(read.ops.kind == OpKind.HOST)
    assert len(rows) == 1
    (dep,) = read.ops.deps.row(int(rows[0]))
    assert read.strings[read.ops.name[dep]] == "aten.sum"


@pytest.mark.parametrize(
    ("wait", "until"),
    [
        ("torch.cuda.synchronize()", "last"),
        ("torch.cuda.current_stream().synchronize()", "last"),
        ("done = torch.cuda.Event(); done.record(); loss * 2; done.synchronize()", "before"),
        ("torch.distributed.barrier()", "barrier"),
        ("torch.distributed.barrier(async_op=True).wait()", "barrier"),
    ],
)
def test_the_host_waits_where_it_synchronizes(wait: str, until: str, tmp_path: Path) -> None:
    """It issues nothing until what it waits for has ended, and so what follows comes later."""
    begin = "torch.distributed.is_initialized() or torch.distributed.init_process_group('nccl', device_id=0)"
    job = _job(_script(tmp_path, f"{begin}; {wait}"))
    (row,) = np.flatnonzero(job.ops.kind == OpKind.HOST).tolist()
    names = [job.strings[name] for name in job.ops.name]
    works = [n for n in range(row) if job.ops.kind[n] == OpKind.COMPUTE]
    found = {"last": works[-1], "before": works[-2], "barrier": row - 1}[until]
    assert job.ops.deps.row(row) == (found,)
    assert ("barrier" in names[found]) == (until == "barrier")
    host = System("dgx-h100").host_of_script(job)
    assert host is not None
    assert host.issue(job)[row] == 0


def test_what_waits_is_not_told_where_the_host_is_not_counted(tmp_path: Path) -> None:
    plain = _job(replace(_script(tmp_path, "torch.cuda.synchronize()"), host=None))
    assert not (plain.ops.kind == OpKind.HOST).any()


def test_memory_that_is_filled_is_a_launch_and_a_wait_none(tmp_path: Path) -> None:
    deterministic = (
        "torch.use_deterministic_algorithms(True); print(loss.item()); torch.empty(8, device='cuda').add_(1)"
    )
    job = _job(_script(tmp_path, deterministic))
    host = System("dgx-h100").host_of_script(job)
    assert host is not None
    filled = [row for row, name in enumerate(job.ops.name) if job.strings[name] == "aten.fill_"]
    assert filled
    assert set(host.issue(job)[filled].tolist()) == {host.kernel_ps}
    assert (host.issue(job)[job.ops.kind == OpKind.HOST] == 0).all()


def test_what_is_compiled_counts_as_one_call() -> None:
    counter = WorkCounter()
    seen: list[int] = []

    @compiled
    def inner() -> None:
        seen.append(counter.region)

    @compiled
    def outer() -> None:
        seen.append(counter.region)
        inner()

    counter.begin()
    try:
        outer()
        outer()
    finally:
        counter.end()
    outer()
    assert seen == [1, 1, 2, 2, 0, 0]
    assert counter.muted == 0


class Pair(NamedTuple):
    one: int
    two: int


def test_code_that_python_writes_is_of_who_calls_it() -> None:
    """Functions of dataclasses and of named tuples are in no file: the capture makes some, and scripts do."""

    def instructions(work: Callable[[], object]) -> int:
        counter = WorkCounter()
        counter.begin()
        try:
            work()
        finally:
            counter.end()
        return counter.take()[0]

    one, number = HostWork(instructions=1), 1
    assert instructions(lambda: one + one) == instructions(lambda: number + number)
    assert instructions(lambda: Pair(1, 2)) > instructions(lambda: max(1, 2))


def test_work_is_counted_from_where_the_capture_is_left() -> None:
    """The capture's own code is not traced; frames of the script around it, and those behind it, are."""

    def of_script() -> int:
        return sum(n * n for n in range(10))

    counts = []
    for times in (0, 3):
        counter = WorkCounter()
        counter.begin()
        try:
            of_script()
            for _ in range(times):
                counter.enter()
                of_script()
                with counter.aside():
                    of_script()
                counter.leave()
            of_script()
        finally:
            counter.end()
        counts.append(counter.take()[0])
    none, three = counts
    alone = WorkCounter()
    alone.begin()
    of_script()
    alone.end()
    assert three - none < alone.take()[0] < none / 1.5


HOOKED = """
import torch


def layer(x, weight):
    return x * weight


weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
totals = torch.zeros(16, device="cuda")
weight.total = totals[8:]


def add(parameter):
    parameter.total.add_(parameter.grad)


weight.register_post_accumulate_grad_hook(add)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    layer(torch.ones(8, device="cuda"), weight).sum().backward()
    optimizer.step()
"""


def test_work_is_told_of_what_computes_and_not_of_a_view_before_it(tmp_path: Path) -> None:
    """What a hook adds to is a view of other memory, looked up before: the operator is one, and a kernel."""
    path = tmp_path / "train.py"
    path.write_text(HOOKED)
    job = _job(Script(path=path, host=load_units()))
    names = [job.strings[name] for name in job.ops.name]
    added = names.index("aten.add_")
    assert job.ops.is_view[added - 1]
    told = job.ops.duration_on(load_units().name)[0]
    assert told[added - 1] == NONE != told[added]
    host = System("dgx-h100").host_of_script(job)
    assert host is not None
    assert host.issue(job)[added] > host.kernel_ps


def test_a_hook_of_a_gradient_is_no_part_of_the_call_that_made_it(tmp_path: Path) -> None:
    """Which was compiled: the hook is told as anything else."""
    mark = "from echograph.frontend.scripts.host_work import compiled\n\n\n@compiled\ndef layer"
    path = tmp_path / "train.py"
    path.write_text(HOOKED.replace("def layer", mark))
    graph = _run(Script(path=path, host=load_units())).recorder.graph
    (hook,) = [n for n in graph.nodes if str(n.target) == "aten.add_.Tensor" and n.meta["phase"] == "backward"]
    assert hook.meta[WORK].instructions
    assert not hook.meta[WORK].compiled_backward
    assert sum(n.meta[WORK].compiled_backward for n in graph.nodes if WORK in n.meta) == 1


@pytest.mark.parametrize(("workers", "batches"), [(0, 0), (2, 1)])
def test_batches_of_worker_processes_count(workers: int, batches: int, tmp_path: Path) -> None:
    head, body = TRAINING.format(device=".cuda()", on=", device='cuda'", before="pass").split("for _ in range(3):")
    loader = (
        "data = torch.utils.data.TensorDataset(torch.ones(6, 8), torch.ones(6))\n"
        f"loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers={workers})\n"
        "for x, y in loader:"
    )
    path = tmp_path / "train.py"
    path.write_text(head + loader + body.replace("torch.ones(2, 8, device='cuda')", "x.cuda()"))
    found = [work for *_, work in _work(_run(Script(path=path, host=load_units())))]
    assert sum(work.batches for work in found) == batches
    assert sum(work.handed_over for work in found) == 2 * batches


def test_code_of_a_framework_takes_as_long_as_its_layers_in_place() -> None:
    anyone, known = load_units(), load_units("megatron-core")
    assert known.times_in_place == known.in_place["megatron-core"] > anyone.times_in_place
    assert anyone.times_in_place == load_units("no-such-framework").times_in_place
    ratio = known.seconds(HostWork(instructions=10)) / anyone.seconds(HostWork(instructions=10))
    assert ratio == pytest.approx(known.times_in_place / anyone.times_in_place)
    call = HostWork(stood_in=("Linear.forward",), batches=1, handed_over=2)  # measured as a whole
    assert known.seconds(call) == anyone.seconds(call)
    assert told_by(known.name) == (known, known.processor)
    assert told_by(anyone.name) == (anyone, anyone.processor)
    named = {adapter.host for adapter in (make() for make in ADAPTERS.values())} - {""}
    assert named == {"megatron-core"} <= anyone.in_place.keys()


def test_prices_add_up() -> None:
    units, several = load_units(), HostWork(instructions=10, modules=1, stood_in=("Linear.forward",))
    one: Callable[..., float] = lambda **work: units.seconds(HostWork(**work))  # noqa: E731
    parts: list[dict[str, Any]] = [{"instructions": 10}, {"modules": 1}, {"stood_in": ("Linear.forward",)}]
    assert units.seconds(several) == pytest.approx(sum(one(**part) for part in parts))
    assert several + several == HostWork(instructions=20, modules=2, stood_in=("Linear.forward",) * 2)


@pytest.mark.parametrize("together", [True, False])
def test_messages_of_a_batch_go_out_as_one(tmp_path: Path, together: bool) -> None:
    """NCCL launches once what `batch_isend_irecv` is given; sent one by one, each message is issued by itself."""
    sent = (
        "[s(t, 1), r(t, 1)]" if not together else "torch.distributed.batch_isend_irecv([p(s, t, 1), p(r, t, 1)])"
    )
    begin = "torch.distributed.is_initialized() or torch.distributed.init_process_group('nccl', device_id=0)"
    names = "d = torch.distributed; t, s, r, p = torch.ones(4).cuda(), d.isend, d.irecv, d.P2POp"
    script = _script(tmp_path, f"{begin}; {names}; [w.wait() for w in {sent}]")
    run = run_script(script, World(size=2, local_size=2), ADAPTERS["torch"]())
    messages = [n for n in run.recorder.graph.nodes if getattr(n.meta.get(COMMUNICATION), "peer", -1) >= 0]
    messages = [node for node in messages if not is_getitem(node)]
    assert len(messages) >= 2
    issued = sum(WORK in node.meta for node in messages)
    assert issued == len(messages) / (2 if together else 1)


OF_A_LIBRARY = """
import torch
from torch import nn
from echograph.frontend.scripts.host_work import known_as

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 2).relu()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * 3).neg()

@known_as("{name}")
def twice(x):
    for _ in range(1000): pass
    return Twice.apply(x)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return twice(self.linear(x))

model = nn.Sequential(Layer(), Layer()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("known", [True, False])
def test_a_function_that_stands_in_counts_as_one_call_each_way(tmp_path: Path, known: bool) -> None:
    name = "mamba_split_conv1d_scan_combined" if known else "unheard of"
    path = tmp_path / "train.py"
    path.write_text(OF_A_LIBRARY.format(name=name))
    work = _work(_run(Script(path=path, host=load_units())))
    calls = [(phase, call) for phase, _, _, of in work for call in of.stood_in]
    one_each = [("forward", f"{name}.forward")] * 2 + [("backward", f"{name}.backward")] * 2
    assert calls == (one_each if known else [])
    # Each operator of it still is issued; what is in it, here a loop of 3,000 instructions, is in the whole.
    issued = [target for _, _, target, _ in work if any(word in target for word in ("mul", "relu", "neg"))]
    assert len(issued) == 8
    assert (sum(of.instructions for *_, of in work) < 4_000) == known


def attention(ranks: int = 1, mask: str = "causal", forks: bool = False) -> Any:
    return SimpleNamespace(ranks_around=ranks, attends=("self", mask), forks=forks)


@pytest.mark.parametrize(("one_kernel", "kind"), [("1", "fused"), ("0", "unfused")])
def test_what_some_calls_of_attention_do_besides_is_known(
    monkeypatch: pytest.MonkeyPatch, one_kernel: str, kind: str
) -> None:
    for name in host_work._KERNELS:
        monkeypatch.setenv(name, one_kernel)
    names = host_work._attending(attention(mask="padding", forks=True), anew=True)
    assert names[0] == f"DotProductAttention {kind}"
    assert {name.removeprefix("DotProductAttention ") for name in names[1:]} == {
        "chosen anew", f"{kind}, padding", "forks",
    }  # fmt: skip
    assert load_units().stands_in.issuperset(names)


def test_a_ring_of_attention_has_a_step_for_each_rank() -> None:
    units = load_units()
    of_two, of_four = (host_work._attending(attention(ranks), anew=False) for ranks in (2, 4))
    assert units.stands_in.issuperset(of_four)
    assert host_work._attending(attention(), anew=False) == ("DotProductAttention fused",)
    forward = [units.seconds(HostWork(stood_in=tuple(f"{n}.forward" for n in of))) for of in (of_two, of_four)]
    step = units.seconds(HostWork(stood_in=("DotProductAttention step of a ring.forward",)))
    assert forward[1] - forward[0] == pytest.approx(2 * step)
    assert forward[0] > 2 * units.seconds(HostWork(stood_in=("DotProductAttention fused.forward",)))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, ""),
        ({"tp_size": 2, "parallel_mode": None}, ""),
        ({"tp_size": 2, "parallel_mode": "row", "sequence_parallel": False}, " by rows"),
        ({"tp_size": 4, "parallel_mode": "column", "sequence_parallel": True}, " by columns, sequences"),
    ],
)
def test_products_that_ranks_divide_take_the_host_longer(given: dict[str, Any], name: str) -> None:
    units = load_units()
    assert host_work._divided(SimpleNamespace(**given)) == name
    whole, divided = (
        units.seconds(HostWork(stood_in=(f"Linear{of}.forward", f"Linear{of}.backward"))) for of in ("", name)
    )
    assert (divided > whole) == bool(name)


def test_an_update_takes_what_transformer_engines_does_for_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones(2)
    counter, seen = WorkCounter(), []
    counter.stands_in = load_units().stands_in
    step = shims._update(lambda optimizer: seen.append((counter.function, counter.muted)))
    optimizer = torch.optim.Adam(parameters)
    step(optimizer)
    monkeypatch.setattr(WorkCounter, "current", counter)
    step(optimizer)
    counter.stands_in = frozenset()
    step(optimizer)
    names = ("FusedAdam parameter",) * 2
    assert seen == [(None, 0), ((1, *names), 1), (None, 0)]
    one, two = (HostWork(stood_in=tuple(f"{name}.forward" for name in of)) for of in (names[:1], names))
    assert load_units().seconds(one) > 5e-6
    assert load_units().seconds(two) == pytest.approx(2 * load_units().seconds(one))
