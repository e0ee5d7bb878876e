"""A timeline as Chrome trace events, which Perfetto and chrome://tracing open.

One process a program, one thread for the host and one for each stream; microseconds with nanosecond decimals, as
the format asks (Trace Event Format, "X" complete events).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import numpy as np

from echograph.ir.graph import Graph
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import OpKind, Phase

PS_PER_US = 1_000_000


def chrome_trace(graph: Graph, timeline: Timeline, programs: Iterable[int] | None = None) -> Iterator[str]:
    """The trace as pieces of JSON text.

    Args:
        graph: the graph that ran.
        timeline: when it ran.
        programs: which programs to write; None writes all.
    """
    chosen = sorted(set(range(len(timeline.programs)) if programs is None else programs))
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    for event in (*_names(timeline, chosen), *_events(graph, timeline, chosen)):
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


def _names(timeline: Timeline, programs: list[int]) -> Iterator[dict[str, object]]:
    for program in programs:
        yield {"ph": "M", "name": "process_name", "pid": program, "args": {"name": timeline.programs[program]}}
        for thread, name in enumerate(("host", *timeline.streams)):
            yield {"ph": "M", "name": "thread_name", "pid": program, "tid": thread, "args": {"name": name}}
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": program,
                "tid": thread,
                "args": {"sort_index": thread},
            }


def _events(graph: Graph, timeline: Timeline, programs: list[int]) -> Iterator[dict[str, object]]:
    ops = graph.ops
    shown = np.isin(timeline.program, programs) & (timeline.duration > 0)
    labels = _labels(graph)
    for row in np.flatnonzero(shown).tolist():
        op = int(timeline.op[row])
        device = timeline.lane[row] == Lane.DEVICE
        args: dict[str, object] = {"module": graph.strings[ops.module[op]]}
        if ops.kind[op] == OpKind.COLLECTIVE:
            args |= {"bytes": int(ops.nbytes[op]), "group": graph.groups[int(ops.group[op])].name}
        elif ops.flops[op]:
            args["flops"] = int(ops.flops[op])
        label = labels.get((int(graph.block_of_op[op]), int(timeline.instance[row])), "")
        if label:
            args["module"] = str(args["module"]).replace("{}", label)
        yield {
            "ph": "X",
            "name": graph.strings[ops.name[op]],
            "cat": Phase(int(ops.phase[op])).name.lower(),
            "pid": int(timeline.program[row]),
            "tid": 1 + int(timeline.stream[row]) if device else 0,
            "ts": int(timeline.start[row]) / PS_PER_US,
            "dur": int(timeline.duration[row]) / PS_PER_US,
            "args": args,
        }


def _labels(graph: Graph) -> dict[tuple[int, int], str]:
    return {
        (number, index): instance.label
        for number, block in enumerate(graph.blocks)
        for index, instance in enumerate(block.instances)
        if instance.label
    }
