"""Several traces as one, on one clock, and the final trace of a GPU from what several profilers wrote of it.

ByteProfile leaves beside the final trace what it was made of: `temp.json` (MXNet's operators), `comm.json` (parts
of communications, under the indices of their gradients) and `io.json`. The dependency graph says which operators
count, and what each waited for.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from echograph.errors import DataError, InputError, OutputError, UnknownNameError, UsageError
from echograph.ir.files import check_writable, write_whole
from echograph.profiler.analyses.table import AnswerTable, from_rows
from echograph.profiler.byteprofile.dag import read_dag
from echograph.profiler.byteprofile.reader import (
    ALLREDUCE,
    COMMUNICATION,
    COMPUTATION,
    FINAL,
    UPDATES,
    ChromeEvent,
    EventLabel,
    Events,
    Gpu,
    Job,
    category_of,
    columns_of,
    complete_events,
    find_job,
    gradient_names,
    in_us,
    is_kineto,
    label_of,
    us_to_ps,
)
from echograph.progress import Progress, silent
from echograph.units import PS_PER_MS

# What ends at the same moment on all workers: the sum is there.
_COMMON_ENDS = ("PULL", ALLREDUCE)


class Combined(NamedTuple):
    """How traces were combined.

    Attributes:
        sources: the GPUs whose traces they are.
        shift: picoseconds that are taken from the times of each worker.
        by: the event by whose end clocks were aligned; empty where there is one worker, or none was asked for.
    """

    sources: tuple[Gpu, ...]
    shift: dict[int, int]
    by: str


def sources_of(jobs: Sequence[Job]) -> list[Gpu]:
    """The GPUs of several jobs; each worker of each job is one of all, and a trace that is given alone too."""
    found, first = list[Gpu](), 0
    for job in jobs:
        found += [dataclasses.replace(gpu, worker=first + gpu.worker) for gpu in job.gpus]
        first += max(gpu.worker for gpu in job.gpus) + 1
    return found


def aligned(sources: Sequence[Gpu], *, keep: bool = False) -> Combined:
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
        f"{sources[0].folder}: its clock cannot be aligned with the others': no {' or '.join(_COMMON_ENDS)} "
        "of one name is in all workers' traces; keep the clocks as they are with --no-align"
    )


def _first_ends(sources: Sequence[Gpu]) -> dict[EventLabel, int]:
    """When the first of each common end was over; of the GPUs that have it, on the first."""
    found: dict[EventLabel, int] = {}
    for gpu in sources:
        starts: dict[EventLabel, int] = {}
        for event in _events(gpu):
            label = label_of(event)
            if label.part not in _COMMON_ENDS:
                continue
            label = label._replace(prefix=f"rank{gpu.rank}.")
            start = us_to_ps(event["ts"])
            if label not in starts or start < starts[label]:
                starts[label] = start
                found[label] = start + us_to_ps(event["dur"])
    return found


def _events(gpu: Gpu) -> Iterator[ChromeEvent]:
    for file in gpu.files:
        yield from complete_events(file, [])


def combined_events(combined: Combined, only: Collection[str] = ()) -> Iterator[ChromeEvent]:
    """The events of all traces: names have the rank before them, processes the worker and the rank.

    Names that have a prefix in the file keep it.

    Args:
        combined: the traces and their clocks.
        only: keep these communications alone (`Comm.w`); computation is kept in any case.
    """
    for gpu in combined.sources:
        shift = combined.shift[gpu.worker]
        for event in _events(gpu):
            label = label_of(event)
            names = {label.operation, _without_key(label)}
            if only and label.category == COMMUNICATION and not names.intersection(only):
                continue
            rank = f"rank{gpu.rank}."
            prefix = f"{gpu.host}.rank{gpu.rank}->" if gpu.host else rank
            event |= {
                "name": f"{'' if label.prefix else prefix}{event.get('name', '')}",
                "pid": f"wk{gpu.worker}.{rank}{event.get('pid', '')}",
            }
            if shift:
                event["ts"] = in_us(us_to_ps(event["ts"]) - shift)
            yield event


def communications(sources: Sequence[Gpu]) -> set[str]:
    """The communications of the traces, and their parts, by the names that a filter takes."""
    known: set[str] = set()
    for gpu in sources:
        found = [label for label in gpu.events().labels if label.category == COMMUNICATION]
        known |= {label.operation for label in found} | {_without_key(label) for label in found}
    return known


def combine(
    traces: Sequence[Path],
    output: Path,
    *,
    only: Collection[str] = (),
    align: bool = True,
    progress: Progress = silent,
) -> tuple[Combined, int]:
    """Writes several traces as one.

    Args:
        traces: files, or folders of workers; each is a worker of its own.
        output: the combined trace.
        only: keep these communications alone (`Comm.w`).
        align: align the workers' clocks.
        progress: told what is done.

    Returns:
        How they were combined, and the bytes that were written.

    Raises:
        UsageError: the output is one of the traces.
        UnknownNameError: there is no such communication.
        InputError: a trace cannot be read.
        DataError: a trace is broken, or clocks cannot be aligned.
        OutputError: the output cannot be written.
    """
    check_writable(output)
    sources = sources_of([find_job(path) for path in traces])
    if any(output.resolve() == file.resolve() for gpu in sources for file in gpu.files):
        raise UsageError(f"--output {output}: is one of the traces: give the combined one a file of its own")
    known = communications(sources) if only else set()
    for name in only:
        if name not in known:
            raise UnknownNameError("communication", name, known)
    combined = aligned(sources, keep=not align)
    progress(f"writing {output}")
    return combined, write_whole(output, as_trace(combined_events(combined, only)))


def _without_key(label: EventLabel) -> str:
    return f"{label.operation}.{label.part}".removesuffix(".")


def as_trace(events: Iterator[ChromeEvent]) -> Iterator[str]:
    """Events as a Chrome trace, piece by piece."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


OPERATORS, COMMUNICATIONS, INPUTS = "temp.json", "comm.json", "io.json"
_GRADIENT = re.compile(r"(?:Comm\.)?(?:byteps\.)?gradient_(\d+)(?:\.(?P<part>\w+))?$", re.IGNORECASE)
_INDEX = re.compile(r"(?:Comm\.)?(\d+)(?:\.(?P<part>\w+))?$")
_GLUON = re.compile(r"name=([^;]+)")
# MXNet's optimizers are operators called sgd_mom_update, adam_update, lamb_update_phase1, ...
_UPDATE = "_update"
_STEP = re.compile(r"ProfilerStep#\d+$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collected:
    """A final trace.

    Attributes:
        events: of the trace, in microseconds.
        notes: what is missing, one line each.
    """

    events: tuple[ChromeEvent, ...]
    notes: tuple[str, ...]


def collect(gpu: Gpu, *, operators_only: bool = False) -> Collected:
    """Makes a GPU's final trace anew.

    Args:
        gpu: a folder with `dag.gml` and `temp.json`; `comm.json` and `io.json` are taken where they are. dPRO's
            folders, in which the trace lies in several files, need no graph: the files are joined.
        operators_only: make computation anew, and keep all else of the final trace that is there.

    Raises:
        InputError: a file is missing or cannot be read, or there is no final trace to keep the rest of.
        DataError: a file is broken, or has none of the operators of the graph.
    """
    notes: list[str] = []
    apart = [file for file in gpu.files if not FINAL.match(file.name)]
    if apart and not (gpu.folder / OPERATORS).is_file():
        if is_kineto(apart[0]):
            raise InputError(f"{apart[0]}: is a PyTorch trace, there is nothing to make of it: use iter_time")
        return Collected(
            events=tuple(e for file in apart for e in complete_events(file, notes)), notes=tuple(notes)
        )
    for file in (gpu.dag, gpu.folder / OPERATORS):
        if not file.is_file():
            raise InputError(f"{file}: no such file: the final trace is made from it")
    recorded = read_dag(gpu.dag)
    inputs: dict[str, list[str]] = {name: [] for name in recorded.nodes}
    for before, after in recorded.edges:
        inputs[after].append(before)
    events = _operators(gpu.folder / OPERATORS, inputs, notes)
    if operators_only:
        if not gpu.files:
            raise InputError(
                f"{gpu.folder}: has no final trace to keep the rest of: leave out --sub-option operator"
            )
        kept = (event for file in gpu.files for event in complete_events(file, notes))
        return Collected(events=(*(e for e in kept if e.get("cat") != "operator"), *events), notes=tuple(notes))
    names = gradient_names((gpu.folder, gpu.folder.parent))
    for name, read in ((INPUTS, _inputs), (COMMUNICATIONS, _communications)):
        file = gpu.folder / name
        if file.is_file():
            events += read(file, inputs, names, notes)
        else:
            notes.append(f"{file}: no such file: the trace is without what it would say")
    return Collected(events=tuple(events), notes=tuple(notes))


def _named(event: ChromeEvent, name: str, inputs: Sequence[str], category: str) -> ChromeEvent:
    arguments = {"name": name, **{f"input{i}": other for i, other in enumerate(inputs)}}
    return event | {"name": name, "cat": category, "args": arguments}


def node_name(raw: str) -> str:
    """A node's name of what MXNet calls an operator: `conv0_fwd` is FW.conv0, `_backward_conv0` ... is BW."""
    found = _GLUON.search(raw)
    raw = found[1] if found else raw
    if "_backward" in raw:
        name = raw.split("_backward")[0] or raw.removeprefix("_backward_")
        return f"BW.{name.removesuffix('_fwd')}"
    return f"FW.{raw.removesuffix('_fwd')}"


def _operators(path: Path, inputs: dict[str, list[str]], notes: list[str]) -> list[ChromeEvent]:
    """Computation: operators of the graph, and the span of the optimizer's of each step."""
    raw = sorted(complete_events(path, notes), key=lambda event: event["ts"])
    process: Any = None
    found: list[ChromeEvent] = []
    update: ChromeEvent | None = None
    for event in raw:
        said = str(event.get("name", ""))
        name = node_name(said)
        if name in inputs and process in (None, event.get("pid")):
            # Operators may be listed once a device and once for all.
            process = event.get("pid")
            update = None
            found.append(_named(event, name, inputs[name], "operator"))
        elif _UPDATE in said and found and process == event.get("pid"):
            if update is None:
                update = _named(event, "STEP", inputs.get("STEP", []), "operator")
                found.append(update)
            update["dur"] = event["ts"] + event["dur"] - update["ts"]
    if not found:
        raise DataError(f"{path}: none of its operators is in the dependency graph: they are of different models")
    return found


def _communications(
    path: Path, inputs: dict[str, list[str]], names: Sequence[str], notes: list[str]
) -> Iterator[ChromeEvent]:
    for event in complete_events(path, notes):
        raw = str(event.get("name", ""))
        found = _GRADIENT.match(raw) or _INDEX.match(raw)
        if found:
            if not int(found[1]) < len(names):
                raise DataError(
                    f"{path}: gradient {found[1]} is not in gradient_name_list.txt, which has {len(names)}"
                )
            whole, part = f"{COMMUNICATION}.{names[int(found[1])]}", found["part"]
        elif category_of(raw) == COMMUNICATION:
            whole = next((w for w in (raw, raw.rpartition(".")[0]) if w in inputs), raw)
            part = raw.removeprefix(whole).removeprefix(".")
        else:
            continue
        renamed = _named(event, f"{whole}.{part}" if part else whole, inputs.get(whole, []), COMMUNICATION)
        yield renamed | {"pid": whole, "args": renamed["args"] | {"name": whole}}


def _inputs(
    path: Path, inputs: dict[str, list[str]], names: Sequence[str], notes: list[str]
) -> Iterator[ChromeEvent]:
    del names
    for event in complete_events(path, notes):
        name = str(event.get("name", ""))
        yield _named(event, name, inputs.get(name, []), "I/O")


class Iteration(NamedTuple):
    """One step of a GPU.

    Attributes:
        start: picoseconds at which its first forward operator starts.
        computed: picoseconds from there to the end of its last backward operator; None in a PyTorch trace, in
            which operators are not called forward or backward.
        duration: picoseconds from there to the next step's start; of the last step, to the end of all its work.
    """

    start: int
    computed: int | None
    duration: int


def iterations(events: Events) -> list[Iteration]:
    """The steps of a GPU's trace: a forward operator that starts after a backward one began begins a step.

    In a PyTorch trace, the profiler's steps.

    Args:
        events: of one GPU.

    Raises:
        DataError: there is no step: no forward operator, or no backward one after it.
    """
    marked = events.only(lambda label: bool(_STEP.match(label.operation))).in_order()
    if marked:
        return [Iteration(start, None, end - start) for start, end, _ in marked]
    kinds = COMPUTATION | UPDATES | {COMMUNICATION}
    ran = events.only(lambda label: label.category in kinds).in_order()
    starts: list[int] = []
    backward: list[int] = []
    turned = True
    for start, end, label in ran:
        if label.category == "FW" and turned:
            starts.append(start)
            backward.append(0)
            turned = False
        elif label.category == "BW" and starts:
            turned = True
            backward[-1] = max(backward[-1], end)
    if not starts or not backward[0]:
        raise DataError(
            "the trace has no step: no forward operator (FW.) with a backward one (BW.) after it starts"
        )
    ends = [*starts[1:], max(end for _, end, _ in ran)]
    return [
        Iteration(start, until - start, over - start)
        for start, until, over in zip(starts, backward, ends, strict=True)
        if until
    ]


def iteration_table(job: Job) -> AnswerTable:
    """One row a GPU: its `steps`; on average forward and backward, `fw_bw_ms`, and all, `iteration_ms`.

    Args:
        job: the traces.

    Raises:
        InputError: a trace cannot be read.
        DataError: a trace is broken, or has no step.
    """
    rows = []
    notes: list[str] = []
    for gpu in job.gpus:
        events = gpu.events()
        notes += events.notes
        try:
            steps = iterations(events)
        except DataError as error:
            raise DataError(f"{gpu.folder}: {error}") from None
        computed = [step.computed for step in steps if step.computed is not None]
        fw_bw = sum(computed) / len(computed) / PS_PER_MS if computed else None
        duration = sum(step.duration for step in steps) / len(steps) / PS_PER_MS
        rows.append((job.title(gpu), len(steps), fw_bw, duration))
    return from_rows(("gpu", "steps", "fw_bw_ms", "iteration_ms"), rows, notes)


def final_name(gpu: Gpu, collected: Collected) -> str:
    """The file name of a GPU's final trace: that of the one it has, or one with its rank and number of steps."""
    if gpu.files and FINAL.match(gpu.files[0].name):
        return gpu.files[0].name.removesuffix(".gz")
    steps = len(iterations(columns_of(gpu.folder, collected.events, [])))
    return f"bps_trace_local_rank{gpu.rank}_{steps}step.json"


def write_collected(job: Job, output: Path | None, *, operators_only: bool) -> tuple[Job, list[str]]:
    """Writes final traces anew; all are made before the first is written.

    Args:
        job: whose profilers left something.
        output: folder for them; None: each GPU's own.
        operators_only: make only computation anew.

    Returns:
        The job with these traces; and notes on what is missing, a line each.

    Raises:
        OutputError: a trace cannot be written.
    """
    made = [(gpu, collect(gpu, operators_only=operators_only)) for gpu in job.gpus]
    gpus: list[Gpu] = []
    notes: list[str] = []
    for gpu, collected in made:
        folder = gpu.folder
        if output is not None:
            folder = output / job.title(gpu).replace(".", "/")
            make_folder(folder)
        file = folder / final_name(gpu, collected)
        check_writable(file)
        notes += collected.notes
        write_whole(file, as_trace(iter(collected.events)))
        gpus.append(dataclasses.replace(gpu, files=(file,)))
    return dataclasses.replace(job, gpus=tuple(gpus)), notes


def make_folder(folder: Path) -> None:
    """Makes a folder, and those around it, if there is none.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
