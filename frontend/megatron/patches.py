"""Functions of megatron-core that others take the place of for a while: shims and hooks are tables of these."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import patched

DISTRIBUTION = "megatron-core"
TESTED = ("0.16", "0.17")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A function, and what stands in for it.

    Attributes:
        where: "module:function" or "module:Class.method".
        reason: why.
        around: the function -> the one that stands in for it.
        optional: whether the module may be absent: it is of Megatron-LM, and scripts may do without.
    """

    where: str
    reason: str
    around: Callable[[Any], Any]
    optional: bool = False


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
    found = getattr(sys.modules.get("megatron.core"), "__version__", None)
    return str(found or version(DISTRIBUTION))


def _find(where: str) -> tuple[Any, str]:
    module, _, path = where.partition(":")
    *outer, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        getattr(owner, name)
    except (ImportError, AttributeError):
        raise CaptureError(
            f"{DISTRIBUTION} {_version()} has no {module}.{path}: the adapter needs it "
            f"where versions {TESTED[0]} up to {TESTED[1]} have it; install one of those"
        ) from None
    return owner, name
