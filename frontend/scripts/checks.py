"""What a capture counted, held against the script: a finding is a warning, or with `--strict` an error.

A capture that ends well may still be of another training than was meant: a wrapper that divides nothing, a step in
which no rank talks to another, samples that were counted at the wrong place. Each of them is said with the line of
the script that led to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch.fx import Graph

from echograph.frontend.scripts.fakes import Fakes
from echograph.frontend.scripts.recorder import COMMUNICATION, ScriptRecorder
from echograph.frontend.scripts.world import World

_SHOWN = 3


def findings(recorder: ScriptRecorder, world: World) -> Iterator[str]:
    """What is unlikely to be meant in a recorded step, a line each."""
    yield from recorder.warnings
    yield from _communication(recorder.graph, world, recorder.stepped_at)
    yield from _samples(recorder)
    if recorder.ungraded:
        names = ", ".join(recorder.ungraded[:_SHOWN])
        more = ", ..." if len(recorder.ungraded) > _SHOWN else ""
        count = len(recorder.ungraded)
        has = "a parameter gets" if count == 1 else f"{count} parameters get"
        yield (
            f"{_at(recorder.stepped_at)}the optimizer steps, and {has} no gradient ({names}{more}): they count as "
            "trained, and no backward pass reaches them"
        )


def never_asked(decided: Mapping[str, bool | int], asked: Set[str], fakes: Fakes) -> Iterator[str]:
    """What the user said, and no run came to: a misspelt name, most likely.

    Args:
        decided: which way the script goes at lines.
        asked: those of them that a value decided.
        fakes: what was to be made.
    """
    for where in decided:
        if where not in asked:
            yield (
                f"--decide {where}: no value decided anything there: look at the file's name and the line, or "
                "leave it out"
            )
    for option, names in (("--fake-data", fakes.data), ("--fake-weights", (*fakes.weights, *fakes.files))):
        for name in names:
            if name not in fakes.asked:
                yield f"{option} {name}: the script never asked for it: look at how it is spelt, or leave it out"


def _communication(graph: Graph, world: World, where: str) -> Iterator[str]:
    if world.size == 1:
        return
    groups = {node.meta[COMMUNICATION].ranks for node in graph.nodes if COMMUNICATION in node.meta}
    if not groups:
        yield (
            f"{_at(where)}no rank communicates in this step of {world.size:,} ranks: each trains a model of its "
            "own; wrap the model (DistributedDataParallel, fully_shard), or give --world-size 1"
        )
    elif all(len(ranks) == 1 for ranks in groups):
        yield (
            f"{_at(where)}all groups that communicate in this step have one rank, of {world.size:,} in the world: "
            "look at the sizes of the mesh and at the sharding strategy"
        )


def _samples(recorder: ScriptRecorder) -> Iterator[str]:
    if not recorder.samples or recorder.sampled is None:
        return
    counted = recorder.samples
    sizes, where = recorder.sampled
    # Schedules and accumulation cut a batch into equal parts; models may fold its first two dimensions.
    if all(size % counted and counted % size for size in sizes):
        yield (
            f"{_at(where)}the loader gives batches of {' or '.join(map(str, sorted(sizes)))}, and of the model's "
            f"first input {counted} samples are read: samples a second are of {counted}"
        )


def one_rank(what: str, group: Any, world: World, where: str) -> str:
    """Of a wrapper: what it divides over one rank alone, where the world has many; "" where it does not."""
    size = 1 if group is None else group.size()
    if world.size == 1 or size > 1:
        return ""
    return (
        f"{_at(where)}{what} has a group of one rank, of {world.size:,} in the world: it communicates nothing; "
        "look at the group, or the mesh, that it is given"
    )


def _at(where: str) -> str:
    return f"{where}: " if where else ""
