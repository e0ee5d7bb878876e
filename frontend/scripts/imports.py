"""Imports of a script that fail, put off until what they name is used.

Scripts import what the step that is captured does not use: loggers of pictures, optimizers to choose from, names
of an older version. What such an import names is there, and no more of it is known than the name: who calls it, or
asks whether it is true, raises what the import would have raised. Packages that are installed, and scripts that
have another way where an import fails, find what they would find.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.installed import package_of
from echograph.frontend.scripts.values import NoteTaker

_OWN = str(Path(__file__).parent.parent.parent.resolve())
_LIBRARIES = (sysconfig.get_path("stdlib"), *site.getsitepackages(), _OWN, "<")
_UNUSED = "nothing that is captured uses it"
# What is raised for want of a module or a name.
_FAILURES = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")


class _Lacking(type):
    """What a failed import names: a class, of which others may be derived, and no object be made."""

    error: ImportError

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name) from cls.error
        if name == "__version__":
            cls._fail()
        return _lacking(f"{cls.__module__}.{cls.__name__}", name, cls.error)

    def _fail(cls, *_: Any, **__: Any) -> NoReturn:
        raise cls.error

    __call__ = __bool__ = __iter__ = __len__ = __contains__ = _fail

    def __getitem__(cls, _: Any) -> Any:
        """Of an annotation."""
        return cls


def _lacking(module: str, name: str, error: ImportError) -> Any:
    return _Lacking(name, (), {"__module__": module, "error": error})


@contextmanager
def put_off(note: NoteTaker) -> Iterator[None]:
    """In the context, what a script's own files import need not be there before it is used.

    Args:
        note: is told what is not there.
    """

    def importing(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(
            name: str, globals: Mapping[str, Any] | None = None, locals: Any = None,
            fromlist: Sequence[str] | None = (), level: int = 0,
        ) -> Any:  # fmt: skip
            # Of a frame the interpreter tells its auditors, and PyTorch imports in each call of an operator.
            file = globals.get("__file__") if globals else None
            if level or (type(file) is str and not is_of_script(file)):
                return original(name, globals, locals, fromlist, level)
            if not _of_script(frame := sys._getframe(1)):
                return original(name, globals, locals, fromlist, level)
            try:
                module = original(name, globals, locals, fromlist, level)
            except ModuleNotFoundError as error:
                if not _may_wait(frame, name, error):
                    raise
                note(f"{_line(frame)} imports {error.name}, which is not installed: {_UNUSED}")
                package = name.partition(".")[0]
                if not fromlist and package in sys.modules:
                    return sys.modules[package]  # which lacks a part
                return _lacking("", name if fromlist else package, error)
            return _with_names(module, fromlist or (), frame, note)

        return load

    with patched(builtins, "__import__", importing):
        yield


def _with_names(module: ModuleType, names: Sequence[str], frame: FrameType, note: NoteTaker) -> Any:
    """A module, or the names of it that a script imports, where it has not all of them."""
    gone = [name for name in names if name != "*" and not _has(module, name)]
    empty = bool(gone) and _is_empty(module)
    if not gone or not (empty or _installed(module)) or is_caught(frame):
        return module
    there = {name: getattr(module, name) for name in names if name not in gone}
    for name in gone:
        told = f"cannot import name '{name}' from '{module.__name__}' ({getattr(module, '__file__', None)})"
        if empty:
            told = f"{module.__name__} is an empty folder: fetch it (git submodule update --init), or install it"
        error = ImportError(told, name=module.__name__, path=getattr(module, "__file__", None))
        there[name] = _lacking(module.__name__, name, error)
        note(f"{_line(frame)} imports {name}, which {module.__name__} has not: {_UNUSED}")
    made = ModuleType(module.__name__)
    vars(made).update(there)
    return made


def _is_empty(module: ModuleType) -> bool:
    """Whether a folder without files stands for a package, as a submodule of git that was not fetched."""
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    return getattr(module, "__file__", None) is None and bool(folders) and not any(map(_files, folders))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.name != "__pycache__"]


def _has(module: ModuleType, name: str) -> bool:
    # As the interpreter looks for a name: in the module, then among modules.
    return hasattr(module, name) or f"{module.__name__}.{name}" in sys.modules


def _may_wait(frame: FrameType, name: str, error: ModuleNotFoundError) -> bool:
    """Whether it is a package, or a part of one that is installed, and the script has no other way without it.

    What an installed package lacks itself, and a part of the script that has to be built, is missing at once.
    """
    if error.name is None or not f"{name}.".startswith(f"{error.name}.") or is_caught(frame):
        return False
    package = error.name.partition(".")[0]
    if package == error.name:
        return True
    try:
        found = find_spec(package)
    except ValueError:  # a stand-in
        return False
    return found is not None and found.origin is not None and bool(package_of(found.origin))


def _installed(module: ModuleType) -> bool:
    return bool(package_of(getattr(module, "__file__", None) or ""))


def _of_script(frame: FrameType) -> bool:
    return is_of_script(frame.f_code.co_filename)


@cache
def is_of_script(name: str) -> bool:
    """Of a file; PyTorch's own import in each call of an operator."""
    return not name.startswith(_LIBRARIES) and not package_of(name)


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_caught(frame: FrameType) -> bool:
    """Whether a failing import is caught, where it stands or where a script imports the file of it.

    Args:
        frame: that imports.
    """
    within: FrameType | None = frame
    while within is not None:
        # Without any `try` or `with` there is nothing to read, which takes long.
        asked = bool(within.f_code.co_exceptiontable) and (within is frame or _of_script(within))
        if asked and _is_caught(within.f_code.co_filename, within.f_lineno, within is frame):
            return True
        within = within.f_back
    return False


def _is_caught(file: str, line: int, all_of_it: bool) -> bool:
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    # A statement of a file takes a fraction of the time to read that the file takes.
    begin = next((at for at in range(line - 1, -1, -1) if _begins(lines[at])), 0) if line <= len(lines) else 0
    end = next((at for at in range(line, len(lines)) if _begins(lines[at])), len(lines))
    caught = _caught("".join(lines[begin:end]), all_of_it)
    if caught is None:  # what stood at the beginning of a line was no statement
        begin, caught = 0, _caught("".join(lines), all_of_it)
    return any(line - begin in span for span in caught or ())


def _begins(line: str) -> bool:
    """Whether a statement that stands in none begins with a line."""
    return line[:1] not in _WITHIN and not line.startswith(("except", "else", "elif", "finally"))


_WITHIN = ("", " ", "\t", "\f", "\r", "\n", "#", ")", "]", "}")


@cache
def _caught(text: str, all_of_it: bool) -> list[range] | None:
    """Lines of a text where a failing import is caught; of those of imports alone, unless all are asked for.

    None: it is no source.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.Try | ast.With) and _catches(node)]
    inner = [part for guard in guards for part in guard.body]
    if not all_of_it:
        inner = [part for top in inner for part in ast.walk(top) if isinstance(part, ast.Import | ast.ImportFrom)]
    return [range(part.lineno, (part.end_lineno or part.lineno) + 1) for part in inner]


def _catches(node: ast.Try | ast.With) -> bool:
    if isinstance(node, ast.Try):
        kinds = [handler.type for handler in node.handlers]
        return any(kind is None or not _names(kind).isdisjoint(_FAILURES) for kind in kinds)
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any("suppress" in _names(call.func) for call in calls)


def _names(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
    }
