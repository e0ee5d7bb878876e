"""Columns of traces that were read before, by the content of their files.

A cached trace is one `.npz` of plain arrays (numpy's own format: no further dependency, no code in it), named
after the SHA-256 of the trace file. Deleting any of them costs time only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from echograph.errors import InputError, OutputError
from echograph.ir.files import read_arrays, write_whole
from echograph.profiler.traces.trace import COLUMNS, Trace, Values

# Part of a cached file's name: a new one when what the reader keeps, or how, changes.
VERSION = 4
MAX_CACHE_BYTES = 2 * 2**30


def cache_folder() -> Path:
    """Where cached traces are: `$ECHOGRAPH_CACHE`, or `echograph` in the user's cache folder."""
    if given := os.environ.get("ECHOGRAPH_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echograph" / "traces"


def content_key(path: Path) -> str:
    """What names the cached form of a file.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as source:
            return f"{hashlib.file_digest(source, 'sha256').hexdigest()}-{VERSION}"
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def load_cached(folder: Path, key: str, path: Path) -> Trace | None:
    """The cached trace, as if read from `path`; None where there is none, or it is damaged."""
    try:
        arrays = read_arrays(folder / f"{key}.npz")
        facts: dict[str, Any] = json.loads(arrays.pop("facts").tobytes())
        strings: list[str] = json.loads(arrays.pop("strings").tobytes())
        rows = {name: arrays.pop(f"rows.{name}") for name in facts.pop("arguments")}
        arguments = {name: Values(places, arrays.pop(f"values.{name}")) for name, places in rows.items()}
        facts["notes"] = tuple(note.replace(facts["path"], str(path)) for note in facts["notes"])
        facts["path"] = str(path)
        columns: dict[str, Any] = {name: arrays[name] for name in COLUMNS}
        return Trace(strings=tuple(strings), arguments=arguments, **facts, **columns)
    except (InputError, ValueError, LookupError, TypeError, AttributeError):
        return None


def store(folder: Path, key: str, trace: Trace) -> None:
    """Caches a trace; a folder that cannot be written to is left alone."""
    facts = {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "path": trace.path,
        "origin": trace.origin,
        "header": dict(trace.header),
        "notes": trace.notes,
        "arguments": list(trace.arguments),
    }
    arrays = {name: getattr(trace, name) for name in COLUMNS}
    arrays |= {"facts": _bytes(facts), "strings": _bytes(trace.strings)}
    for name, (rows, values) in trace.arguments.items():
        arrays |= {f"rows.{name}": rows, f"values.{name}": values}
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{key}.npz", [content.getvalue()])
        _trim(folder)
    except (OSError, OutputError):
        return


def _bytes(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _trim(folder: Path) -> None:
    """Removes the oldest cached traces beyond `MAX_CACHE_BYTES`."""
    found = sorted(((p.stat().st_mtime, p.stat().st_size, p) for p in folder.glob("*.npz")), reverse=True)
    total = 0
    for _, size, path in found:
        total += size
        if total > MAX_CACHE_BYTES:
            path.unlink(missing_ok=True)
