"""A timeline as a Chrome trace, which Perfetto and chrome://tracing open, and analyses of profiler traces read.

One process a program, one thread for the host and one for each stream; microseconds with decimals, as the format
asks (Trace Event Format, "X" complete events). Categories and names are those by which Kineto's traces are read:
what a device runs is a `kernel`, or a `gpu_memcpy`, with the number of its stream; a communication is named as a
kernel of NCCL; `ProfilerStep#0` on the host is the step. `processRanks` says which rank each process is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from echograph import units
from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import Graph
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, CopyDirection, OpKind, Phase

_COPIES = {
    CopyDirection.HOST_TO_DEVICE: "HtoD",
    CopyDirection.DEVICE_TO_HOST: "DtoH",
    CopyDirection.DEVICE_TO_DEVICE: "DtoD",
}


def chrome_trace(graph: Graph, timeline: Timeline, *, ranks: Sequence[int] = ()) -> Iterator[str]:
    """The trace as pieces of JSON text.

    Args:
        graph: the graph that ran.
        timeline: when it ran.
        ranks: the rank that each of the timeline's programs stands for; where none are given, the programs are
            those of the graph, and each stands for the first rank that runs it.
    """
    programs = range(len(timeline.programs))
    ranks = ranks or [graph.lowest_rank(number) for number in programs]
    groups = [process_groups(graph, ranks[number]) for number in programs]
    job = job_header(graph, groups, [ranks[number] for number in programs])
    head = {"displayTimeUnit": "ms", "distributedInfo": job, "processRanks": {str(p): ranks[p] for p in programs}}
    yield json.dumps(head, separators=(",", ":"))[:-1] + ',"traceEvents":[\n'
    separator = ""
    for event in (*_names(timeline), *_events(graph, timeline, groups)):
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


class ProcessGroup(NamedTuple):
    """A process group as profilers write it.

    Attributes:
        name: by which events name it; that of another set of ranks is another.
        ranks: ascending.
    """

    name: str
    ranks: tuple[int, ...]


def process_groups(graph: Graph, rank: int) -> dict[int, ProcessGroup]:
    """The process groups that a rank is in, by their numbers in the graph."""
    here, found = graph.coordinates(rank), {}
    for number, group in enumerate(graph.groups):
        ranks = tuple(sorted(graph.group_ranks(group, here)))
        if rank in ranks:
            found[number] = ProcessGroup(f"{group.name} {ranks[0]}", ranks)
    return found


def job_header(graph: Graph, groups: Iterable[dict[int, ProcessGroup]], ranks: Sequence[int]) -> dict[str, object]:
    """What a trace says of its job (`distributedInfo`).

    Args:
        graph: the graph that ran.
        groups: of each rank that is traced.
        ranks: those.
    """
    known = dict.fromkeys(group for of_rank in groups for group in of_rank.values())
    config = [{"pg_name": name, "ranks": list(members)} for name, members in known]
    job: dict[str, object] = {"world_size": graph.world_size}
    return job | ({"rank": ranks[0]} if len(ranks) == 1 else {}) | ({"pg_config": config} if config else {})


def _names(timeline: Timeline) -> Iterator[dict[str, object]]:
    for program, role in enumerate(timeline.programs):
        yield {"ph": "M", "name": "process_name", "pid": program, "args": {"name": role}}
        for thread, name in enumerate(("host", *timeline.streams)):
            yield {"ph": "M", "name": "thread_name", "pid": program, "tid": thread, "args": {"name": name}}
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": program,
                "tid": thread,
                "args": {"sort_index": thread},
            }
        step = {"cat": "user_annotation", "ts": 0, "dur": timeline.makespan / units.PS_PER_US, "args": {}}
        yield {"ph": "X", "name": "ProfilerStep#0", "pid": program, "tid": 0} | step


def _events(
    graph: Graph, timeline: Timeline, groups: Sequence[dict[int, ProcessGroup]]
) -> Iterator[dict[str, object]]:
    labels, launch = _labels(graph), launch_numbers(timeline)
    for row in np.flatnonzero(timeline.duration > 0).tolist():
        op, device = int(timeline.op[row]), timeline.lane[row] == Lane.DEVICE
        args = _arguments(graph, op)
        label = labels.get((int(graph.block_of_op[op]), int(timeline.instance[row])), "")
        if label:
            args["module"] = str(args["module"]).replace("{}", label)
        args["micro_batch"] = int(timeline.micro_batch[row])
        if launch[row] != NONE:
            args["correlation"] = int(launch[row])
        name, category = graph.strings[graph.ops.name[op]], "cpu_op"
        # Host work on another stream than the first is that of a thread, beside the one that issues.
        of_thread = graph.ops.kind[op] == OpKind.HOST and timeline.stream[row] > 0
        track = 1 + int(timeline.stream[row]) if device or of_thread else 0
        if device:
            name, category = device_label(graph, op)
            args["stream"] = int(timeline.stream[row])
            if graph.ops.kind[op] in COMMUNICATIONS:
                group = groups[int(timeline.program[row])].get(int(graph.ops.group[op]))
                args |= {"Collective name": collective_name(graph, op)}
                args |= {"Process Group Name": group.name} if group else {}
            if graph.ops.kind[op] == OpKind.COPY:
                rate = int(graph.ops.nbytes[op]) * units.PS_PER_NS / int(timeline.duration[row])
                args |= {"bytes": int(graph.ops.nbytes[op]), "memory bandwidth (GB/s)": rate}
        yield {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": int(timeline.program[row]),
            "tid": track,
            "ts": int(timeline.start[row]) / units.PS_PER_US,
            "dur": int(timeline.duration[row]) / units.PS_PER_US,
            "args": args,
        }


def _arguments(graph: Graph, op: int) -> dict[str, object]:
    ops = graph.ops
    phase = Phase(int(ops.phase[op])).name.lower()
    args: dict[str, object] = {"module": graph.strings[ops.module[op]], "phase": phase}
    if ops.kind[op] in COMMUNICATIONS:
        args |= {"bytes": int(ops.nbytes[op]), "group": graph.groups[int(ops.group[op])].name}
    elif ops.flops[op]:
        args["flops"] = int(ops.flops[op])
    return args


def device_label(graph: Graph, op: int) -> tuple[str, str]:
    """Name and category by which readers of profiler traces know what a device runs."""
    ops, name = graph.ops, graph.strings[graph.ops.name[op]]
    if ops.kind[op] == OpKind.COPY:
        return f"Memcpy {_COPIES[CopyDirection(int(ops.variant[op]))]} ({name})", "gpu_memcpy"
    if ops.kind[op] == OpKind.COLLECTIVE:
        words = CollectiveKind(int(ops.variant[op])).name.split("_")
        return f"ncclDevKernel_{''.join(word.capitalize() for word in words)}({name})", "kernel"
    if ops.kind[op] in COMMUNICATIONS:
        return f"ncclDevKernel_SendRecv({name})", "kernel"
    return name, "kernel"


def collective_name(graph: Graph, op: int) -> str:
    """What PyTorch calls a communication."""
    kind = OpKind(int(graph.ops.kind[op]))
    name = CollectiveKind(int(graph.ops.variant[op])).name if kind == OpKind.COLLECTIVE else kind.name
    return name.lower()


def launch_numbers(timeline: Timeline) -> Int64:
    """For each row a number >= 1 that work on a device shares with its issue; -1 where either takes no time.

    The host issues each operation that a device runs once, in the order in which a program calls it.
    """
    numbers = np.full(len(timeline), NONE, np.int64)
    keys = (timeline.micro_batch, timeline.instance, timeline.op, timeline.program)
    lanes = [np.flatnonzero(timeline.lane == lane) for lane in (Lane.HOST, Lane.DEVICE)]
    rows = [lane[np.lexsort((timeline.start[lane], *(key[lane] for key in keys)))] for lane in lanes]
    if len(rows[0]) == len(rows[1]) and all(np.array_equal(key[rows[0]], key[rows[1]]) for key in keys):
        both = (timeline.duration[rows[0]] > 0) & (timeline.duration[rows[1]] > 0)
        for lane in rows:
            numbers[lane[both]] = np.arange(1, int(both.sum()) + 1)
    return numbers


def _labels(graph: Graph) -> dict[tuple[int, int], str]:
    return {
        (number, index): instance.label
        for number, block in enumerate(graph.blocks)
        for index, instance in enumerate(block.instances)
        if instance.label
    }
