"""From the bytes of an ONNX file to a message that can be read without surprises, local functions inlined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from echograph.errors import FormatError, InputError, MissingExtraError
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


MAX_NODES = 1_000_000
OWN_DOMAIN = "echograph"
"""Of functions that stand for operators of a step graph: their calls stay what they are."""
Key = tuple[str, str]


def inline_functions(model: ModelProto, source: str) -> ModelProto:
    """The model with each call of a local function replaced by the function's nodes.

    Args:
        model: is not changed.
        source: the file's name, for messages.

    Raises:
        InputError: a function calls itself, or the model would have more than `MAX_NODES` nodes.
    """
    if not model.functions:
        return model
    bodies = {(f.domain, f.name): [(n.domain, n.op_type) for n in f.node] for f in model.functions}
    sizes: dict[Key, int] = {}
    for key in bodies:
        _measure(key, bodies, sizes, source)
    total = sum(sizes.get((n.domain, n.op_type), 1) for n in model.graph.node)
    if total > MAX_NODES:
        raise InputError(
            f"{source}: {total} nodes with its functions inlined, more than {MAX_NODES}: export a part"
        )
    from onnx import inliner

    try:
        kept = [(f.domain, f.name) for f in model.functions if f.domain == OWN_DOMAIN]
        return inliner.inline_selected_functions(model, kept, exclude=True)
    except Exception as error:
        line = (str(error).strip().splitlines() or ["no reason given"])[0][:200]
        raise InputError(
            f"{source}: its functions cannot be inlined ({line}): export it without functions"
        ) from None


def _measure(key: Key, bodies: dict[Key, list[Key]], sizes: dict[Key, int], source: str) -> None:
    """Nodes that a function becomes; depth first on a stack of our own, since files may nest at will."""
    open_calls: set[Key] = set()
    stack = [key]
    while stack:
        current = stack[-1]
        if current in sizes:
            open_calls.discard(stack.pop())
            continue
        open_calls.add(current)
        missing = [callee for callee in bodies[current] if callee in bodies and callee not in sizes]
        if not missing:
            sizes[current] = min(MAX_NODES + 1, sum(sizes.get(callee, 1) for callee in bodies[current]))
        elif missing[0] in open_calls:
            raise InputError(f"{source}: function '{missing[0][1]}' calls itself: export it without functions")
        else:
            stack.append(missing[0])
