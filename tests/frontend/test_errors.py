"""What a user can get wrong ends in one line: what, where, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from echograph.errors import CaptureError, EchoError, InputError, UsageError  # noqa: E402
from echograph.frontend.pytorch.capture import capture, capture_mode  # noqa: E402
from echograph.frontend.pytorch.spec import StepSpec  # noqa: E402
from echograph.frontend.pytorch.userfile import build_from_file  # noqa: E402

pytestmark = pytest.mark.torch


class Outer(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.first, self.inner = torch.nn.Linear(4, 4), inner

    def forward(self, x: Any) -> Any:
        return self.inner(self.first(x))


class Branching(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


class Selecting(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[x > 0]


class Raising(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        raise ValueError("no such luck\nand a second line")


class Recovering(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Raising()

    def forward(self, x: Any) -> Any:
        try:
            return self.inner(x)
        except ValueError:
            return x


class Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise ValueError("no gradient today")


class OnTheGpu(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + torch.zeros(4, device="cuda").to("cpu")


def line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


INPUT = (torch.zeros(2, 4),)


@pytest.mark.parametrize(
    ("producer", "module", "parts"),
    [
        ("recorder", Branching, ["'inner' (Branching)", "test_errors.py:", "control flow"]),
        ("recorder", Selecting, ["'inner' (Selecting)", "test_errors.py:", "aten.nonzero", "a shape"]),
        ("recorder", Raising, ["'inner' (Raising)", "test_errors.py:", "ValueError: no such luck"]),
        ("aot", Branching, ["'inner' (Branching)", "test_errors.py:", "control flow"]),
        ("aot", Selecting, ["aten.nonzero", "a shape"]),
        ("aot", Raising, ["'inner' (Raising)", "test_errors.py:", "ValueError: no such luck"]),
    ],
)
def test_module_that_cannot_be_captured(capture_step: Any, producer: str, module: Any, parts: list[str]) -> None:
    with pytest.raises(CaptureError) as error:
        capture_step(lambda: (Outer(module()), INPUT, torch.sum), producer=producer)
    for part in parts:
        assert part in line(error)


def test_exception_that_the_model_handles_is_no_error(capture_step: Any) -> None:
    graph = capture_step(lambda: (Outer(Recovering()), INPUT, torch.sum))
    assert {n.meta["module"] for n in graph.nodes if n.meta.get("phase") == "forward"} == {"first", ""}


def raising_loss(output: Any) -> Any:
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: (torch.nn.Linear(4, 4), INPUT), ["Linear returned a tensor of shape [2, 4]", ".mean()"]),
        (lambda: (torch.nn.Linear(4, 4), INPUT, lambda o: o), ["the loss function", "shape [2, 4]"]),
        (lambda: (torch.nn.Linear(4, 4), INPUT, lambda o: 3.0), ["the loss function returned a float"]),
        (lambda: (torch.nn.Linear(4, 4), INPUT, lambda o: o.detach().sum()), ["does not depend on", "detach"]),
        (
            lambda: (torch.nn.Linear(4, 4), INPUT, raising_loss),
            ["outside of its forward", "KeyError", "test_errors.py:"],
        ),
        (lambda: (torch.nn.Linear(4, 4), INPUT, lambda o: Wrapped.apply(o).sum()), ["no gradient today"]),
        (lambda: (torch.nn.ReLU(), INPUT, torch.sum), ["ReLU has no trainable parameter"]),
        (lambda: (torch.nn.Linear(4, 4).requires_grad_(False), INPUT, torch.sum), ["no trainable parameter"]),
        (lambda: (torch.nn.Linear(5, 4), INPUT, torch.sum), ["'(root)' (Linear)", "RuntimeError"]),
        (lambda: (torch.nn.Linear(4, 4), (), torch.sum), ["'(root)' (Linear)", "TypeError"]),
        (lambda: (torch.nn.Linear(4, 4, device="meta"), INPUT, torch.sum), ["'weight' is on 'meta'", "CPU"]),
        (lambda: (Outer(OnTheGpu()), INPUT, torch.sum), ["made on 'cuda", "device of its inputs"]),
    ],
)
def test_step_that_cannot_be_captured(capture_step: Any, build: Any, parts: list[str]) -> None:
    with pytest.raises(CaptureError) as error:
        capture_step(build)
    for part in parts:
        assert part in line(error)


def test_module_with_real_memory() -> None:
    with pytest.raises(CaptureError) as error:
        capture(torch.nn.Linear(4, 4), INPUT, torch.sum, StepSpec())
    assert "'weight' holds real memory" in line(error)


def test_recomputation_that_the_module_does_not_offer(capture_step: Any, build_mlp: Any) -> None:
    with pytest.raises(CaptureError, match="Mlp does not support activation checkpointing"):
        capture_step(build_mlp, recompute=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int8"), ("optimizer", "lion"), ("clip_grad_norm", 0.0), ("clip_grad_norm", float("nan"))],
)
def test_step_that_is_not_one(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        StepSpec(**{field: value})


GOOD = """
import torch
from neighbour import WIDTH
def build():
    return torch.nn.Linear(WIDTH, 4), (torch.zeros(2, WIDTH),), lambda output: output.mean()
"""


def test_user_file_is_captured(tmp_path: Path, capture_step: Any) -> None:
    (tmp_path / "neighbour.py").write_text("WIDTH = 6\n")
    (tmp_path / "model.py").write_text(GOOD)
    graph = capture_step(lambda: build_from_file(f"{tmp_path}/model.py:build"))
    weights = [n.meta["val"].shape for n in graph.nodes if n.meta.get("role") == "parameter"]
    assert [tuple(w) for w in weights] == [(4, 6), (4,)]


@pytest.mark.parametrize(
    ("text", "function", "parts"),
    [
        (GOOD, "built", ["no function 'built'", "it has build"]),
        ("x = 1", "build", ["no function 'build'", "it has none"]),
        ("import nothing_like_it", "build", ["model.py:1", "ModuleNotFoundError"]),
        ("def build(:", "build", ["import raised SyntaxError"]),
        ("raise SystemExit('stop')", "build", ["model.py:1", "SystemExit: stop"]),
        ("def build():\n    return 1 / 0", "build", ["model.py:2", "build() raised ZeroDivisionError"]),
        ("def build(x):\n    return x", "build", ["build() raised TypeError"]),
        ("def build():\n    pass", "build", ["build returned None", "(module, inputs, loss)"]),
        ("def build():\n    return 1, 2, 3, 4", "build", ["a tuple of 4"]),
        ("def build():\n    return 1, ()", "build", ["type int as the module"]),
        ("import torch\ndef build():\n    return torch.nn.ReLU(), 3", "build", ["type int as inputs"]),
        ("import torch\ndef build():\n    return torch.nn.ReLU(), (), 3", "build", ["type int as the loss"]),
    ],
)
def test_user_file_that_is_wrong(tmp_path: Path, text: str, function: str, parts: list[str]) -> None:
    (tmp_path / "model.py").write_text(text)
    with capture_mode(), pytest.raises(InputError) as error:
        build_from_file(f"{tmp_path}/model.py:{function}")
    for part in parts:
        assert part in line(error)


@pytest.mark.parametrize(
    ("reference", "kind"),
    [
        ("model.py", UsageError),
        ("model.py:", UsageError),
        ("model:build", UsageError),
        ("gone.py:build", InputError),
    ],
)
def test_reference_that_names_no_function(reference: str, kind: type[EchoError]) -> None:
    with pytest.raises(kind, match=r"FILE\.py:FUNCTION"):
        build_from_file(reference)


def test_operator_without_a_shape_rule(capture_step: Any) -> None:
    """It must not run on real memory instead."""
    with torch.library._scoped_library("echograph_test", "FRAGMENT") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CPU")
        with pytest.raises(CaptureError) as error:
            capture_step(
                lambda: (torch.nn.Linear(4, 4), INPUT, lambda o: torch.ops.echograph_test.mystery(o).sum())
            )
    assert "echograph_test.mystery" in line(error) and "no shape rule" in line(error)
