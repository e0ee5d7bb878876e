"""The tracer in one process, on a backend that moves nothing: what is seen, what is left alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import echograph
from echograph.errors import OutputError, UsageError
from echograph.profiler.comms import tracer as tracer_module
from echograph.profiler.comms.groups import spell_ranks
from echograph.profiler.comms.tracer import Writer

torch = pytest.importorskip("torch", reason="needs the [torch] extra")
dist = torch.distributed

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("four")]
all_reduce_before = dist.all_reduce


def lines(file: Path, kind: str = "") -> list[Any]:
    """The rows of a trace, or its objects of one kind."""
    values = [json.loads(line) for line in file.read_text().splitlines()]
    if not kind:
        return [value for value in values if isinstance(value, list)]
    return [value for value in values if isinstance(value, dict) and value["line"] == kind]


def ones(n: int) -> Any:
    return torch.ones(n)


CALLS: list[tuple[Callable[[], Any], str, int, int, int]] = [
    (lambda: dist.all_reduce(ones(8)), "all_reduce", 32, 32, 32),
    (lambda: all_reduce_before(ones(8)), "all_reduce", 32, 32, 32),
    (lambda: dist.group.WORLD.allreduce([ones(8)]), "all_reduce", 32, 32, 32),
    (lambda: dist.all_gather([ones(2) for _ in range(4)], ones(2)), "all_gather", 32, 8, 32),
    (lambda: dist.all_gather_into_tensor(ones(8), ones(2)), "all_gather_into_tensor", 32, 8, 32),
    (lambda: dist.reduce_scatter(ones(2), [ones(2) for _ in range(4)]), "reduce_scatter", 32, 32, 8),
    (lambda: dist.reduce_scatter_tensor(ones(2), ones(8)), "reduce_scatter_tensor", 32, 32, 8),
    (lambda: dist.broadcast(ones(8), 0), "broadcast", 32, 32, 32),
    (lambda: dist.broadcast(ones(8), 1), "broadcast", 32, 0, 32),
    (lambda: dist.reduce(ones(8), 0), "reduce", 32, 32, 32),
    (lambda: dist.reduce(ones(8), 1), "reduce", 32, 32, 0),
    (lambda: dist.gather(ones(2), [ones(2) for _ in range(4)], 0), "gather", 32, 8, 32),
    (lambda: dist.gather(ones(2), None, 1), "gather", 32, 8, 0),
    (lambda: dist.scatter(ones(2), [ones(2) for _ in range(4)], 0), "scatter", 32, 32, 8),
    (lambda: dist.scatter(ones(2), None, 1), "scatter", 32, 0, 8),
    (lambda: dist.all_to_all([ones(2) for _ in range(4)], [ones(2) for _ in range(4)]), "all_to_all", 32, 32, 32),
    (lambda: dist.all_to_all_single(ones(8), ones(8)), "all_to_all_single", 32, 32, 32),
    (lambda: dist.send(ones(8), 1), "send", 32, 32, 0),
    (lambda: dist.recv(ones(8), 1), "recv", 32, 0, 32),
    (lambda: dist.irecv(ones(8)), "recv", 32, 0, 32),
    (lambda: dist.barrier(), "barrier", 0, 0, 0),
]


@pytest.mark.parametrize(("call", "operation", "size", "given", "got"), CALLS)
def test_a_call_is_seen_once_with_its_bytes(
    call: Callable[[], Any], operation: str, size: int, given: int, got: int, tmp_path: Path
) -> None:
    with echograph.trace_collectives(tmp_path / "trace.jsonl") as tracer:
        call()
    assert tracer.counts() == {(operation, "0-3", size): 1}
    (what,) = lines(tmp_path / "trace.0.jsonl", "what")
    assert (what["input_bytes"], what["output_bytes"], what["group"]) == (given, got, "0-3")
    assert what["site"].startswith("test_tracer.py:")
    assert lines(tmp_path / "trace.0.jsonl", "end") == [{"line": "end", "calls": 1}]
    ((number, sequence, _, start, end, wait),) = lines(tmp_path / "trace.0.jsonl")
    assert (number, sequence) == (what["id"], 0)
    assert 0 <= start <= end
    assert wait >= 0 or what.get("asynchronous")


def test_async_is_seen_however_it_is_asked_for(tmp_path: Path) -> None:
    with echograph.trace_collectives(tmp_path / "trace.jsonl"):
        dist.all_reduce(ones(1), dist.ReduceOp.SUM, None, True)
        dist.all_reduce(ones(2), async_op=True).wait()
        dist.all_reduce(ones(3))
        dist.isend(ones(4), 1)
        dist.send(ones(5), 1)
    signatures = lines(tmp_path / "trace.0.jsonl", "what")
    assert {what["bytes"] // 4: what.get("asynchronous", False) for what in signatures} == {
        1: True, 2: True, 3: False, 4: True, 5: False,
    }  # fmt: skip


def test_an_operation_and_a_group_by_position_are_told_apart(tmp_path: Path) -> None:
    side = dist.new_group([0, 2])
    with echograph.trace_collectives(tmp_path / "trace.jsonl") as tracer:
        dist.reduce_scatter_tensor(ones(2), ones(4), dist.ReduceOp.SUM, side)
    assert tracer.counts() == {("reduce_scatter_tensor", "0,2", 16): 1}


def test_work_that_nobody_waits_for_leaves_its_row(tmp_path: Path) -> None:
    with echograph.trace_collectives(tmp_path / "trace.jsonl"):
        dist.all_reduce(ones(1), async_op=True)
    ((_, _, _, start, end, wait),) = lines(tmp_path / "trace.0.jsonl")
    assert start == 0 <= end
    assert wait == -1


def test_work_is_pytorchs_own(tmp_path: Path) -> None:
    untraced = dist.all_reduce(ones(1), async_op=True)
    with echograph.trace_collectives(tmp_path / "trace.jsonl"):
        traced = dist.all_reduce(ones(1), async_op=True)
        assert type(traced) is type(untraced)
        assert isinstance(traced, dist.Work)
        assert tracer_module._capture._latest is traced
        traced.wait()
        # Nothing of ours keeps it, or the tensors that it holds, alive.
        assert tracer_module._capture._latest is None
    assert traced.get_future().done()


def test_stopping_puts_everything_back(tmp_path: Path) -> None:
    def state() -> list[Any]:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        c10d = torch.distributed.distributed_c10d
        return [
            *[has(name, "BackendSelect") for name in ("c10d::allreduce_", "c10d::send", "c10d::barrier")],
            has("_c10d_functional::wait_tensor", "BackendSelect"),
            dist.Work.wait,
            # As it lies in the class, where how it is bound is told as well.
            *[vars(dist.ProcessGroup)[name] for name in ("_start_coalescing", "_end_coalescing")],
            c10d._register_process_group,
            c10d._unregister_process_group,
            c10d._unregister_all_process_groups,
        ]

    before = state()
    tracer = echograph.trace_collectives(tmp_path / "trace.jsonl")
    assert not any(was == now for was, now in zip(before, state(), strict=True))
    tracer.stop()
    tracer.stop()
    assert state() == before
    dist.all_reduce(ones(1))
    assert tracer.counts() == {}
    assert not list(tmp_path.iterdir())


def block(*sizes: int) -> Any:
    """Reduces in a coalesced block, begun and ended by hand."""
    world, cpu = dist.group.WORLD, torch.device("cpu")
    world._start_coalescing(cpu)
    for size in sizes:
        world.allreduce([ones(size)])
    return world._end_coalescing(cpu)


def test_calls_of_a_coalesced_block_end_with_it(tmp_path: Path) -> None:
    with echograph.trace_collectives(tmp_path / "trace.jsonl") as tracer:
        together = block(1, 2)
        dist.all_reduce(ones(3))
        assert [call.kind.bytes for call in tracer_module._capture._kept_alive.values()] == [4, 8]
        together.wait()
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as managed:
            dist.broadcast(ones(4), 0)
            dist.broadcast(ones(5), 0)
        managed.wait()
    assert tracer.counts() == {
        ("all_reduce", "0-3", 4): 1, ("all_reduce", "0-3", 8): 1, ("all_reduce", "0-3", 12): 1,
        ("broadcast", "0-3", 16): 1, ("broadcast", "0-3", 20): 1,
    }  # fmt: skip
    signatures = {what["id"]: what for what in lines(tmp_path / "trace.0.jsonl", "what")}
    rows = {signatures[row[0]]["bytes"] // 4: row for row in lines(tmp_path / "trace.0.jsonl")}
    assert {size: signatures[row[0]].get("coalesced", False) for size, row in rows.items()} == {
        1: True, 2: True, 3: False, 4: True, 5: True,
    }  # fmt: skip
    # The wait for the block is the wait of each of its calls.
    assert all(rows[size][2] + rows[size][5] > rows[3][2] for size in (1, 2))
    assert all(row[4] >= 0 and row[5] >= 0 for row in rows.values())
    # Without a tracer the methods are bound as before.
    block(1).wait()


def test_two_tracers_see_everything_each_and_stop_alone(tmp_path: Path) -> None:
    first = echograph.trace_collectives(tmp_path / "first.jsonl")
    dist.all_reduce(ones(1))
    second = echograph.trace_collectives(tmp_path / "second.jsonl")
    with pytest.raises(UsageError, match="another tracer"):
        echograph.trace_collectives(tmp_path / "second.jsonl")
    dist.all_reduce(ones(2))
    first.stop()
    dist.all_reduce(ones(3))
    second.stop()
    assert [size for _, _, size in first.counts()] == [4, 8]
    assert [size for _, _, size in second.counts()] == [8, 12]
    # The same call has the same number in both.
    assert [row[1] for row in lines(tmp_path / "first.0.jsonl")] == [0, 1]
    assert [row[1] for row in lines(tmp_path / "second.0.jsonl")] == [1, 2]


def test_a_disabled_tracer_does_nothing(tmp_path: Path) -> None:
    tracer = echograph.trace_collectives(tmp_path / "trace.jsonl", enabled=False)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
    dist.all_reduce(ones(1))
    tracer.attach(torch.nn.Linear(1, 1)).stop()
    assert tracer.counts() == {} and not list(tmp_path.iterdir())


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_wrong_arguments_are_refused_in_a_line(timeout: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        echograph.trace_collectives(tmp_path / "trace.jsonl", timeout_s=timeout)
    with pytest.raises(OutputError, match="no folder"):
        echograph.trace_collectives(tmp_path / "none" / "trace.jsonl")


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.0.jsonl").symlink_to("/dev/full")
    with echograph.trace_collectives(tmp_path / "trace.jsonl") as tracer:
        for _ in range(100):
            dist.all_reduce(ones(1))
    assert tracer.counts() == {("all_reduce", "0-3", 4): 100}
    assert tracer.dropped == 100
    assert capsys.readouterr().err.count("No space left") == 1


def test_memory_is_bounded_when_the_disk_cannot_follow(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "trace", queue=10, interval_s=3600)
    writer._wake.set = lambda: None  # type: ignore[method-assign]
    for n in range(25):
        writer.put((0, n, 0, 0, 0, 0))
    assert (len(writer._lines), writer.dropped) == (10, 15)
    del writer._wake.set
    writer.close()
    assert len(lines(tmp_path / "trace")) == 10


def test_what_the_tracer_cannot_describe_is_counted_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with echograph.trace_collectives(tmp_path / "trace.jsonl") as tracer:
        dist.all_reduce(ones(1))
        capture = tracer_module._capture
        monkeypatch.setattr(capture._kinds, "of", lambda *_: 1 / 0)
        before = capture.errors
        dist.all_reduce(ones(1))
        dist.all_reduce(ones(1))
        assert capture.errors == before + 2
        monkeypatch.undo()
        monkeypatch.setattr(capture._events, "read", lambda: 1 / 0)
        capture.read_events()
        assert capture.errors == before + 3
    assert tracer.calls == 1
    assert capsys.readouterr().err.count("could not be traced") == (before == 0)
    capture.errors = 0


def test_groups_of_the_same_ranks_are_numbered_in_the_order_of_their_making(tmp_path: Path) -> None:
    with echograph.trace_collectives(tmp_path / "trace.jsonl") as tracer:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        dist.all_reduce(ones(1), group=second)
        dist.all_reduce(ones(2), group=first)
        dist.destroy_process_group(first)
        third = dist.new_group([1, 0])
        dist.all_reduce(ones(3), group=third)
    assert {group: size for _, group, size in tracer.counts()} == {"0,1#2": 4, "0,1": 8, "0,1#3": 12}
    groups = {line["name"]: line["ranks"] for line in lines(tmp_path / "trace.0.jsonl", "group")}
    assert groups == {"0,1": [0, 1], "0,1#2": [0, 1], "0,1#3": [0, 1]}


def test_ranks_are_spelled_shortly_and_differently() -> None:
    assert spell_ranks([3]) == "3"
    assert spell_ranks([1, 0]) == "0,1"
    assert spell_ranks(range(8)) == "0-7"
    assert spell_ranks(range(0, 16, 4)) == "0-12:4"
    assert spell_ranks([0, 1, 5]) == "0,1,5"
    odd = [n * n for n in range(20)]
    assert len(spell_ranks(odd)) < 60
    assert spell_ranks(odd) != spell_ranks([*odd[:-2], 400, odd[-1]])


def test_phase_and_module_of_an_attached_model(tmp_path: Path) -> None:
    class Reducing(torch.nn.Linear):  # type: ignore[misc,name-defined]
        def forward(self, x: Any) -> Any:
            dist.all_reduce(ones(1))
            return super().forward(x)

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.again = Reducing(2, 2), Reducing(2, 2)
            self.kept.weight.register_hook(lambda gradient: dist.all_reduce(ones(2)))

        def forward(self, x: Any) -> Any:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.again, self.kept(x), use_reentrant=False)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: dist.all_reduce(ones(3)))
    with echograph.trace_collectives(tmp_path / "trace.jsonl") as tracer:
        tracer.attach(model)
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        dist.all_reduce(ones(4))
    rows = lines(tmp_path / "trace.0.jsonl")
    signatures = {what["id"]: what for what in lines(tmp_path / "trace.0.jsonl", "what")}
    told = [
        (
            signatures[row[0]].get("phase", ""),
            signatures[row[0]].get("module", ""),
            signatures[row[0]]["bytes"] // 4,
        )
        for row in rows
    ]
    assert told[:2] == [("forward", "kept", 1), ("forward", "again", 1)]
    assert ("recompute", "again", 1) in told
    assert ("backward", "kept", 2) in told
    assert told[-2:] == [("optimizer", "", 3), ("", "", 4)]


def test_a_forked_child_traces_nothing(tmp_path: Path) -> None:
    import os

    with echograph.trace_collectives(tmp_path / "trace.jsonl") as tracer:
        dist.all_reduce(ones(1))
        child = os.fork()
        if child == 0:
            dist.all_reduce(ones(1))
            os._exit(0 if tracer.calls == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dist.all_reduce(ones(1))
    assert len(lines(tmp_path / "trace.0.jsonl")) == 2


@pytest.mark.slow
def test_a_file_system_that_fills_up_in_the_middle_of_a_job(tmp_path: Path) -> None:
    """64 KiB of memory as a disk; what was written is whole, and the job of 20,000 calls goes on."""
    script = """
import sys, torch, echograph
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
tracer = echograph.trace_collectives(sys.argv[1])
for _ in range(20000):
    dist.all_reduce(torch.ones(1))
tracer.stop()
print(tracer.calls, tracer.dropped, len(open(tracer.file, "rb").read().splitlines()))
from echograph.profiler.comms.report import report_on
from pathlib import Path
report = report_on(Path(sys.argv[1]).parent)
print(report.calls, report.problems)
"""
    (tmp_path / "job.py").write_text(script)
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=64k none {tmp_path}/disk"
    isolated = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*isolated, mount], capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    job = f"{mount} && {sys.executable} {tmp_path}/job.py {tmp_path}/disk/trace.jsonl"
    done = subprocess.run([*isolated, job], capture_output=True, text=True, check=True)
    told, found = done.stdout.splitlines()
    calls, dropped, kept = map(int, told.split())
    assert calls == 20000 and 0 < calls - dropped < kept
    assert found.startswith(f"{calls - dropped} ") and "without an end" in found
    assert done.stderr.count("training goes on") == 1


def test_what_a_full_disk_has_taken_is_whole_lines(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from echograph.profiler.comms.tracer import Writer
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
writer = Writer(Path(sys.argv[1]))
for n in range(200):
    writer.put((0, n, 10**18, 0, 5, 0))
writer.close()
print(writer.dropped)
"""
    command = [sys.executable, "-c", script, tmp_path / "trace"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kept = lines(tmp_path / "trace")
    assert (tmp_path / "trace").read_bytes().endswith(b"\n")
    assert 0 < len(kept) == 200 - int(done.stdout)
    assert [row[1] for row in kept] == list(range(len(kept)))
    assert done.stderr.count("training goes on") == 1
