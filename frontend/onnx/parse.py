"""From the bytes of an ONNX file to a message that can be read without surprises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import FormatError, MissingExtraError
from echograph.ir.files import read_whole

if TYPE_CHECKING:
    from onnx import ModelProto


def parse(path: Path) -> ModelProto:
    """A file as the message it holds; files with external data are not opened.

    Raises:
        InputError: the file cannot be read, or holds no model.
        MissingExtraError: the `onnx` package is not installed.
    """
    try:
        import onnx
    except ImportError:
        raise MissingExtraError("onnx", "onnx", "reading ONNX models") from None
    data = read_whole(path, "give the path of an ONNX model")
    try:
        # Other than `onnx.load`, this looks for no file beside it.
        model = onnx.ModelProto.FromString(data)
    except Exception:
        raise FormatError(f"{path}: not an ONNX model, or truncated: export it again") from None
    if not model.graph.node or not _is_text(model):
        raise FormatError(f"{path}: holds no ONNX graph, or text that is none: export the model again")
    return model


def _is_text(message: Any) -> bool:
    """Whether all text of a message is: ONNX's schema does not check, and gives bytes where it is not."""
    for entry, value in message.ListFields():
        texts = () if entry.type != entry.TYPE_STRING else [value] if isinstance(value, str | bytes) else value
        parts = () if entry.type != entry.TYPE_MESSAGE else [value] if hasattr(value, "ListFields") else value
        if any(isinstance(text, bytes) for text in texts) or not all(_is_text(part) for part in parts):
            return False
    return True
