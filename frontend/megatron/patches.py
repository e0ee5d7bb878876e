"""Functions of megatron-core that others take the place of for a while: shims and hooks are tables of these."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import numbers_of, patched

DISTRIBUTION = "megatron-core"
TESTED = ("0.13", "0.17")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A function, and what stands in for it.

    Attributes:
        where: "module:function" or "module:Class.method".
        reason: why.
        around: the function -> the one that stands in for it.
        optional: whether the module may be absent: it is of Megatron-LM, and scripts may do without.
        since: the first version that has it; what an older one does not do needs no stand-in.
        before: the first version that has it no more; "": all later ones have it.
    """

    where: str
    reason: str
    around: Callable[[Any], Any]
    optional: bool = False
    since: str = TESTED[0]
    before: str = ""

    def is_of(self, release: tuple[int, ...]) -> bool:
        """Whether a release of megatron-core has the function."""
        return numbers_of(self.since) <= release and not (self.before and numbers_of(self.before) <= release)


@contextmanager
def in_place(patches: Sequence[Patch]) -> Iterator[None]:
    """Puts all of them in, and takes them out at the end.

    Raises:
        CaptureError: this version has no such function; names it.
    """
    with ExitStack() as stack:
        for patch in patches:
            if patch.optional and not _is_there(patch.where.partition(":")[0]):
                continue
            if not patch.is_of(numbers_of(_version())):
                continue
            owner, name = _find(patch.where)
            stack.enter_context(patched(owner, name, patch.around))
        yield


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version() -> str:
    """Of what is imported: a checkout beside the script comes before what is installed."""
    return str(_imported("megatron.core").__version__)


def _find(where: str) -> tuple[Any, str]:
    module, _, path = where.partition(":")
    *outer, name = path.split(".")
    try:
        owner: Any = _imported(module)
        for part in outer:
            owner = getattr(owner, part)
        getattr(owner, name)
    except (ModuleNotFoundError, AttributeError):
        raise CaptureError(
            f"{DISTRIBUTION} {_version()} has no {module}.{path}: the adapter needs it "
            f"where versions {TESTED[0]} up to {TESTED[1]} have it; install one of those"
        ) from None
    return owner, name


def _imported(module: str) -> ModuleType:
    """A module of megatron-core.

    Raises:
        ModuleNotFoundError: there is none of that name.
        CaptureError: importing it fails, of what it imports itself.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            raise
        raise CaptureError(f"{module} cannot be imported: {error}") from error
