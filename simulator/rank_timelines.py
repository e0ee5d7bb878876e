"""Timelines of ranks that are named, one program a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Timeline
from echograph.simulator.ranks import Mesh


def of_ranks(job: JobGraph, ranks: Sequence[int], of_column: Callable[[int], Timeline]) -> Timeline:
    """What some ranks did, each as a program of its own.

    Args:
        job: the job.
        ranks: the ranks, each once.
        of_column: the timeline of one column of all programs (`ranks.Mesh`).

    Raises:
        SimulationError: a rank that is not there, or ranks cannot be told apart by the mesh.
    """
    where = Mesh(job).ranks()
    parts: dict[int, Timeline] = {}
    found = []
    for number, rank in enumerate(ranks):
        if rank not in where:
            raise SimulationError(f"no rank {rank} to trace: give ranks from 0 to {where.size - 1}")
        program, column = (int(axis[0]) for axis in np.nonzero(where == rank))
        if column not in parts:
            parts[column] = of_column(column)
        found.append(_program(parts[column], program, number))
    return _together(found, tuple(f"rank {rank}" for rank in ranks), job.streams)


COLUMNS = ("program", "lane", "stream", "op", "instance", "micro_batch", "start", "duration", "cause")


def _program(timeline: Timeline, program: int, number: int) -> dict[str, np.ndarray]:
    """The rows of one program, whose causes are rows among them, or -1."""
    rows = np.flatnonzero(timeline.program == program)
    part = {name: getattr(timeline, name)[rows] for name in COLUMNS}
    place = np.full(len(timeline) + 1, NONE, np.int64)
    place[rows] = np.arange(len(rows))
    part["cause"] = place[part["cause"]]
    part["program"] = np.full(len(rows), number, np.int32)
    return part


def _together(parts: list[dict[str, np.ndarray]], names: tuple[str, ...], streams: tuple[str, ...]) -> Timeline:
    before = 0
    for part in parts:
        part["cause"] = np.where(part["cause"] == NONE, NONE, part["cause"] + before)
        before += len(part["cause"])
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    return Timeline(**columns, programs=names, streams=streams)
