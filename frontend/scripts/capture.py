"""A script and a world -> a job graph: one run for every distinct rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echograph.errors import CaptureError
from echograph.frontend.pytorch.shapes import Results
from echograph.frontend.scripts.adapter import Adapter, check_ranks
from echograph.frontend.scripts.lower import lower_job
from echograph.frontend.scripts.mesh import infer, standing_for
from echograph.frontend.scripts.recorder import COMMUNICATION
from echograph.frontend.scripts.run import Recorded, Script, run_script
from echograph.frontend.scripts.workload import called_by_use, messages_of, workload_of
from echograph.frontend.scripts.world import World
from echograph.ir.formats import Imported
from echograph.ir.passes.model import count_job_flops
from echograph.progress import Progress, silent


def capture_script(
    script: Script,
    world: World,
    adapter: Adapter,
    *,
    ranks: Sequence[int] = (),
    say: Progress = silent,
) -> Imported:
    """Runs a script as each of the ranks that differ and makes a job of what they do.

    Args:
        script: what is run.
        world: the world; its rank does not count.
        adapter: of the framework.
        ranks: those that are run; none: what the adapter says of the first run.
        say: is told what is going on.

    Returns:
        The job graph, and notes on what stands for something else.

    Raises:
        CaptureError: as `run_script`, and where ranks or groups fit no mesh.
        UsageError: a rank that the world does not have.
    """
    check_ranks(ranks, world.size)
    notes = dict.fromkeys(adapter.check())
    first = ranks[0] if ranks else 0
    say(f"running {script.path.name} as a rank of {world.size}")
    results: Results = {}
    runs = [run_script(script, replace(world, rank=first), adapter, results)]
    mesh = _mesh(runs[0])
    names = called_by_use(runs[0], mesh)
    mesh = {names.get(axis, axis): size for axis, size in mesh.items()}
    if not ranks:
        ranks = adapter.roles(world, mesh, messages_of(runs[0], mesh))
    for done, rank in enumerate(ranks[1:], start=1):
        say(f"running {script.path.name} as further ranks of {world.size}", done, len(ranks))
        runs.append(run_script(script, replace(world, rank=rank), adapter, results))
    places = standing_for(ranks, mesh)
    say("lowering")
    job = lower_job(runs, mesh, places, workload_of(runs, places, mesh, script.path.stem))
    for run in runs:
        notes |= run.recorder.notes
    return Imported(graph=count_job_flops(job), notes=tuple(notes))


def _mesh(run: Recorded) -> dict[str, int]:
    size = run.world.size
    if run.axes is not None:
        return {name: extent for name, extent in run.axes.items() if extent > 1} or {"dp": 1}
    calls = [node.meta[COMMUNICATION] for node in run.recorder.graph.nodes if COMMUNICATION in node.meta]
    found = infer({c.ranks for c in calls}, size, {c.ranks for c in calls if c.peer >= 0})
    if found is None:
        groups = "; ".join(sorted({str(list(call.ranks[:8])) for call in calls}))
        raise CaptureError(
            f"the groups of rank {run.world.rank} are formulas of no mesh of {size} ranks: {groups}: make them by "
            "init_device_mesh"
        )
    return found
