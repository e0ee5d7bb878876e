"""How much a step hangs on what was assumed of it: `assumptions.toml`."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import msgspec

from echograph.errors import DataError


class AssumptionWidth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of assumption.

    Attributes:
        text: what it begins with, a regular expression.
        spread: standard error of the logarithm of the step for it.
        source: where that comes from.
    """

    text: str
    spread: float
    source: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    assumptions: tuple[AssumptionWidth, ...]


def unsaid_spread(assumed: Sequence[str]) -> float:
    """Standard error of the logarithm of a step for all that was assumed of it, each independent of the others.

    Args:
        assumed: what was assumed, as `Setup.assumed` has it.
    """
    return math.hypot(*(assumption_of(text).spread for text in assumed))


def assumption_of(text: str) -> AssumptionWidth:
    """The first kind that fits; the file's last one fits all."""
    return next(kind for kind in read_assumptions() if re.match(kind.text, text))


@cache
def read_assumptions() -> tuple[AssumptionWidth, ...]:
    """All kinds, in the order in which they are tried.

    Raises:
        DataError: the file is broken.
    """
    path = files("echograph.workflow.validation").joinpath("assumptions.toml")
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).assumptions
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise DataError(f"{path.name}: {error}") from error
