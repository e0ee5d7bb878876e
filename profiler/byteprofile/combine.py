"""Several traces as one, on one clock."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from echograph.errors import DataError
from echograph.profiler.byteprofile.events import to_ps
from echograph.profiler.byteprofile.layout import Gpu, Job
from echograph.profiler.byteprofile.names import ALLREDUCE, COMMUNICATION, Label
from echograph.profiler.byteprofile.read import Event, complete_events, label_of
from echograph.units import PS_PER_US

# What ends at the same moment on all workers: the sum is there.
_COMMON_ENDS = ("PULL", ALLREDUCE)


class Source(NamedTuple):
    """A trace among those that are combined.

    Attributes:
        worker: its number.
        gpu: where its files are.
    """

    worker: int
    gpu: Gpu


class Combined(NamedTuple):
    """How traces were combined.

    Attributes:
        sources: the traces.
        shift: picoseconds that are taken from the times of each worker.
        by: the event by whose end clocks were aligned; empty where there is one worker, or none was asked for.
    """

    sources: tuple[Source, ...]
    shift: dict[int, int]
    by: str


def sources_of(jobs: Sequence[Job]) -> list[Source]:
    """The traces of several jobs; each worker of each job is one of all, and a trace that is given alone too."""
    found, first = [], 0
    for job in jobs:
        found += [Source(first + gpu.worker, gpu) for gpu in job.gpus]
        first += max(gpu.worker for gpu in job.gpus) + 1
    return found


def aligned(sources: Sequence[Source], *, keep: bool = False) -> Combined:
    """Finds by how much the workers' clocks differ: the first pull of the same name ends everywhere at once.

    Where there are no pulls, the first all-reduce.

    Args:
        sources: the traces.
        keep: leave clocks as they are.

    Raises:
        InputError: a trace cannot be read.
        DataError: a trace is broken, or there is nothing that workers have in common.
    """
    workers = sorted({source.worker for source in sources})
    shift = dict.fromkeys(workers, 0)
    if keep or len(workers) < 2:
        return Combined(tuple(sources), shift, "")
    ends = {worker: _first_ends([s for s in sources if s.worker == worker]) for worker in workers}
    base = ends[workers[0]]
    for part in _COMMON_ENDS:
        # By its end in the first worker, the first that all have.
        shared = [
            (end, label)
            for label, end in base.items()
            if label.part == part and all(label in ends[worker] for worker in workers)
        ]
        if shared:
            end, label = min(shared)
            shift = {worker: ends[worker][label] - end for worker in workers}
            return Combined(tuple(sources), shift, label.name)
    raise DataError(
        f"{sources[0].gpu.folder}: its clock cannot be aligned with the others': no {' or '.join(_COMMON_ENDS)} "
        "of one name is in all workers' traces; keep the clocks as they are with --no-align"
    )


def _first_ends(sources: Sequence[Source]) -> dict[Label, int]:
    """When the first of each common end was over; of the GPUs that have it, on the first."""
    found: dict[Label, int] = {}
    for source in sources:
        starts: dict[Label, int] = {}
        for event in _events(source.gpu):
            label = label_of(event)
            if label.part not in _COMMON_ENDS:
                continue
            label = label._replace(prefix=f"rank{source.gpu.rank}.")
            start = to_ps(event["ts"])
            if label not in starts or start < starts[label]:
                starts[label] = start
                found[label] = start + to_ps(event["dur"])
    return found


def _events(gpu: Gpu) -> Iterator[Event]:
    for file in gpu.files:
        yield from complete_events(file, [])


def combined_events(combined: Combined, only: Collection[str] = ()) -> Iterator[Event]:
    """The events of all traces: names have the rank before them, processes the worker and the rank.

    Names that have a prefix in the file keep it.

    Args:
        combined: the traces and their clocks.
        only: keep these communications alone (`Comm.w`); computation is kept in any case.
    """
    for worker, gpu in combined.sources:
        shift = combined.shift[worker]
        for event in _events(gpu):
            label = label_of(event)
            names = {label.operation, _without_key(label)}
            if only and label.category == COMMUNICATION and not names.intersection(only):
                continue
            rank = f"rank{gpu.rank}."
            prefix = f"{gpu.host}.rank{gpu.rank}->" if gpu.host else rank
            event |= {
                "name": f"{'' if label.prefix else prefix}{event.get('name', '')}",
                "pid": f"wk{worker}.{rank}{event.get('pid', '')}",
            }
            if shift:
                event["ts"] = _shifted(event["ts"], shift)
            yield event


def _shifted(microseconds: float, shift: int) -> float:
    moved = to_ps(microseconds) - shift
    return moved // PS_PER_US if moved % PS_PER_US == 0 else moved / PS_PER_US


def communications(sources: Sequence[Source]) -> set[str]:
    """The communications of the traces, and their parts, by the names that a filter takes."""
    known: set[str] = set()
    for _, gpu in sources:
        found = [label for label in gpu.events().labels if label.category == COMMUNICATION]
        known |= {label.operation for label in found} | {_without_key(label) for label in found}
    return known


def _without_key(label: Label) -> str:
    return f"{label.operation}.{label.part}".removesuffix(".")


def as_trace(events: Iterator[Event]) -> Iterator[str]:
    """Events as a Chrome trace, piece by piece."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"
