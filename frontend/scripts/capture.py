"""A script and a world -> a job graph: one run for every distinct rank.

What the recorded steps train, and what the axes of the mesh are called, is told by what goes along them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from echograph.errors import CaptureError
from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.annotate import FQN, GRADIENT_OF, PHASE, ROLE, VAL
from echograph.frontend.pytorch.call_nodes import is_getitem, is_view
from echograph.frontend.pytorch.lower import DTYPES
from echograph.frontend.pytorch.shapes import Results
from echograph.frontend.scripts.adapter import Adapter, check_ranks
from echograph.frontend.scripts.collectives import Communication
from echograph.frontend.scripts.lower import lower_job
from echograph.frontend.scripts.mesh import axes_of, crossed, infer, standing_for
from echograph.frontend.scripts.recorder import COMMUNICATION, PAYLOAD
from echograph.frontend.scripts.run import Recorded, Script, run_script
from echograph.frontend.scripts.world import World
from echograph.ir.formats import Imported
from echograph.ir.graph import Workload
from echograph.ir.passes.gradients import CONTEXT, DATA, DATA_AXES, REPLICATE, SHARD
from echograph.ir.passes.model import count_job_flops
from echograph.ir.types import CollectiveKind, DType
from echograph.progress import Progress, silent

_KNOWN = (*DATA_AXES, "pp", "tp")


def workload_of(
    runs: Sequence[Recorded], places: Sequence[Mapping[str, int]], mesh: Mapping[str, int], name: str
) -> Workload:
    """What recorded steps train, as far as they tell.

    Args:
        runs: a step of each role; the first has the input of the model.
        places: of each role, the coordinates that it has alone.
        mesh: axes and sizes.
        name: of the model.
    """
    recorder = runs[0].recorder
    shape: Sequence[int] = ()
    whole = False
    if recorder.sample is not None:
        shape, whole = recorder.sample.shape, not recorder.sample.is_floating_point()
    tokens = int(shape[1]) * mesh.get(CONTEXT, 1) if len(shape) == 2 and whole else 0
    return Workload(
        model=name,
        parameters=_parameters(runs, places, mesh),
        batch_size=int(shape[0]) if shape else 1,
        sequence_length=tokens,
        dtype=_dtype(runs[0]),
        optimizer=next((type(o).__name__.lower() for o in recorder.memory.optimizers), ""),
        master_weights=any(map(_has_masters, runs)),
    )


def _parameters(runs: Sequence[Recorded], places: Sequence[Mapping[str, int]], mesh: Mapping[str, int]) -> int:
    """Trainable elements of all stages; roles that differ elsewhere have the same ones."""
    along = {axis for run in runs for axis in messages_of(run, mesh)}
    of_stages: dict[tuple[tuple[str, int], ...], int] = {}
    for run, place in zip(runs, places, strict=True):
        stage = tuple((axis, at) for axis, at in place.items() if axis in along)
        of_stages.setdefault(stage, run.recorder.memory.parameter_count())
    return sum(of_stages.values())


def messages_of(run: Recorded, mesh: Mapping[str, int]) -> list[str]:
    """The axes along which a rank sends messages to single ranks."""
    peers = {call.peer for call in _calls(run) if call.peer >= 0}
    found = {axis for peer in peers for axis in crossed(run.world.rank, peer, mesh)}
    return [name for name in mesh if name in found]


def called_by_use(run: Recorded, mesh: Mapping[str, int]) -> dict[str, str]:
    """Other names for axes whose ranks have micro-batches of their own: "dp", or "dp_replicate" and "dp_shard".

    Such an axis is one along which gradients are added up; along its shards parameters are gathered, too. Names
    that passes know are left, and axes of which this leaves several alike.

    Args:
        run: a recorded step.
        mesh: axes and sizes, as the script or its groups tell them.
    """
    carried: dict[str, set[str]] = {name: set() for name in mesh}
    exchanged: set[str] = set()
    for node in run.recorder.graph.nodes:
        call: Communication | None = node.meta.get(COMMUNICATION)
        if call is None or call.peer >= 0 or is_getitem(node):
            continue
        payload = node.meta.get(PAYLOAD) or _payload_of(node)
        for axis in axes_of(call.ranks, mesh) or ():
            carried[axis].add(payload)
            if payload == "activation" and call.kind in _OF_ACTIVATIONS:
                exchanged.add(axis)
    data = [a for a in mesh if a not in _KNOWN and "gradient" in carried[a] and a not in exchanged]
    if len(data) == 1 and DATA not in mesh:
        return {data[0]: DATA}
    names = {axis: SHARD if "parameter" in carried[axis] else REPLICATE for axis in data}
    return names if len({*names.values()}) == len(names) and not {*names.values()} & {*mesh} else {}


_OF_ACTIVATIONS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def _payload_of(node: Node) -> str:
    """What a communication carries that nobody said: gradients, where it is given one."""
    return "gradient" if any(map(_is_gradient, node.args[0])) else "activation"  # type: ignore[arg-type]


def _is_gradient(node: Node) -> bool:
    while GRADIENT_OF not in node.meta and node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return GRADIENT_OF in node.meta or node.meta.get(ROLE) == annotate.GRADIENT


def _calls(run: Recorded) -> list[Communication]:
    return [node.meta[COMMUNICATION] for node in run.recorder.graph.nodes if COMMUNICATION in node.meta]


def _has_masters(run: Recorded) -> bool:
    """Whether there are copies in fp32, which the optimizer keeps, of parameters in 16 bits."""
    held = [node for node in run.recorder.graph.nodes if node.op == "placeholder"]
    short = any(n.meta[ROLE] == annotate.PARAMETER and n.meta[VAL].element_size() == 2 for n in held)
    return short and any(
        n.meta[ROLE] == annotate.OPTIMIZER_STATE and "master" in n.meta[FQN].split(".")[-2:]
        and n.meta[VAL].dtype == torch.float32
        for n in held
    )  # fmt: skip


def _dtype(run: Recorded) -> DType:
    """Type of most of what the forward pass makes, which autocast may have chosen."""
    counts: dict[Any, int] = {}
    for node in run.recorder.graph.nodes:
        value = node.meta.get(VAL)
        forward = node.op == "call_function" and node.meta[PHASE] == annotate.FORWARD
        if forward and isinstance(value, Tensor) and value.is_floating_point():
            counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    return DTYPES[max(counts, key=lambda dtype: counts[dtype])] if counts else DType.FP32


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
