"""The event engine: what happens, in the order in which it happens, where rates change while work runs.

Work that shares links (`sharing`) slows down and speeds up as other work begins and ends. Which tasks run at a
time then follows from the times alone, so there is no order to number beforehand: a heap holds the ends of all
that runs. Where nothing is overloaded, all times are those of the other engines, to the picosecond.

Tasks are never written out for columns: memory follows the lines (a resource in a column) and what runs on them.

Compiled only: import it where there is much to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Float64, Int32, Int64, Ragged
from echograph.simulator.engine import events_loop
from echograph.simulator.engine.columns import Columns, Ends, alone, deadlock
from echograph.simulator.engine.events_loop import COUNTS, DUE, FREE, FREE_NODE, LONGEST
from echograph.simulator.engine.sharing import Sharing
from echograph.simulator.engine.static import jittered
from echograph.simulator.tasks import TaskGraph

if TYPE_CHECKING:
    from echograph.simulator.roles import Roles, StepRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedEnds(Ends):
    """When columns end that share links. The durations of a recorded column are those that came of the sharing.

    Attributes:
        carried: float64 [links], bytes that each link has carried.
    """

    carried: Float64


def simulate(roles: Roles) -> StepRun:
    """One step of roles that share nothing.

    Raises:
        DeadlockError: tasks wait for each other for ever.
    """
    return roles.step(run(roles.tasks))


def run(tasks: TaskGraph) -> Int64:
    """int64 [tasks], picoseconds, when each task starts; they share nothing.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
    """
    return run_columns(tasks, alone(tasks), record=0).start


def run_columns(
    tasks: TaskGraph, columns: Columns, sharing: Sharing | None = None, record: int = NONE
) -> SharedEnds:
    """Runs all columns.

    Args:
        tasks: what each of them does.
        columns: how they differ.
        sharing: what they share; None for nothing.
        record: the column whose start times are wanted; -1 for none.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
        SimulationError: the step takes more than 53 days.
    """
    count = len(columns)
    table, first = _table(tasks, columns, sharing)
    lines = _lines(table, first, count)
    todo = np.flatnonzero(lines["task"] != events_loop.DONE)[::-1]
    shared = sharing or _nothing(count)
    links, hops = events_loop.links_and_hops(shared, len(lines))
    flows, longest = np.zeros(len(lines), events_loop.FLOW), int(shared.links.lengths.max(initial=0))
    counts = np.zeros(COUNTS, np.int64)
    counts[[DUE, FREE, FREE_NODE, LONGEST]] = len(todo), NONE, NONE, longest
    lasted = np.zeros(len(tasks) if record >= 0 else 0, np.int64)
    # One layout and one type each, or the compiler would start again.
    deps, places, routes = (
        np.ascontiguousarray(values, np.int32) for values in (tasks.deps.values, columns.places, shared.routes)
    )
    factor, offsets = np.ascontiguousarray(columns.factor, np.float64), shared.links.offsets.astype(np.int64)
    attend = np.array([np.bincount(row, minlength=count) for row in places], np.int32)
    meetings = np.full(1 << max(4, len(lines).bit_length()), NONE, np.int32)
    heap = np.zeros(len(lines) + 1, events_loop.END)
    near, fellows = np.zeros((2, len(links)), np.int32), np.zeros((2, len(lines)), np.int32)
    fixed = (
        *(table, deps, factor, places, attend, float(columns.jitter), np.uint64(columns.seed), record, lasted),
        *(lines, meetings, np.resize(todo.astype(np.int32), len(lines)), heap, counts),
        *(routes, offsets, hops, links, flows, near[0], near[1], fellows),
    )
    nodes = np.zeros(64 + 2 * longest, events_loop.NODE)
    while not events_loop.run(*fixed, nodes):
        nodes = np.append(nodes, np.zeros_like(nodes))
    _check(lines, tasks.resources)
    end, waited = (np.ascontiguousarray(lines[name].reshape(count, -1).T) for name in ("since", "waited"))
    return SharedEnds(
        end=end,
        waited=waited,
        start=table["start"][: len(lasted)].copy(),
        duration=lasted,
        carried=links["busy"] * shared.capacity / 1e12,
    )


def _table(tasks: TaskGraph, columns: Columns, sharing: Sharing | None) -> tuple[Any, Int32]:
    """What the loop knows of each task, and the first task of each resource. After the last is where it ends."""
    table = np.zeros(len(tasks) + 1, events_loop.TASK)
    these = table[:-1]
    table["deps"] = tasks.deps.offsets
    these["duration"], these["resource"], these["rendezvous"] = tasks.duration, tasks.resource, tasks.rendezvous
    these["row"], these["kind"] = columns.place, columns.kind
    same = (columns.factor == 1.0).all(axis=1)
    these["steady"] = np.where(jittered(tasks, columns), 0, np.where(same[columns.kind], 2, 1))
    these["route"] = NONE
    if sharing is not None:
        these["route"], these["load"] = sharing.route, sharing.load
    first = np.full(tasks.resources, events_loop.DONE, np.int32)
    events_loop.chain(table, first, np.full((2, int(tasks.rendezvous.max(initial=NONE)) + 1), NONE, np.int32))
    return table, first


def _lines(table: Any, first: Int32, columns: int) -> Any:
    """All lines before their first task, column after column."""
    lines = np.zeros(len(first) * columns, events_loop.LINE)
    lines["task"], lines["column"] = np.tile(first, columns), np.repeat(np.arange(columns), len(first))
    lines["waiters"] = lines["chain"] = NONE
    lines["need"] = table["deps"][np.minimum(lines["task"], len(table) - 1)]
    return lines


def _nothing(columns: int) -> Sharing:
    """No links."""
    return Sharing(
        capacity=np.zeros(0),
        load=np.zeros(0),
        route=np.zeros(0, np.int32),
        routes=np.full((1, columns), NONE, np.int32),
        links=Ragged(np.zeros(1, np.int64), np.zeros(0, np.int32)),
        weight=np.zeros(0),
    )


def _check(lines: Any, resources: int) -> None:
    """Raises if lines stand still: names those of the first column in which some do."""
    stuck = np.flatnonzero(lines["task"] != events_loop.DONE)
    if len(stuck):
        these = stuck[stuck // resources == stuck[0] // resources]
        raise deadlock(lines["task"][these].tolist())
    if lines["since"].max(initial=0) >= events_loop.NEVER:
        raise SimulationError("the step takes more than 53 days: give the links that it shares more capacity")
