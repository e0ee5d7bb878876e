"""A user's own model: `file.py:function`, a function that builds a module, example inputs and a loss.

    def build():
        model = MyModel()
        return model, (torch.zeros(8, 512, dtype=torch.long),), lambda output: output.mean()

The inputs are a tuple (positional) or a mapping (keyword arguments). The loss takes the module's output; it
is left out, or None, where the module returns the loss or an object with `.loss`.

`reason` says in one line what a user's code raised, and `user_line` where.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from echograph.errors import EchoError, InputError, UsageError
from echograph.frontend.pytorch.step import Inputs, LossFunction

_LONGEST_REASON = 200


def reason(error: BaseException) -> str:
    """Type and first line of an exception; of one that says nothing, as an `assert`, the code that raised it."""
    lines = str(error).strip().splitlines() or [_code(error) or "no message"]
    # pydantic says in two further lines what is wrong of which field.
    more = 2 if re.match(r"\d+ validation errors? for ", lines[0]) else int(lines[0].endswith(":"))
    first_line = " ".join(line.strip() for line in lines[: 1 + more])
    return f"{type(error).__name__}: {first_line[:_LONGEST_REASON]}"


def _code(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def user_line(error: BaseException) -> str:
    """`name.py:line` of the innermost frame that is neither PyTorch's nor ours; "" if there is none."""
    import torch

    libraries = [Path(torch.__file__).resolve().parent, Path(__file__).resolve().parent]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.suffix == ".py" and not any(path.is_relative_to(library) for library in libraries):
            return f"{path.name}:{frame.lineno}"
    return ""


_MODULE_NAME = "echograph_user_model"


@contextmanager
def without_bytecode() -> Iterator[None]:
    """In the context what is imported is not left compiled beside a user's files."""
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = writes or sys.pycache_prefix is None
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes


def build_from_file(reference: str) -> tuple[nn.Module, Inputs, LossFunction | None]:
    """Runs the function that `file.py:function` names; call it under `capture_mode`.

    Raises:
        UsageError: the reference has another form.
        InputError: the file or function is missing, raises, or returns something else.
    """
    name, separator, function_name = reference.rpartition(":")
    if not separator or not function_name.isidentifier() or not name.endswith(".py"):
        raise UsageError(f"model '{reference}': give a Python file and a function in it, as FILE.py:FUNCTION")
    path = Path(name)
    if not path.is_file():
        raise InputError(f"{name}: no such file: give a Python file and a function in it, as FILE.py:FUNCTION")
    with _importable(path.parent):
        loaded = _run(path, "import", lambda: _load(path))
        function = getattr(loaded, function_name, None)
        if not callable(function):
            raise InputError(f"{name}: no function '{function_name}' in it: {_functions_of(loaded)}")
        return _checked(_run(path, f"{function_name}()", function), f"{name}:{function_name}")


def _load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickling look their module up
    specification.loader.exec_module(module)
    return module


def _run(path: Path, what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except EchoError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{user_line(error) or path.name}: {what} raised {reason(error)}: "
            "run the file by itself, then capture it"
        ) from error


def _checked(result: Any, where: str) -> tuple[nn.Module, Inputs, LossFunction | None]:
    wanted = "return (module, inputs) or (module, inputs, loss)"
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise InputError(f"{where} returned {_describe(result)}: {wanted}")
    module, inputs, loss = result if len(result) == 3 else (*result, None)
    if not isinstance(module, nn.Module):
        raise InputError(f"{where} returned {_describe(module)} as the module: {wanted}, module a torch.nn.Module")
    if not isinstance(inputs, tuple | Mapping):
        raise InputError(f"{where} returned {_describe(inputs)} as inputs: {wanted}, inputs a tuple or a dict")
    if loss is not None and not callable(loss):
        raise InputError(
            f"{where} returned {_describe(loss)} as the loss: {wanted}, loss a function of the output"
        )
    return module, inputs, loss


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _functions_of(module: ModuleType) -> str:
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == _MODULE_NAME]
    return f"it has {', '.join(own[:8])}" if own else "it has none"


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets the file import its neighbours, as running it would."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        with without_bytecode():
            yield
    finally:
        sys.path.remove(entry)
        sys.modules.pop(_MODULE_NAME, None)
