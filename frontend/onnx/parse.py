"""From the bytes of an ONNX file to a message that can be read without surprises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from echograph.errors import FormatError, MissingExtraError
from echograph.ir.files import read_whole

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto


def parse(path: Path) -> ModelProto:
    """A file as the message it holds; files with external data are not opened.

    Raises:
        InputError: the file cannot be read, holds no model, or names data outside its folder, or a device or pipe.
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
    for tensor in _external(model):
        _check_place(path, tensor)
    return model


def _external(message: Any) -> Iterator[TensorProto]:
    """The tensors, wherever in a message, whose data are in another file."""
    for entry, value in message.ListFields():
        if entry.type == entry.TYPE_MESSAGE:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _external(part)
    if message.DESCRIPTOR.name == "TensorProto" and len(message.external_data):
        yield message


def _check_place(path: Path, tensor: TensorProto) -> None:
    """Other programs open what a model names: what lies outside its folder is no part of it.

    Raises:
        FormatError: the tensor's data are outside the model's folder, or in a device or a pipe.
    """
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    where = f"{path}: tensor '{tensor.name[:40]}': its data are in '{location[:80]}'"
    if (
        not location
        or "\0" in location
        or PurePosixPath(location).is_absolute()
        or PureWindowsPath(location).anchor
    ):
        raise FormatError(f"{where}, no path below the model's folder: export the model again")
    folder = path.resolve().parent
    try:
        place = (folder / location.replace("\\", "/")).resolve()
        outside = not place.is_relative_to(folder)
        odd = not outside and place.exists() and not (place.is_file() or place.is_dir())
    except (OSError, RuntimeError):
        outside = odd = True
    if outside:
        raise FormatError(
            f"{where}, outside the model's folder: put the data beside the model and export it again"
        )
    if odd:
        raise FormatError(f"{where}, a device or a pipe: export the model again")


def _is_text(message: Any) -> bool:
    """Whether all text of a message is: ONNX's schema does not check, and gives bytes where it is not."""
    for entry, value in message.ListFields():
        texts = () if entry.type != entry.TYPE_STRING else [value] if isinstance(value, str | bytes) else value
        parts = () if entry.type != entry.TYPE_MESSAGE else [value] if hasattr(value, "ListFields") else value
        if any(isinstance(text, bytes) for text in texts) or not all(_is_text(part) for part in parts):
            return False
    return True
