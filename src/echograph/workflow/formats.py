"""What is said of a format that a command does not have."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from echograph.errors import UnavailableError, UnknownNameError


def refuse_format(name: str, able: Collection[str], what: str) -> NoReturn:
    """Refuses a format: one that other commands have is not called unknown.

    Args:
        name: as it was asked for.
        able: the formats that the command has.
        what: the command does with a format ("imported").

    Raises:
        UnavailableError: another command has it.
        UnknownNameError: none has.
    """
    from echograph.ir.exporters import EXPORTERS
    from echograph.workflow.exports import COMPOSED
    from echograph.workflow.imports import FORMATS

    if name in {*FORMATS, *EXPORTERS, *COMPOSED}:
        raise UnavailableError(f"format '{name}' cannot be {what}", sorted(able))
    raise UnknownNameError("format", name, able)
