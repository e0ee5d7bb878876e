"""What a capture remembers of operators changes nothing of what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from script_ranks import PROGRAMS
from torch._subclasses.fake_tensor import FakeTensorMode

from echograph.frontend.pytorch.annotate import VAL
from echograph.frontend.pytorch.recorder import OperatorRecorder
from echograph.frontend.pytorch.shapes import Results, Shapes
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.recorder import ScriptRecorder
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir import serde

CASES = [
    pytest.param("ddp", 4, (), id="ddp"),
    pytest.param("tensor_parallel", 4, ("--sequence",), id="dtensor"),
    pytest.param("fsdp1", 2, (), id="fsdp1", marks=pytest.mark.slow),
    pytest.param("fsdp2", 4, ("--replicas", "2", "--accumulate", "2"), id="hsdp", marks=pytest.mark.slow),
    pytest.param("pipeline", 2, (), id="1f1b", marks=pytest.mark.slow),
]


def job_bytes(name: str, size: int, arguments: tuple[str, ...]) -> bytes:
    script = Script(path=PROGRAMS / f"{name}.py", arguments=arguments)
    return b"".join(serde.encode(capture_script(script, World(size=size), TorchAdapter()).graph))


@pytest.mark.parametrize(("name", "size", "arguments"), CASES)
def test_a_job_is_the_one_that_fake_tensors_alone_give(
    name: str, size: int, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's fake tensors, asked each time, and a handle of its own for each recorded value are the oracle."""
    remembered = job_bytes(name, size, arguments)
    asked = []

    def ask(self: Shapes, func: Any, args: Any, kwargs: Any) -> Any:
        asked.append(func)
        return func(*args, **kwargs)

    monkeypatch.setattr(Shapes, "call", ask)
    monkeypatch.setattr(ScriptRecorder, "_snapshot", OperatorRecorder._snapshot)
    assert job_bytes(name, size, arguments) == remembered
    assert len(asked) > 100


def test_a_second_run_learns_nothing_that_the_first_one_knew() -> None:
    script, world = Script(path=PROGRAMS / "ddp.py"), World(size=4)
    results: Results = {}
    first = run_script(script, world, TorchAdapter(), results)
    known = len(results)
    second = run_script(script, world, TorchAdapter(), results)
    assert len(results) == known > 50
    layouts = [[_layout(node.meta.get(VAL)) for node in run.recorder.graph.nodes] for run in (first, second)]
    assert layouts[0] == layouts[1]


VIEWS = {
    "view": lambda x: x.view(2, 3),
    "slice": lambda x: x[1:5:2],
    "expand": lambda x: x[:1].expand(4),
    "detach": lambda x: x.detach(),
    "sum": lambda x: x.sum(),
    "as strided": lambda x: x.as_strided((2, 2), (1, 2)),
    "as strided from": lambda x: x.as_strided((2, 2), (1, 2), 3),
    "other type": lambda x: x.view(torch.int64),
}


@pytest.mark.parametrize("view", VIEWS)
def test_where_an_argument_begins_in_memory_is_no_matter_unless_the_operator_says(view: str) -> None:
    """Parameters and gradients lie in flat buffers, each elsewhere."""
    mode, results = FakeTensorMode(), Results()
    with mode, OperatorRecorder(mode) as recorder:
        recorder._shapes = Shapes(mode, results)
        flat = torch.empty(48, dtype=torch.int32)
        parts = [flat[begin : begin + 6] for begin in (6, 12, 24)]
        known = len(results)
        made = [VIEWS[view](part) for part in parts]
        learnt = len(results) - known
    with mode:
        expected = [VIEWS[view](part) for part in parts]
    assert [(_layout(t), t.storage_offset()) for t in made] == [(_layout(t), t.storage_offset()) for t in expected]
    anywhere = view in ("as strided", "as strided from", "other type")
    assert learnt >= 3 if anywhere else learnt <= 2


def _layout(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def test_what_a_framework_compiles_where_it_is_imported_stays_as_it_is() -> None:
    def plain() -> None: ...

    class Framework(TorchAdapter):
        made: tuple[Any, ...] = ()

        @contextmanager
        def installed(self, world: World, recorder: ScriptRecorder) -> Iterator[None]:
            self.made = torch.compile(plain), torch.compile(mode="max-autotune")(plain)
            with super().installed(world, recorder):
                yield

    compiler, adapter = torch.compile, Framework()
    run_script(Script(path=PROGRAMS / "ddp.py"), World(size=2), adapter)
    assert adapter.made == (plain, plain)
    assert torch.compile is compiler
