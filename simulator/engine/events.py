"""The event engine: what happens, in the order in which it happens, where rates change while work runs.

Work that shares links (`sharing`) slows down and speeds up as other work begins and ends. Which tasks run at a
time then follows from the times alone, so there is no order to number beforehand: a heap holds the ends of all
that runs. Where nothing is overloaded, all times are those of the other engines, to the picosecond.

Tasks are never written out for columns: memory follows the queues (a resource in a column) and what runs on them.

Compiled only: import it where there is much to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Float64, Int32, Int64, Ragged
from echograph.simulator.engine import events_loop
from echograph.simulator.engine.columns import Columns, Ends, alone, deadlock
from echograph.simulator.engine.events_loop import COUNTS, DUE, FREE, FREE_NODE, LONGEST
from echograph.simulator.engine.machine_code import array
from echograph.simulator.engine.sharing import Sharing
from echograph.simulator.engine.static import jittered
from echograph.simulator.tasks import TaskGraph

if TYPE_CHECKING:
    from echograph.simulator.engine import Roles, StepRun


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
    tasks: TaskGraph,
    columns: Columns,
    sharing: Sharing | None = None,
    record: int = NONE,
    absent: npt.NDArray[np.bool_] | None = None,
) -> SharedEnds:
    """Runs all columns.

    Args:
        tasks: what each of them does.
        columns: how they differ.
        sharing: what they share; None for nothing.
        record: the column whose start times are wanted; -1 for none.
        absent: bool [resources, columns], what a column does not have, and in no place is waited for; None for
            nothing.

    Raises:
        DeadlockError: tasks wait for each other for ever; names two of them.
        SimulationError: the step takes more than 53 days.
    """
    table, first = _table(tasks, columns, sharing)
    queues = _queues(table, first, len(columns))
    if absent is not None:
        queues["task"][absent.T.ravel()] = events_loop.DONE
    shared = sharing or _nothing(len(columns))
    lasted = np.zeros(len(tasks) if record >= 0 else 0, np.int64)
    places, longest = array(columns.places, np.int32), int(shared.links.lengths.max(initial=0))
    due, counters = np.flatnonzero(queues["task"] != events_loop.DONE)[::-1], np.zeros(COUNTS, np.int64)
    counters[[DUE, FREE, FREE_NODE, LONGEST]] = len(due), NONE, NONE, longest
    # To the loop, arrays of records are sequences of rows.
    heap: Any = np.zeros(len(queues) + 1, events_loop.END)
    flows: Any = np.zeros(len(queues), events_loop.FLOW)
    work = events_loop.Work(
        tasks=table,
        deps=array(tasks.deps.values, np.int32),
        factor=array(columns.factor, np.float64),
        places=places,
        attendance=np.array([np.bincount(row, minlength=len(columns)) for row in places], np.int32),
        routes=array(shared.routes, np.int32),
        jitter=float(columns.jitter),
        seed=np.uint64(columns.seed),
        record=record,
        lasted=lasted,
    )
    events = events_loop.EventHeap(heap=heap, flows=flows, counters=counters)
    network = _network(shared, len(queues), 64 + 2 * longest)
    state = events_loop.TaskQueues(
        queues=queues,
        rendezvous=np.full(1 << max(4, len(queues).bit_length()), NONE, np.int32),
        due=np.resize(due.astype(np.int32), len(queues)),
        order=np.zeros((2, len(queues)), np.int32),
    )
    while not events_loop.run(work, state, network, events):
        nodes: Any = network.nodes
        network = network._replace(nodes=cast(Any, np.append(nodes, np.zeros_like(nodes))))
    _check(queues, tasks.resources)
    end, waited = (np.ascontiguousarray(queues[name].reshape(len(columns), -1).T) for name in ("since", "waited"))
    links: Any = network.links
    return SharedEnds(
        end=end,
        waited=waited,
        start=table["start"][: len(lasted)].copy(),
        duration=lasted,
        carried=links["busy"] * shared.capacity / 1e12,
    )


def _table(tasks: TaskGraph, columns: Columns, sharing: Sharing | None) -> tuple[Any, Int32]:
    """What the loop knows of each task, and the first task of each resource. After the last is where it ends."""
    table: Any = np.zeros(len(tasks) + 1, events_loop.TASK)
    these = table[:-1]
    table["deps"] = tasks.deps.offsets
    these["duration"], these["resource"], these["rendezvous"] = tasks.duration, tasks.resource, tasks.rendezvous
    these["row"], these["kind"] = columns.place, columns.kind
    same = (columns.factor == 1.0).all(axis=1)
    steady = np.where(same[columns.kind], events_loop.AS_IT_IS, events_loop.BY_FACTOR)
    these["steady"] = np.where(jittered(tasks, columns), events_loop.ON_ITS_OWN, steady)
    these["route"] = NONE
    if sharing is not None:
        these["route"], these["load"] = sharing.route, sharing.load
    first = np.full(tasks.resources, events_loop.DONE, np.int32)
    numbers = int(tasks.rendezvous.max(initial=NONE)) + 1
    events_loop.link_tasks(table, first, np.full((2, numbers), NONE, np.int32))
    return table, first


def _queues(table: Any, first: Int32, columns: int) -> Any:
    """All queues before their first task, column after column."""
    queues = np.zeros(len(first) * columns, events_loop.QUEUE)
    queues["task"], queues["column"] = np.tile(first, columns), np.repeat(np.arange(columns), len(first))
    queues["waiting"] = queues["following"] = NONE
    queues["need"] = table["deps"][np.minimum(queues["task"], len(table) - 1)]
    return queues


def _network(sharing: Sharing, flows: int, nodes: int) -> events_loop.SharedLinks:
    """Idle links, with room for so many flows, and flows on links."""
    links, hops = events_loop.links_and_hops(sharing, flows)
    room: Any = np.zeros(nodes, events_loop.NODE)
    return events_loop.SharedLinks(
        offsets=array(sharing.links.offsets, np.int64),
        hops=hops,
        links=links,
        nodes=room,
        changed=np.zeros(len(links), np.int32),
        neighbours=np.zeros(len(links), np.int32),
        participants=np.zeros((2, flows), np.int32),
    )


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


def _check(queues: Any, resources: int) -> None:
    """Raises if queues stand still: names those of the first column in which some do."""
    stuck = np.flatnonzero(queues["task"] != events_loop.DONE)
    if len(stuck):
        these = stuck[stuck // resources == stuck[0] // resources]
        raise deadlock(queues["task"][these].tolist())
    if queues["since"].max(initial=0) >= events_loop.NEVER:
        raise SimulationError("the step takes more than 53 days: give the links that it shares more capacity")
