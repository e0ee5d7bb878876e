"""Traces of collectives, whoever wrote them: a file or a folder becomes one source a rank."""

from __future__ import annotations

from pathlib import Path

from echograph.errors import InputError
from echograph.ir.comms.record import CallSource
from echograph.registry import Table

READERS = Table(
    "trace of collectives",
    {
        "echograph": "echograph.ir.comms.record:NativeSource",
        "collective_trace": "echograph.profiler.comms.readers.collective_trace:CollectiveTraceSource",
        "flight recorder": "echograph.profiler.comms.readers.flight_recorder:FlightRecorderSource",
    },
)
HEAD_BYTES = 1 << 16


def find_sources(path: Path) -> tuple[list[CallSource], list[str]]:
    """The traces in a file or a folder, opened, by rank; and what was passed over, and why.

    Args:
        path: a file, or a folder whose files are looked at; of its folders, only `comms.jsonl` of recorded ranks.

    Raises:
        InputError: there is no such file or folder, or no trace in it.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: give the folder where trace.<rank>.jsonl are")
    files = files_in(path) if path.is_dir() else [path]
    sources: list[CallSource] = []
    skipped: list[str] = []
    for file in files:
        kind = guess(file)
        if kind is None:
            skipped.append(f"{file}: no trace of collectives")
            continue
        source: CallSource = READERS[kind](file)
        try:
            source.open()
        except InputError as error:
            skipped.append(str(error))
            continue
        sources.append(source)
    if not sources:
        why = f" ({skipped[0]})" if skipped else ""
        raise InputError(f"{path}: no trace of collectives that can be read{why}")
    return sorted(sources, key=lambda source: (source.rank, str(source.path))), skipped


def files_in(folder: Path) -> list[Path]:
    """Files that may be traces of collectives: those of the folder, and of its ranks' folders in a recording."""
    return sorted(file for pattern in ("*", "*/comms.jsonl") for file in folder.glob(pattern) if file.is_file())


def guess(path: Path) -> str | None:
    """Who wrote a file, from its beginning; None where no reader knows it."""
    from echograph.profiler.comms.readers.collective_trace import TAG

    try:
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError:
        return None
    if b'"line":"header"' in head[:200]:
        return "echograph"
    if TAG.search(head.decode("utf-8", errors="replace")):
        return "collective_trace"
    if b'"entries"' in head or (head[:1] == b"\x80" and b"entries" in head) or b'"pg_config"' in head:
        return "flight recorder"
    return None
