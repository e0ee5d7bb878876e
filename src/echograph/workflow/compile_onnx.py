"""`echoc compile --onnx`: an ONNX file as a step graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from echograph.errors import UnknownNameError, UsageError
from echograph.progress import Progress, silent

if TYPE_CHECKING:
    from echograph.frontend.onnx.compile import Compiled


def compile_onnx_file(
    path: Path,
    *,
    dims: Sequence[str] = (),
    train: bool = False,
    loss: str = "auto",
    step: Mapping[str, Any] = MappingProxyType({}),
    branch: str = "",
    say: Progress = silent,
) -> Compiled:
    """The step graph of a model: its forward pass, or with `train` a whole training step.

    Args:
        path: the file.
        dims: sizes of dimensions without one, as "name=size" or "input.position=size".
        train: whether the step trains.
        loss: what it is trained on (`frontend.onnx.loss`).
        step: fields of `StepSpec`; dtype where it is left out is the file's, and the others count with `train`.
        branch: which branch an `If` takes where data decide: then or else; "" refuses.
        say: is told what is going on.

    Raises:
        UsageError: an option does not fit the file.
        EchoError: what `frontend.onnx` raises.
    """
    if not train and ({"clip_grad_norm", "master_weights"} & step.keys() or loss != "auto"):
        raise UsageError("--clip-grad-norm, --master-weights and --loss are of a training step: add --train")
    if branch not in ("", "then", "else"):
        raise UnknownNameError("branch", branch, ("then", "else"))
    from echograph.frontend.onnx.model import read

    sizes = dict(_size(text) for text in dims)
    say(f"reading {path}")
    model = read(path, sizes)
    from echograph.frontend.onnx.compile import compile_onnx
    from echograph.frontend.onnx.dtypes import step_type
    from echograph.frontend.pytorch.spec import StepSpec

    spec = StepSpec(**{"dtype": step_type(model), **step})
    say(f"running {path} without data")
    return compile_onnx(model, spec, train=train, loss=loss, branch=branch)


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isascii() or not size.isdigit() or len(size) > 18:
        raise UsageError(f"--dim {text}: give a name and a size, as --dim batch=8")
    return name, int(size)
