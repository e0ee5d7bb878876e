"""A recording on disk: what each rank's folder holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from echograph.errors import InputError
from echograph.ir.files import read_whole, write_whole
from echograph.profiler.record.overhead import MeasuredSeconds, Overhead

FORMAT, VERSION = "echograph recording", (1, 1)
TRACE, COMMS, METADATA, DAG = "trace.json.gz", "comms.jsonl", "metadata.json", "dag.gml"
HOOKS = "hooks.json"
MAX_BYTES = 64 << 20
T = TypeVar("T", bound=msgspec.Struct)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One step as the wall clock of its rank saw it.

    Attributes:
        number: how many steps had ended when it began.
        seconds: from the end of the step before to its own; what the recorder itself did in between is left out.
        processor_s: of that, what the thread that trains spent on a processor; 0 where it is not known.
        state: "free" where nothing was recorded, "observed" in the step whose dependencies were looked at,
            "recorded" in the window, "after" in the step behind it, which other ranks may begin later.
    """

    number: int
    seconds: MeasuredSeconds
    processor_s: float = 0.0
    state: str


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """`metadata.json`.

    Attributes:
        format: `FORMAT`.
        version: major and minor; a reader refuses a newer major.
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on its machine.
        host: name of the machine.
        pid: process.
        command: of the process.
        python: version.
        torch: version.
        backend: of the default process group, "" without one.
        device: its name, "cpu" where there is no CUDA.
        threads: that PyTorch's operators use on the host.
        start_step: first step of the window.
        end_step: the step before which it ends.
        complete: whether the window was recorded to its end.
        problems: what could not be recorded, a line each.
        steps: all that ended so far.
        overhead: what recording costs; None where it was not measured.
    """

    format: str = FORMAT
    version: tuple[int, int] = VERSION
    rank: int
    world_size: int
    local_rank: int = 0
    host: str = ""
    pid: int = 0
    command: list[str] = []
    python: str = ""
    torch: str = ""
    backend: str = ""
    device: str = ""
    threads: int = 0
    start_step: int
    end_step: int
    complete: bool = False
    problems: list[str] = []
    steps: list[StepTimes] = []
    overhead: Overhead | None = None

    def seconds(self, state: str) -> list[float]:
        """Durations of the steps of one state."""
        return [step.seconds for step in self.steps if step.state == state]


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """`hooks.json`: when hooks ran in the window, which the trace does not show; nanoseconds of the trace's clock.

    Attributes:
        entered_ns: modules were entered.
    """

    entered_ns: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFolder:
    """One rank's part of a recording.

    Attributes:
        path: the folder.
        metadata: what it says of itself.
    """

    path: Path
    metadata: Metadata


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Writes `metadata.json`.

    Raises:
        OutputError: the folder cannot be written to.
    """
    write_whole(folder / METADATA, [msgspec.json.format(msgspec.json.encode(metadata), indent=2), b"\n"])


def write_hooks(folder: Path, hooks: Hooks) -> None:
    """Writes `hooks.json`.

    Raises:
        OutputError: the folder cannot be written to.
    """
    write_whole(folder / HOOKS, [msgspec.json.encode(hooks), b"\n"])


def read_hooks(folder: Path) -> Hooks:
    """What `hooks.json` holds; nothing where there is none.

    Raises:
        InputError: it cannot be read.
    """
    file = folder / HOOKS
    return _decoded(file, Hooks) if file.exists() else Hooks()


def read_metadata(folder: Path) -> Metadata:
    """What a rank's folder says of itself.

    Raises:
        InputError: it cannot be read, or is of a newer major version.
    """
    file = folder / METADATA
    metadata = _decoded(file, Metadata)
    if metadata.format != FORMAT or metadata.version[0] > VERSION[0]:
        raise InputError(f"{file}: of format '{metadata.format}' {metadata.version[0]}: this reads {FORMAT} 1")
    return metadata


def read_recording(folder: Path) -> list[RankFolder]:
    """The ranks of a recording, in order.

    Args:
        folder: that `echoprof record` wrote.

    Raises:
        InputError: there is no recording, or metadata that cannot be read.
    """
    files = sorted(folder.glob(f"*/{METADATA}")) if folder.is_dir() else []
    ranks = [RankFolder(path=file.parent, metadata=read_metadata(file.parent)) for file in files]
    if not ranks:
        raise InputError(f"{folder}: no recording: give the folder in which 0/{METADATA} is")
    return sorted(ranks, key=lambda rank: rank.metadata.rank)


def _decoded(file: Path, kind: type[T]) -> T:
    data = read_whole(file, "give the folder of a recording", MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InputError(f"{file}: no {kind.__name__.lower()} of a recording: {error}") from None
