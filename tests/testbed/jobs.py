"""Jobs of the test bed, each said once: ranks run it and the simulator predicts it from the same instructions.

A program is what one process of PyTorch does: it computes, issues communications that go on beside it, and waits
for them. `Job.program` writes that down for `worker.py`, `Job.graph` for the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.types import CollectiveKind, DType, Duration, Source
from echograph.units import to_ps

DEVICE = "sleep"
# What gloo runs. It has no reduce-scatter of its own: ProcessGroupGloo all-reduces and keeps a part.
COLLECTIVES = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.ALL_REDUCE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Time that stands for a device's work."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicate:
    """A communication that is issued here and goes on beside the program.

    Attributes:
        what: a name of `COLLECTIVES`, "send" or "recv".
        nbytes: the whole buffer of a rank, or the message.
        axes: mesh axes of the group.
        name: of the communicator; one runs its collectives in order.
        handle: what `Wait` names.
        peer: for messages, the other's place relative to this rank's.
    """

    what: str
    nbytes: int
    axes: tuple[str, ...]
    name: str
    handle: str
    peer: int = 0

    @property
    def stream(self) -> str:
        """Messages of the two directions do not queue behind each other."""
        return self.name if self.what in COLLECTIVES else f"{self.name}.{self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The program stands until a communication is done."""

    handle: str


Instruction = Compute | Communicate | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Programs on a mesh.

    Attributes:
        mesh: axis -> size, outermost first.
        programs: what the ranks of given coordinates run; axes not named are free.
    """

    mesh: Mapping[str, int]
    programs: Sequence[tuple[Mapping[str, int], Sequence[Instruction]]]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.mesh.values())

    def program(self, rank: int) -> list[dict[str, Any]]:
        """What a rank runs, for `worker.py`: groups as lists of ranks, peers as places in them."""
        at = self.coordinates(rank)
        mine = next(p for where, p in self.programs if all(at[axis] == place for axis, place in where.items()))
        return [self._said(what, rank) for what in mine]

    def graph(self) -> JobGraph:
        """The job as the simulator knows it: what a program waits for is a dependency."""
        builder = GraphBuilder(name="testbed")
        builder.mesh = tuple(Axis(name=name, size=size) for name, size in self.mesh.items())
        for where, program in self.programs:
            begin = builder.op_count()
            _write(builder, program)
            builder.program([(0, begin, builder.op_count(), 0, 0)], role=str(dict(where)), coordinates=where)
        return builder.build(JobGraph)

    def _said(self, what: Instruction, rank: int) -> dict[str, Any]:
        match what:
            case Compute():
                return {"do": "compute", "seconds": what.seconds}
            case Wait():
                return {"do": "wait", "handle": what.handle}
        group = self._group(rank, what.axes)
        return {
            "do": what.what,
            "bytes": what.nbytes,
            "communicator": what.name,
            "ranks": group,
            "handle": what.handle,
            "peer": (group.index(rank) + what.peer) % len(group),
        }

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank sits on the mesh."""
        return dict(zip(self.mesh, map(int, np.unravel_index(rank, tuple(self.mesh.values()))), strict=True))

    def _group(self, rank: int, axes: Sequence[str]) -> list[int]:
        mine = self.coordinates(rank)
        others = [axis for axis in self.mesh if axis not in axes]
        alike = (r for r in range(self.ranks) if all(self.coordinates(r)[a] == mine[a] for a in others))
        return list(alike)


def _write(builder: GraphBuilder, program: Sequence[Instruction]) -> None:
    """Adds a program; it stands while it computes, so what follows comes after its work and its waits."""
    before: list[int] = []
    issued: dict[str, int] = {}
    for what in program:
        match what:
            case Compute():
                before = [_compute(builder, what.seconds, before)]
            case Communicate():
                issued[what.handle] = _communicate(builder, what, before)
            case Wait():
                before = [*before, issued[what.handle]]


def _compute(builder: GraphBuilder, seconds: float, deps: list[int]) -> int:
    known = Duration(device=DEVICE, picoseconds=to_ps(seconds), source=Source.MEASURED)
    # As if the device did one floating-point operation a nanosecond.
    return builder.compute("sleep", flops=max(1, round(seconds * 1e9)), deps=deps, durations=(known,))


def _communicate(builder: GraphBuilder, what: Communicate, deps: list[int]) -> int:
    group, stream = builder.group("+".join(what.axes), axes=what.axes), builder.stream(what.stream)
    if what.what in COLLECTIVES:
        return builder.collective(
            what.what, COLLECTIVES[what.what], group=group, bytes_per_rank=what.nbytes, dtype=DType.FP32,
            asynchronous=True, stream=stream, deps=deps,
        )  # fmt: skip
    add = builder.send if what.what == "send" else builder.recv
    return add(what.what, group=group, peer=what.peer, tag=0, nbytes=what.nbytes, stream=stream, deps=deps)


def ddp(forward_s: float, backward_s: float, buckets: Sequence[int], axes: tuple[str, ...]) -> list[Instruction]:
    """Data parallelism: each bucket of gradients is reduced while backward goes on, then all are waited for."""
    program: list[Instruction] = [Compute(seconds=forward_s)]
    for number, nbytes in enumerate(buckets):
        program.append(Compute(seconds=backward_s / len(buckets)))
        program.append(
            Communicate(what="all_reduce", nbytes=nbytes, axes=axes, name="dp", handle=f"bucket {number}")
        )
    return [*program, *(Wait(handle=f"bucket {number}") for number in range(len(buckets)))]


def fsdp(
    forward_s: float, backward_s: float, blocks: int, nbytes: int, axes: tuple[str, ...]
) -> list[Instruction]:
    """Fully sharded: a block's parameters are gathered one block ahead, its gradients reduced behind it."""

    def talk(what: str, handle: str) -> Communicate:
        return Communicate(what=what, nbytes=nbytes, axes=axes, name="dp", handle=handle)

    program: list[Instruction] = []
    passes = [("forward", forward_s, range(blocks)), ("backward", backward_s, range(blocks - 1, -1, -1))]
    for phase, seconds, order in passes:
        program.append(talk("all_gather", f"{phase} {order[0]}"))
        for place, block in enumerate(order):
            if place + 1 < blocks:
                program.append(talk("all_gather", f"{phase} {order[place + 1]}"))
            program += [Wait(handle=f"{phase} {block}"), Compute(seconds=seconds / blocks)]
            if phase == "backward":
                program.append(talk("reduce_scatter", f"gradient {block}"))
    return [*program, *(Wait(handle=f"gradient {block}") for block in range(blocks - 1, -1, -1))]


def one_f_one_b(
    stage: int,
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    nbytes: int,
    gradient: int = 0,
) -> list[Instruction]:
    """One stage of a 1F1B pipeline, which receives ahead; a gradient, if any, is reduced over dp at the end."""
    first, last = stage == 0, stage == stages - 1

    def message(what: str, name: str, number: int, peer: int) -> Communicate:
        handle = f"{name} {what} {number}"
        return Communicate(what=what, nbytes=nbytes, axes=("pp",), name=name, handle=handle, peer=peer)

    def run(kind: str, number: int) -> list[Instruction]:
        forward = kind == "F"
        name, seconds = ("activation", forward_s) if forward else ("gradient", backward_s)
        made: list[Instruction] = []
        if not (first if forward else last):
            made.append(Wait(handle=f"{name} recv {number}"))
        made.append(Compute(seconds=seconds))
        if not (last if forward else first):
            made.append(message("send", name, number, 1 if forward else -1))
        return made

    program: list[Instruction] = []
    for number in range(micro_batches):
        program += [] if first else [message("recv", "activation", number, -1)]
        program += [] if last else [message("recv", "gradient", number, 1)]
    warm_up = min(stages - 1 - stage, micro_batches)
    order = [("F", number) for number in range(warm_up)]
    for number in range(micro_batches):
        order += [("F", number + warm_up)] if number + warm_up < micro_batches else []
        order.append(("B", number))
    for kind, number in order:
        program += run(kind, number)
    if gradient:
        program.append(Communicate(what="all_reduce", nbytes=gradient, axes=("dp",), name="dp", handle="weights"))
    sent = [what.handle for what in program if isinstance(what, Communicate) and what.what != "recv"]
    return [*program, *(Wait(handle=handle) for handle in sent)]


def alike(ranks: int, program: Sequence[Instruction]) -> Job:
    """One data-parallel group, whose ranks all run one program on the axis dp."""
    return Job(mesh={"dp": ranks}, programs=[({}, program)])


def apart(groups: int, local: int, programs: Sequence[Sequence[Instruction]]) -> Job:
    """Groups that each have `local` ranks in each of two racks, and a program each on the axes rack and local."""
    return Job(
        mesh={"rack": 2, "group": groups, "local": local},
        programs=[({"group": number}, program) for number, program in enumerate(programs)],
    )


def pipeline(stages: int, replicas: int, **of_stage: Any) -> Job:
    """A 1F1B pipeline, in as many replicas; the keywords are those of `one_f_one_b`."""
    return Job(
        mesh={"pp": stages, "dp": replicas},
        programs=[({"pp": stage}, one_f_one_b(stage, stages, **of_stage)) for stage in range(stages)],
    )


def alone(kind: str, ranks: int, nbytes: int) -> Job:
    """One communication and nothing else; for messages every rank sends to its right, as nccl-tests' sendrecv."""

    def talk(what: str, peer: int = 0) -> Communicate:
        return Communicate(what=what, nbytes=nbytes, axes=("dp",), name="dp", handle=what, peer=peer)

    issued = [talk("recv", -1), talk("send", 1)] if kind == "send_recv" else [talk(kind)]
    return alike(ranks, [*issued, *(Wait(handle=what.handle) for what in issued)])
