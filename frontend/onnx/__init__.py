"""ONNX models as step graphs; `load` reads the forward pass of a file as it stands, for `echoc import onnx`.

`model.read` parses a file and needs the `onnx` package alone; `compile.compile_onnx` runs what was read on fake
tensors under the PyTorch frontend's recorder, so an ONNX and a PyTorch model become graphs in the same words.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from echograph.errors import MissingExtraError
from echograph.ir.formats import Imported


def load(source: Path) -> Imported:
    """Reads the forward pass of a model whose sizes are all in the file.

    Raises:
        InputError: the file cannot be read, or the model breaks a rule of ONNX.
        UsageError: the file has symbolic dimensions.
        CaptureError: the model cannot run; names the node.
        MissingExtraError: the `onnx` package or PyTorch is not installed.
    """
    _require_torch()
    from echograph.frontend.onnx.call import step_type
    from echograph.frontend.onnx.compile import compile_onnx
    from echograph.frontend.onnx.model import read
    from echograph.frontend.pytorch.spec import StepSpec

    model = read(source)
    compiled = compile_onnx(model, StepSpec(dtype=step_type(model)))
    return Imported(
        graph=compiled.graph,
        notes=(
            "the forward pass alone: echoc compile --onnx FILE --train adds the rest of a training step",
            *compiled.notes,
        ),
    )


def _require_torch() -> None:
    """Says that a model runs on PyTorch's fake tensors before the file is read.

    Raises:
        MissingExtraError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("PyTorch", "torch", "compiling an ONNX model")
