"""Reads numpy's archives of arrays (.npz), which are zip files, within the limits of all that is unpacked."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.errors import FormatError
from echograph.ir.files import FREE_BYTES, MAX_FILE_BYTES, MAX_RATIO, open_file
from echograph.units import format_bytes

# What zipfile and numpy raise for damage. A shape larger than the data is damage too, whatever memory there is.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError,
    SyntaxError, RuntimeError, MemoryError,
)  # fmt: skip


def read_arrays(path: Path, names: Collection[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an archive by name; nothing is unpickled.

    Args:
        path: the archive.
        names: the arrays that are asked for; () for all that it has.

    Raises:
        InputError: the file does not exist or cannot be read.
        FormatError: it is no such archive, lacks a name, or unpacks to more than `MAX_FILE_BYTES` or `MAX_RATIO`
            times its size.
    """
    with open_file(path) as source:
        try:
            with zipfile.ZipFile(source) as archive:
                # No member gives more than what it says here.
                total = sum(member.file_size for member in archive.infolist())
            size = os.fstat(source.fileno()).st_size
            if total <= min(MAX_FILE_BYTES, max(FREE_BYTES, MAX_RATIO * size)):
                source.seek(0)
                with np.load(source, allow_pickle=False) as stored:
                    return {name: stored[name] for name in names or stored.files}
        except _DAMAGE as error:
            why = " ".join(str(error).split())[:100]
            raise FormatError(f"{path}: no archive of arrays, or a damaged one ({why})") from None
    raise FormatError(f"{path}: {format_bytes(size)} that unpack to {format_bytes(total)}, not read")
