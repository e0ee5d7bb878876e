"""PyTorch's compiler is imported where something asks for it: a capture compiles nothing.

`import torch` leaves `torch._dynamo` out. What then imports it does so for next to nothing: fake tensors read a
setting, optimizers and checkpoints say that they are not to be compiled, DDP asks whether it would be. That takes
half as long as all else of PyTorch. So for as long as fake tensors are used, a module of that name stands there
which has the settings and those few answers, and becomes the whole one as soon as it is asked for anything else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch._guards import GuardSource, Source
from torch.utils._python_dispatch import _disable_current_modes

_NAME = "torch._dynamo"


@contextmanager
def left_out(importing: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[None]:
    """In the context, the compiler is imported no sooner than something needs it.

    Args:
        importing: in which it is, then: it keeps functions of PyTorch that it finds.
    """
    if _NAME in sys.modules:
        yield
        return
    place = _Place(importing)
    sys.meta_path.insert(0, place)
    place.take()
    try:
        yield
    finally:
        if not place.loaded:
            place.leave()


def is_here() -> bool:
    """Whether the compiler is imported, and something may have been compiled."""
    place = sys.modules.get(_NAME)
    return place is not None and type(place) is ModuleType


class _Place(MetaPathFinder, Loader):
    """Holds the compiler's place, and finds its parts: with the first of them all of it is imported.

    Attributes:
        loaded: whether it is there.
    """

    def __init__(self, importing: Callable[[], AbstractContextManager[None]]) -> None:
        self.loaded = False
        self._importing = importing
        self._told: list[Any] = []

    def take(self) -> None:
        """A module is there that has the settings, which import nothing, and the answers."""
        spec = importlib.util.find_spec(_NAME)
        assert spec is not None
        self._module = sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        vars(torch)["_dynamo"] = self._module
        self.loaded = True  # its settings are found as ever
        importlib.import_module(f"{_NAME}.config")
        self.loaded = False
        source = self._sources()
        self._answers = {
            "disable": self._disable, "graph_break": lambda *_, **__: None, "utils": _Utilities(self),
            "trace_rules": _Rules(self), "source": source,
        }  # fmt: skip
        vars(self._module).update(self._answers)
        sys.modules[f"{_NAME}.source"] = source
        self._module.__class__ = type("_Waiting", (ModuleType,), {"__getattr__": self._asked})

    def leave(self) -> None:
        """All is as it was."""
        sys.meta_path.remove(self)
        self._forget()
        for name in (_NAME, f"{_NAME}.config", f"{_NAME}.source"):
            del sys.modules[name]
        del vars(torch)["_dynamo"]

    def load(self) -> ModuleType:
        """The whole compiler, which is the module that stood there."""
        if not self.loaded:
            self.loaded = True
            sys.meta_path.remove(self)
            self._forget()
            for name in self._answers:
                vars(self._module).pop(name, None)
            del sys.modules[f"{_NAME}.source"]
            self._module.__class__ = ModuleType
            assert self._module.__spec__ is not None and self._module.__spec__.loader is not None
            with self._importing(), _disable_current_modes():
                self._module.__spec__.loader.exec_module(self._module)
        return self._module

    def _asked(self, name: str) -> Any:
        if name.startswith("__"):  # inspect looks through all modules
            raise AttributeError(f"module '{_NAME}' has no attribute '{name}'")
        return getattr(self.load(), name)

    def _sources(self) -> ModuleType:
        """`torch._dynamo.source` where fake tensors are made of real ones."""
        made = ModuleType(f"{_NAME}.source")
        vars(made).update(_SOURCES, __getattr__=lambda name: self._of_part("source", name))
        return made

    def _of_part(self, part: str, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module '{_NAME}.{part}' has no attribute '{name}'")
        self.load()
        return getattr(importlib.import_module(f"{_NAME}.{part}"), name)

    def _disable(self, function: Any = None, recursive: bool = True, **given: Any) -> Any:
        """What is not to be compiled, of PyTorch's own: that it asks for no wrapper is a sign of that."""
        if function is None or given != {"wrapping": False}:
            return self.load().disable(function, recursive, **given)
        self._told.append(function)
        return function

    def _forget(self) -> None:
        # It is kept on the function what was made of it; whoever asks next asks the compiler.
        for function in self._told:
            vars(function).pop("__dynamo_disable", None)

    # -- parts, as modules of their own ----------------------------------------------------------------------

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of a part of the compiler: all of it is there first, and most likely this part with it."""
        if self.loaded or not name.startswith(f"{_NAME}."):
            return None
        self.load()
        if name not in sys.modules:
            return None
        part = sys.modules[name]
        # The import that asks takes the origin that the module has, and would run it a second time.
        part.__spec__ = ModuleSpec(name, self, loader_state=part.__spec__)
        return part.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The one that is there."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run; its own origin is put back."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _Constant(Source):
    """Where a tensor comes from of which nothing is known."""

    def __init__(self, source_name: str) -> None:
        self.source_name = source_name

    @property
    def name(self) -> str:
        """What it is called by."""
        return self.source_name

    @property
    def guard_source(self) -> GuardSource:
        """That of constants."""
        return GuardSource.CONSTANT


class _Attribute(Source):
    """An attribute of what comes from somewhere."""

    def __init__(self, base: Source, member: str) -> None:
        self.base, self.member = base, member

    @property
    def name(self) -> str:
        """What it is called by."""
        return f"{self.base.name}.{self.member}"


class _Random(Source):
    """Where a number comes from that a compiled function draws: none does."""


_SOURCES = {"AttrSource": _Attribute, "ConstantSource": _Constant, "RandomValueSource": _Random}
"""As fake tensors name them: without symbols for sizes, nothing is asked of them."""


class _Part:
    """A part of the compiler, as an attribute of it, with the answers that its class has."""

    name = ""

    def __init__(self, place: _Place) -> None:
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return self._place._of_part(self.name, name)


class _Rules(_Part):
    name = "trace_rules"

    def clear_lru_cache(self) -> None:
        """Nothing is remembered yet."""


class _Utilities(_Part):
    name = "utils"

    def get_optimize_ddp_mode(self) -> str:
        """How DDP's gradients are to be reduced: as ever, unless the script has chosen."""
        settings: Any = importlib.import_module(f"{_NAME}.config")
        if settings.optimize_ddp is True:
            return "ddp_optimizer"
        self._place.load()
        chosen: str = importlib.import_module(f"{_NAME}.utils").get_optimize_ddp_mode()
        return chosen
