"""A script and a world -> a job graph: one run for every distinct rank, and a program for each.

What the recorded steps train, and what the axes of the mesh are called, is told by what goes along them. The mesh
is what the groups of a run are formulas of: axes, outermost first. A rank is the mixed-radix number of its
coordinates. A group of ranks that differ along some axes is then a sum of multiples of those axes' strides; from
the strides of all groups together follow the axes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, Node

from echograph.errors import CaptureError
from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.annotate import FQN, GRADIENT_OF, MODULE, PHASE, RECOMPUTE, ROLE, VAL
from echograph.frontend.pytorch.call_nodes import is_allocation, is_getitem, is_in_place, is_view, qualified_name
from echograph.frontend.pytorch.lower import DTYPES, PHASES, GraphLowering, Order
from echograph.frontend.pytorch.shapes import Results
from echograph.frontend.scripts.adapter import Adapter, check_ranks
from echograph.frontend.scripts.checks import findings, never_asked
from echograph.frontend.scripts.collectives import Communication
from echograph.frontend.scripts.held import memory_roots, release
from echograph.frontend.scripts.host_work import WORK, HostPrice, wait_for_value, wait_for_work
from echograph.frontend.scripts.launches import Launch, beside
from echograph.frontend.scripts.read_once import read_once
from echograph.frontend.scripts.recorder import (
    COMMUNICATION,
    COPY,
    GRAPH,
    MICRO_BATCH,
    PAYLOAD,
    REGION,
    SHARES,
    BriefRecorder,
    PassingRecorder,
)
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.streams import AFTER, COMPUTE, STREAM
from echograph.frontend.scripts.world import Shared, World, differing
from echograph.ir.builder import Common, GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.formats import Imported
from echograph.ir.graph import Axis, JobGraph, Workload
from echograph.ir.passes.annotate import Annotate
from echograph.ir.passes.fuse import COMPILED, KernelRegion, fuse_regions
from echograph.ir.passes.kernels import SUFFIX
from echograph.ir.passes.model import CONTEXT, DATA, DATA_AXES, REPLICATE, SHARD, count_job_flops
from echograph.ir.types import (
    ANY_HOST,
    Attention,
    CollectiveKind,
    DType,
    Duration,
    Payload,
    Source,
    TensorRole,
)
from echograph.progress import Progress, silent
from echograph.units import to_ps


def infer(
    groups: Iterable[Sequence[int]], size: int, messages: Iterable[Sequence[int]] = ()
) -> dict[str, int] | None:
    """The axes that groups of ranks tell of; None where they are no formulas of any mesh.

    Args:
        groups: global ranks of each, as one rank sees them.
        size: of the world.
        messages: two ranks each, of which one sends to the other.

    Returns:
        A mesh of the fewest axes that every group is some of. An axis of messages is called "pp", the only other
        one "dp"; several others "axis0", "axis1", ...
    """
    bounds = {1, size}
    for ranks in groups:
        steps = _strides(sorted(ranks))
        if steps is None:
            return None
        for stride, count in steps:
            bounds |= {stride, stride * count}
    ordered = sorted(bounds, reverse=True)
    sizes = [high // low for high, low in pairwise(ordered)]
    if prod(sizes) != size or any(high % low for high, low in pairwise(ordered)):
        return None
    numbers = dict(zip(map(str, range(len(sizes))), sizes, strict=True)) or {"0": 1}
    stages = {axis for here, there in messages for axis in crossed(here, there, numbers)}
    others = len(numbers) - len(stages)
    return {_name(axis, stages, others): extent for axis, extent in numbers.items()}


def _name(axis: str, stages: set[str], others: int) -> str:
    if axis in stages:
        return "pp" if len(stages) == 1 else f"pp{axis}"
    return "dp" if others == 1 else f"axis{axis}"


def _strides(ranks: Sequence[int]) -> list[tuple[int, int]] | None:
    """(stride, count) of each level of a set of ranks, innermost first; None where they are not regular."""
    found: list[tuple[int, int]] = []
    while len(ranks) > 1:
        stride = ranks[1] - ranks[0]
        count = 1
        while count < len(ranks) and ranks[count] - ranks[0] == stride * count:
            count += 1
        if len(ranks) % count or count == 1:
            return None
        rows = [ranks[i : i + count] for i in range(0, len(ranks), count)]
        if any(rank - row[0] != stride * i for row in rows for i, rank in enumerate(row)):
            return None
        found.append((stride, count))
        ranks = [row[0] for row in rows]
    return found


def axes_of(ranks: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes along which the ranks of a group differ; None where it is not all ranks of some axes.

    Args:
        ranks: global.
        mesh: axes and sizes, outermost first.
    """
    return _axes_of(tuple(ranks), tuple(mesh.items()))


@lru_cache(maxsize=256)
def _axes_of(ranks: tuple[int, ...], mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...] | None:
    # A group is asked for at each of its calls, and may have all ranks of a large world.
    sizes = dict(mesh)
    places = [place_of(rank, sizes) for rank in ranks]
    varied = [len({place[name] for place in places}) for name in sizes]
    if prod(varied) != len(ranks) or any(
        n not in (1, size) for n, size in zip(varied, sizes.values(), strict=True)
    ):
        return None
    found = tuple(name for name, count in zip(sizes, varied, strict=True) if count > 1)
    # A group of one rank lies along an axis of one.
    return found or tuple(name for name, size in sizes.items() if size == 1)[-1:]


def place_of(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Coordinates of a rank."""
    place: dict[str, int] = {}
    for name, size in reversed(list(mesh.items())):
        rank, place[name] = divmod(rank, size)
    return {name: place[name] for name in mesh}


def standing_for(ranks: Sequence[int], mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """The fixed coordinates of each of some ranks, such that together they stand for all ranks once.

    Args:
        ranks: those that were captured.
        mesh: axes and sizes, outermost first.

    Raises:
        CaptureError: there is no choice of axes of which they have each place once.
    """
    places = [place_of(rank, mesh) for rank in ranks]
    names = list(mesh)
    for chosen in sorted(product((False, True), repeat=len(names)), key=sum):
        fixed = [name for name, taken in zip(names, chosen, strict=True) if taken]
        if prod(mesh[name] for name in fixed) == len(ranks):
            found = {tuple(place[name] for name in fixed) for place in places}
            if len(found) == len(ranks):
                return [{name: place[name] for name in fixed} for place in places]
    shown = ", ".join(f"{name}={size}" for name, size in mesh.items())
    raise CaptureError(
        f"--ranks {','.join(map(str, ranks))}: these do not stand for all ranks of the mesh {shown}: give one "
        "rank for each place on some of its axes, or leave --ranks out"
    )


def crossed(rank: int, peer: int, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes on which two ranks differ."""
    here, there = place_of(rank, mesh), place_of(peer, mesh)
    return tuple(axis for axis in mesh if here[axis] != there[axis])


def offset(rank: int, peer: int, mesh: Mapping[str, int]) -> int:
    """How far behind a rank another one stands in their group along the axes on which they differ."""
    here, there, behind = place_of(rank, mesh), place_of(peer, mesh), 0
    for axis in crossed(rank, peer, mesh):
        behind = behind * mesh[axis] + there[axis] - here[axis]
    return behind


_PAYLOADS = {
    "parameter": Payload.PARAMETER,
    "gradient": Payload.GRADIENT,
    "activation": Payload.ACTIVATION,
    "optimizer_state": Payload.OPTIMIZER_STATE,
    "other": Payload.OTHER,
}
# Of what two ranks exchange in place of an all-reduce: no message of a schedule has it.
_EXCHANGE = 1 << 19
_LAUNCHED = Duration(device=ANY_HOST, picoseconds=0, source=Source.ANALYTICAL)
_OF_ROLES = {
    TensorRole.PARAMETER: Payload.PARAMETER,
    TensorRole.GRADIENT: Payload.GRADIENT,
    TensorRole.OPTIMIZER_STATE: Payload.OPTIMIZER_STATE,
    TensorRole.BUFFER: Payload.OTHER,
}


def lower_job(
    recorded: Sequence[ScriptRun],
    mesh: Mapping[str, int],
    places: Sequence[Mapping[str, int]],
    workload: Workload,
    host: HostPrice | None = None,
) -> JobGraph:
    """The job of recorded steps.

    Args:
        recorded: a step of each role.
        mesh: axes and sizes, outermost first.
        places: of each role, the coordinates that it has alone; it stands for all ranks that have them.
        workload: what the job trains.
        host: prices the host's work for each operation, where that was counted.

    Raises:
        CaptureError: a group is no formula of the mesh, or a tensor has a type that a graph does not know.
    """
    builder = GraphBuilder(name=workload.model, workload=workload)
    if 1 not in mesh.values() and any(_has_single_ranks(run.recorder.graph) for run in recorded):
        # Frameworks call collectives of single ranks, too: such a group lies along an axis of one.
        mesh = {**mesh, "self": 1}
    builder.mesh = tuple(Axis(name=name, size=size) for name, size in mesh.items())
    regions: list[KernelRegion | None] = []
    seconds: dict[int, float] = {}
    for run, place in zip(recorded, places, strict=True):
        begin = builder.op_count()
        lowering = _Rank(builder, run, mesh)
        for node in run.recorder.graph.nodes:
            before = builder.op_count()
            lowering.add(node)
            if host is not None and WORK in node.meta and not is_getitem(node):
                _price(seconds, host.seconds(node.meta[WORK]), range(before, builder.op_count()))
        role = " ".join(f"{axis}={at}" for axis, at in place.items()) or "every rank"
        builder.program(lowering.calls(begin), role=role, coordinates=place, held=run.recorder.held)
        regions += lowering.regions
        seconds |= dict.fromkeys(lowering.beside, 0.0)
    job = builder.build(JobGraph)
    job = job if host is None else _of_host(job, host.name, seconds)
    return fuse_regions(job, regions) if any(regions) else job


def _left_out(graph: Graph) -> set[Node]:
    """What a checkpoint within a compiled region recomputes and nothing reads, as a layer's last product.

    A checkpoint by itself runs its function again up to the last result that backward wants, or to the end; a
    compiler has both passes before it, and runs what is read.
    """
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        region = node.meta.get(REGION)
        if node.meta.get(PHASE) == RECOMPUTE and region is not None and region.maker == COMPILED:
            acts = node.target is not operator.getitem and (COMMUNICATION in node.meta or is_in_place(node))
            if not acts and found.issuperset(node.users):
                found.add(node)
    return found


def _price(seconds: dict[int, float], work: float, made: range) -> None:
    """Gives the host's work before an operator to the first operation that it became.

    One that became none was before another: its work is that one's, in `seconds` under -1 until it comes.
    """
    work += seconds.pop(-1, 0.0)
    seconds[made[0] if made else -1] = work


def _of_host(job: JobGraph, name: str, seconds: Mapping[int, float]) -> JobGraph:
    """The job with what the host does before each operation; one that has none goes with the one before."""
    count = len(job.ops)
    picoseconds = np.full(count, NONE, np.int64)
    for row, each in seconds.items():
        if row >= 0:
            picoseconds[row] = to_ps(each)
    measured = np.full(count, Source.MEASURED, np.uint8)
    spread, samples = np.zeros(count, np.float32), np.ones(count, np.int64)
    return Annotate(device=name, picoseconds=picoseconds, source=measured, spread=spread, samples=samples)(job)


class _Rank(GraphLowering):
    """Lowers the step of one rank.

    Attributes:
        regions: of each operation, the one that it is of.
        beside: operations that a call launches beside its own kernel.
    """

    def __init__(self, builder: GraphBuilder, run: ScriptRun, mesh: Mapping[str, int]) -> None:
        super().__init__(builder, run.recorder.graph)
        self._mesh = mesh
        self._rank = run.world.rank
        self._gpus = run.world.gpus
        self._latest: dict[str, int] = {}
        self._reached: dict[Node, int] = {}
        self._communicated: list[int] = []
        self._labels: dict[tuple[str, str], str] = {}
        root = memory_roots(run.recorder.graph, COMMUNICATION)
        _settle_messages(run.recorder.graph, root)
        self._outliving = _outliving(run.recorder.graph, root)
        self._parts_outliving = {node.args for node in self._outliving if is_getitem(node)}
        self._lives_on = False
        self.regions: list[KernelRegion | None] = []
        self.beside: list[int] = []
        self._deterministic, self._fills = run.recorder.deterministic, run.recorder.fills
        self._attention = run.recorder.attention
        self._sharded: dict[int, tuple[str, ...]] = {}
        self._divided = self._of_names(run.recorder.graph)
        self._ends: list[tuple[int, int]] = []
        self._graphs: set[tuple[object, ...]] = set()
        self._issued: tuple[Duration, ...] = ()
        self._left_out = _left_out(run.recorder.graph)

    def calls(self, begin: int) -> list[tuple[int, int, int, int, int]]:
        """Its operations as calls, one for each stretch of a micro-batch."""
        made = []
        for end, micro_batch in self._ends:
            made.append((0, begin, end, 0, micro_batch))
            begin = end
        return made

    def tensor(
        self,
        name: str,
        value: Tensor,
        role: TensorRole,
        alias_of: int | None = None,
        sharded: tuple[str, ...] = (),
    ) -> int:
        """A tensor; one that other micro-batches use as well is a buffer.

        What lives through steps is divided as what has its name, a gradient as its parameter, and all else as what
        it shares its memory with.
        """
        if self._lives_on and role in (TensorRole.ACTIVATION, TensorRole.INPUT):
            role = TensorRole.BUFFER
        if role.persistent and not sharded:
            sharded = self._divided.get(name) or self._divided.get(name.removesuffix(".grad"), ())
            if not sharded and alias_of is not None:
                sharded = self._sharded.get(alias_of, ())
        made = super().tensor(name, value, role, alias_of, sharded)
        if sharded:
            self._sharded[made] = sharded
        return made

    def _result(self, node: Node, index: int, value: Any, view_of: int | None) -> int | None:
        """The tensor of one result, of which other micro-batches may use one and not the others."""
        self._lives_on = node in self._outliving or (node, index) in self._parts_outliving
        return super()._result(node, index, value, view_of)

    def _of_names(self, graph: Graph) -> dict[str, tuple[str, ...]]:
        """The axes over which what lives through steps is divided, by its name."""
        found = {}
        for node in graph.nodes:
            axes = {axis for ranks in node.meta.get(SHARES, ()) for axis in axes_of(ranks, self._mesh) or ()}
            if axes:
                found[node.meta[FQN]] = tuple(axis for axis in self._mesh if axis in axes)
        return found

    def add(self, node: Node) -> None:
        """Adds a node; what waits for it later waits for the last operation that its stream had been given."""
        before = self.builder.op_count()
        self._lives_on = node in self._outliving
        self._issued = self._issue(node)
        if node.target is wait_for_value:
            self._wait(node)
        elif node.target is wait_for_work:
            self._wait_for_work(node)
        elif node.target is release:
            self._release(node)
        elif COMMUNICATION in node.meta and node.target is not operator.getitem:
            self._communicate(node)
        elif node not in self._left_out:
            super().add(node)
        # A processor launches nothing: what an operator does there is all in the call of it.
        if (
            self._gpus
            and node.target not in _NO_CALLS
            and COMMUNICATION not in node.meta
            and node not in self._left_out
        ):
            for launch in beside(node, self._deterministic, self._fills):
                self._launch(node, launch)
        self.regions += [node.meta.get(REGION)] * (self.builder.op_count() - before)
        if self.builder.op_count() > before:
            micro_batch = node.meta.get(MICRO_BATCH) or 0
            if self._ends and self._ends[-1][1] == micro_batch:
                self._ends.pop()
            self._ends.append((self.builder.op_count(), micro_batch))
        stream = node.meta.get(STREAM)
        if stream is None:
            return
        if COMMUNICATION in node.meta:
            if node.target is not operator.getitem:
                self._reached[node] = self.builder.op_count() - 1
                self._communicated.append(self._reached[node])
            return
        if self.builder.op_count() > before:
            self._latest[stream] = self.builder.op_count() - 1
        if stream in self._latest:
            self._reached[node] = self._latest[stream]

    def _issue(self, node: Node) -> tuple[Duration, ...]:
        """What issuing a node takes, where that is known: nothing behind the first of a CUDA graph."""
        if STREAM not in node.meta:
            return ()
        if not node.meta.get(GRAPH):
            return ()
        launch = node.meta[GRAPH], node.meta[PHASE], node.meta.get(MICRO_BATCH)
        known = launch in self._graphs
        self._graphs.add(launch)
        return (_LAUNCHED,) if known else ()

    def _wait(self, node: Node) -> None:
        """The host waits for what makes a value."""
        made = self.made.get(node.all_input_nodes[0], ())
        if made:
            common = {"phase": PHASES[node.meta[PHASE]], "module": node.meta[MODULE]}
            self.made[node] = [self.builder.host("read value", deps=[made[-1]], **common)]

    def _wait_for_work(self, node: Node) -> None:
        """The host waits for work that it issued: some of it, or all."""
        work = node.meta[AFTER]
        if work is None:
            deps = {*self._latest.values(), *self._communicated}
            self._communicated.clear()
        else:
            deps = {self._reached[n] for n in work if n in self._reached}
        if deps:
            common = {"phase": PHASES[node.meta[PHASE]], "module": node.meta[MODULE]}
            self.made[node] = [self.builder.host("synchronize", deps=sorted(deps), **common)]

    def _release(self, node: Node) -> None:
        """The script lets go of memory that it held."""
        phase, module, stream = PHASES[node.meta[PHASE]], node.meta[MODULE], self.builder.stream(COMPUTE)
        inputs = self.present(node.all_input_nodes)
        self.made[node] = [
            self.builder.compute("release", phase=phase, module=module, stream=stream, inputs=inputs)
        ]

    def operation(self, node: Node, **fields: Any) -> int:
        """A kernel, or a copy between host and device."""
        direction = node.meta.get(COPY)
        if isinstance(fields["attributes"], Attention) and self._deterministic:
            fields["attributes"] = replace(fields["attributes"], deterministic=True)
        if direction is None and isinstance(fields["attributes"], Attention) and self._attention:
            name = f"{self._attention}{SUFFIX}{'_backward' * ('backward' in qualified_name(node))}"
            return self.builder.compute(name, **fields, durations=self._issued)
        if direction is None:
            return super().operation(node, **fields, durations=self._issued)
        common = {key: fields[key] for key in ("phase", "module", "inputs", "outputs", "deps", "stream")}
        return self.builder.copy(qualified_name(node), direction, nbytes=fields["bytes_written"], **common)

    def order(self, node: Node, inputs: list[int]) -> Order:
        """On the stream that it was issued to, after what that waited for."""
        # Of several operations of a node, the first one waits for all.
        awaited = () if node in self.made else node.meta.get(AFTER, ())
        deps = {self._reached[n] for n in awaited if n in self._reached}
        stream = self.builder.stream(node.meta.get(STREAM) or COMPUTE)
        return {"deps": sorted(deps.union(self.earlier_writes(inputs))), "stream": stream}

    def _launch(self, node: Node, launch: Launch) -> None:
        """A kernel beside the one of a call."""
        phase, module = PHASES[node.meta[PHASE]], node.meta[MODULE]
        stream = self.builder.stream(node.meta.get(STREAM) or COMPUTE)
        row = self.builder.compute(
            launch.operator, phase=phase, module=module, stream=stream, bytes_read=launch.bytes_read,
            bytes_written=launch.bytes_written, durations=self._issued,
        )  # fmt: skip
        self.beside.append(row)

    # -- communication ---------------------------------------------------------------------------------------

    def _communicate(self, node: Node) -> None:
        call: Communication = node.meta[COMMUNICATION]
        read, written = node.args
        inputs = self.present(read)  # type: ignore[arg-type]
        order = self.order(node, inputs)
        if call.kind is CollectiveKind.ALL_REDUCE and (axis := self._pair(call)) is not None:
            self._exchange(node, call, axis, order)
            return
        group, label = self._group(call)
        made = self._made(node, written, inputs)  # type: ignore[arg-type]
        common: Common = {
            "phase": PHASES[node.meta[PHASE]], "module": node.meta[MODULE], "inputs": inputs, "outputs": made,
            "deps": order["deps"], "durations": self._issued,
        }  # fmt: skip
        kind = call.kind
        payload = self._payload(node, inputs or made)
        if kind is not None:
            common["stream"] = self.builder.stream(f"comm.{label}")
            dtype = DType.UINT8 if call.dtype is None else DTYPES.get(call.dtype, DType.UINT8)
            op = self.builder.collective(
                f"{label}.{call.op}", kind, group=group, bytes_per_rank=call.nbytes, dtype=dtype, payload=payload,
                asynchronous=call.asynchronous, **common,
            )  # fmt: skip
        else:
            peer = offset(self._rank, call.peer, self._mesh)
            common["stream"] = self.builder.stream(f"comm.{label}.{call.op}{peer:+}")
            add = self.builder.send if call.op == "send" else self.builder.recv
            op = add(
                f"{label}.{call.op}", group=group, peer=peer, tag=call.tag, nbytes=call.nbytes, payload=payload,
                **common,
            )  # fmt: skip
        self.note_writes(made, op)
        self.made[node] = [op]

    def _pair(self, call: Communication) -> str | None:
        """The axis on which two ranks out of more lie: a group that no axes can say, as of tied embeddings."""
        if len(call.ranks) != 2 or axes_of(call.ranks, self._mesh) is not None:
            return None
        one, other = (place_of(rank, self._mesh) for rank in call.ranks)
        differing = [axis for axis in self._mesh if one[axis] != other[axis]]
        return differing[0] if len(differing) == 1 else None

    def _exchange(self, node: Node, call: Communication, axis: str, order: Order) -> None:
        """An all-reduce of two ranks: both send, and both add, as the pipeline pass has it."""
        read, written = node.args
        inputs = self.present(read)  # type: ignore[arg-type]
        (value,) = call.inputs
        other = next(rank for rank in call.ranks if rank != self._rank)
        peer = place_of(other, self._mesh)[axis] - place_of(self._rank, self._mesh)[axis]
        phase, module = PHASES[node.meta[PHASE]], node.meta[MODULE]
        group, payload = self.builder.group(axis, axes=(axis,)), self._payload(node, inputs)
        theirs = self.tensor(f"{call.op}.of_peer", value, TensorRole.ACTIVATION)
        sent = self.builder.send(
            f"{axis}.{call.op}.send", group=group, peer=peer, tag=_EXCHANGE, nbytes=call.nbytes, payload=payload,
            phase=phase, module=module, inputs=inputs, deps=order["deps"],
            stream=self.builder.stream(f"comm.{axis}.{call.op}.send{peer:+}"),
        )  # fmt: skip
        received = self.builder.recv(
            f"{axis}.{call.op}.recv", group=group, peer=peer, tag=_EXCHANGE, nbytes=call.nbytes, payload=payload,
            phase=phase, module=module, outputs=[theirs], deps=order["deps"],
            stream=self.builder.stream(f"comm.{axis}.{call.op}.recv{peer:+}"),
        )  # fmt: skip
        made = self._made(node, written, inputs)  # type: ignore[arg-type]
        op = self.builder.compute(
            "aten.add_", phase=phase, module=module, inputs=[*inputs, theirs], outputs=made, deps=[sent],
            bytes_read=2 * call.nbytes, bytes_written=call.nbytes,
            stream=self.builder.stream(f"comm.{axis}.{call.op}"),
        )  # fmt: skip
        self.note_writes(made, op)
        self.made[node] = [sent, received, op]

    def _made(self, node: Node, written: Sequence[Node], inputs: Sequence[int]) -> list[int]:
        """The tensors that it makes: new ones of a functional operator, else next versions of what it writes."""
        if node.meta[VAL] is None:
            return [self.next_version(n, node) for n in dict.fromkeys(written)]
        made: list[int | None] = [
            self.tensor(node.target._schema.name.partition("::")[2], value, TensorRole.ACTIVATION)  # type: ignore[union-attr]
            for value in node.meta[VAL]
        ]
        self.results[node] = made
        return [tensor for tensor in made if tensor is not None]

    def _payload(self, node: Node, tensors: Sequence[int]) -> Payload:
        if PAYLOAD in node.meta:
            return _PAYLOADS[node.meta[PAYLOAD]]
        roles = [self.roles[tensor] for tensor in tensors]
        return _OF_ROLES.get(roles[0], Payload.ACTIVATION) if roles else Payload.OTHER

    def _group(self, call: Communication) -> tuple[int, str]:
        """Index of a process group, or of the axes that a message crosses, and the label of its communicator."""
        axes = axes_of(call.ranks, self._mesh) if call.peer < 0 else crossed(self._rank, call.peer, self._mesh)
        if axes is None:
            raise CaptureError(
                f"{call.op} of ranks {_shown(call.ranks)}: they are not all ranks along some axes of the mesh "
                f"{dict(self._mesh)}"
            )
        name = "-".join(axes)
        label = self._labels.get((call.group, name))
        if label is None:
            others = sum(known.partition(".")[0] == name for known in self._labels.values())
            label = self._labels[call.group, name] = f"{name}.{others + 1}" if others else name
        return self.builder.group(name, axes=axes), label


def _has_single_ranks(graph: Graph) -> bool:
    return any(len(n.meta[COMMUNICATION].ranks) == 1 for n in graph.nodes if COMMUNICATION in n.meta)


def _settle_messages(graph: Graph, root: Mapping[Node, Node]) -> None:
    """A message is of the micro-batch that makes or takes what it carries, if one alone does.

    Schedules send and receive between passes, of another micro-batch than runs before or after.
    """
    users: dict[Node, set[int]] = {}
    messages: list[Node] = []
    for node in graph.nodes:
        call = node.meta.get(COMMUNICATION)
        if call is not None and call.peer >= 0:
            messages.append(node)
        elif node.op == "call_function" and not is_allocation(node):
            for used in (node, *node.all_input_nodes):
                users.setdefault(root[used], set()).add(node.meta.get(MICRO_BATCH) or 0)
    for message in messages:
        carried = dict.fromkeys(root[node] for node in message.all_input_nodes)
        found = set().union(*(users.get(node, set()) for node in carried))
        if len(found) == 1:
            (number,) = found
            for node in (message, *carried):
                if node is message or is_allocation(node):
                    node.meta[MICRO_BATCH] = number


def _outliving(graph: Graph, root: Mapping[Node, Node]) -> set[Node]:
    """Nodes whose memory operations of several micro-batches use."""
    users: dict[Node, set[int]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            for used in (node, *node.all_input_nodes):
                users.setdefault(root[used], set()).add(node.meta.get(MICRO_BATCH) or 0)
    return {node for node in root if len(users.get(root[node], ())) > 1}


_NO_CALLS = (wait_for_value, wait_for_work, release)


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


WITHIN_CONTEXT = "cp_inner"
"""Of ranks of context parallelism, those that exchange otherwise than the others."""
_KNOWN = (*DATA_AXES, "pp", "tp", WITHIN_CONTEXT)


def workload_of(
    runs: Sequence[ScriptRun], places: Sequence[Mapping[str, int]], mesh: Mapping[str, int], name: str
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
        shape, whole = recorder.sample.shape, not recorder.sample.floating
    over = mesh.get(CONTEXT, 1) * mesh.get(WITHIN_CONTEXT, 1)
    tokens = int(shape[1]) * over if len(shape) == 2 and whole else 0
    return Workload(
        model=name,
        parameters=_parameters(runs, places, mesh),
        batch_size=recorder.samples or 1,
        sequence_length=tokens,
        dtype=_dtype(runs[0]),
        optimizer=next((type(o).__name__.lower() for o in recorder.memory.optimizers), ""),
        master_weights=any(map(_has_masters, runs)),
        stack=recorder.stack,
    )


def _parameters(runs: Sequence[ScriptRun], places: Sequence[Mapping[str, int]], mesh: Mapping[str, int]) -> int:
    """Trainable elements of all stages; roles that differ elsewhere have the same ones.

    Ranks that have parts of the same sequences may send each other messages, and are no stages.
    """
    along = {axis for run in runs for axis in messages_of(run, mesh)} - {CONTEXT}
    of_stages: dict[tuple[tuple[str, int], ...], int] = {}
    for run, place in zip(runs, places, strict=True):
        stage = tuple((axis, at) for axis, at in place.items() if axis in along)
        of_stages.setdefault(stage, run.recorder.memory.parameter_count())
    return sum(of_stages.values())


def messages_of(run: ScriptRun, mesh: Mapping[str, int]) -> list[str]:
    """The axes along which a rank sends messages to single ranks."""
    peers = {call.peer for call in _calls(run) if call.peer >= 0}
    found = {axis for peer in peers for axis in crossed(run.world.rank, peer, mesh)}
    return [name for name in mesh if name in found]


def called_by_use(run: ScriptRun, mesh: Mapping[str, int]) -> dict[str, str]:
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


def _calls(run: ScriptRun) -> list[Communication]:
    return [node.meta[COMMUNICATION] for node in run.recorder.graph.nodes if COMMUNICATION in node.meta]


def _has_masters(run: ScriptRun) -> bool:
    """Whether there are copies in fp32, which the optimizer keeps, of parameters in 16 bits."""
    held = [node for node in run.recorder.graph.nodes if node.op == "placeholder"]
    short = any(n.meta[ROLE] == annotate.PARAMETER and n.meta[VAL].element_size() == 2 for n in held)
    return short and any(
        n.meta[ROLE] == annotate.OPTIMIZER_STATE and "master" in n.meta[FQN].split(".")[-2:]
        and n.meta[VAL].dtype == torch.float32
        for n in held
    )  # fmt: skip


def _dtype(run: ScriptRun) -> DType:
    """Type of most of what the forward pass makes, which autocast may have chosen."""
    counts: dict[Any, int] = {}
    for node in run.recorder.graph.nodes:
        value = node.meta.get(VAL)
        forward = node.op == "call_function" and node.meta[PHASE] == annotate.FORWARD
        if forward and isinstance(value, Tensor) and value.is_floating_point():
            counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    return DTYPES[max(counts, key=lambda dtype: counts[dtype])] if counts else DType.FP32


@read_once()
def capture_script(
    script: Script,
    world: World,
    adapter: Adapter,
    *,
    ranks: Sequence[int] = (),
    progress: Progress = silent,
) -> Imported:
    """Runs a script as each of the ranks that differ and makes a job of what they do.

    Args:
        script: what is run.
        world: the world; its rank does not count.
        adapter: of the framework.
        ranks: those that are run; none: what the adapter says of the first run.
        progress: is told what is going on.

    Returns:
        The job graph, and notes on what stands for something else.

    Raises:
        CaptureError: as `run_script`, and where ranks or groups fit no mesh; of a strict capture, where
            anything is unlikely to be meant.
        UsageError: a rank that the world does not have.
    """
    check_ranks(ranks, world.size)
    notes = dict.fromkeys(adapter.check())
    first = ranks[0] if ranks else 0
    progress(f"running {script.path.name} as a rank of {world.size}")
    results: Results = {}
    by_python = adapter.runs_alone and world.size == 1 and world.launched
    alone = replace(world, rank=first, launched=not by_python)
    try:
        runs = [run_script(script, alone, adapter, results)]
    except CaptureError as error:
        if by_python and _asks_for_launcher(error, alone):
            notes[f"{script.path.name} asks for what a launcher sets: it runs as the one rank of torchrun"] = None
            runs = [run_script(script, replace(alone, launched=True), adapter, results)]
        # It may have gone a way that rank 0 alone would go.
        elif unlike := _unlike(script, world, adapter, [alone], results):
            again = replace(world, unlike=world.unlike | unlike)
            return capture_script(script, again, adapter, ranks=ranks, progress=progress)
        else:
            raise
    mesh = _mesh(runs[0])
    names = called_by_use(runs[0], mesh)
    mesh = {names.get(axis, axis): size for axis, size in mesh.items()}
    if not ranks:
        ranks = adapter.roles(world, mesh, messages_of(runs[0], mesh))
    for done, rank in enumerate(ranks[1:], start=1):
        progress(f"running {script.path.name} as further ranks of {world.size}", done, len(ranks))
        runs.append(run_script(script, replace(world, rank=rank), adapter, results))
    if unlike := _unlike(script, world, adapter, [run.world for run in runs], results):
        return capture_script(
            script, replace(world, unlike=world.unlike | unlike), adapter, ranks=ranks, progress=progress
        )
    places = standing_for(ranks, mesh)
    progress("lowering")
    job = lower_job(runs, mesh, places, workload_of(runs, places, mesh, script.path.stem), script.host)
    warnings: dict[str, None] = {}
    for run in runs:
        notes |= run.recorder.notes
        warnings |= dict.fromkeys(findings(run.recorder, run.world))
    warnings |= dict.fromkeys(never_asked(world.decided, world.asked, script.fakes))
    if warnings and script.strict:
        raise CaptureError(f"{next(iter(warnings))} (--strict)")
    return Imported(graph=count_job_flops(job), notes=tuple(notes), warnings=tuple(warnings))


def _asks_for_launcher(error: CaptureError, world: World) -> bool:
    """Whether a script ended for want of what a launcher tells its processes by their environment."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    missing = (cause.args[0] for cause in causes if isinstance(cause, KeyError) and cause.args)
    return not world.environment.keys().isdisjoint(name for name in missing if isinstance(name, str))


def _unlike(
    script: Script, world: World, adapter: Adapter, ran: Sequence[World], results: Results
) -> frozenset[Shared]:
    """Calls to which ranks give different integers, where any was read that rests on their giving the same.

    The last rank of each group that adds up or gathers runs as well: what depends on the rank differs there. Where
    it differs in steps that are as short as they can be, whole ones tell whether it was for that, and where else.
    """
    if len(ran) > 1 or not ran[0].rested:  # ranks of several roles do not call alike
        return frozenset()
    ranks = {ranks[-1] for (ranks, *_), given in ran[0].given.items() if given is not None}
    others = sorted(ranks - {one.rank for one in ran})
    found = frozenset[Shared]()
    for recorder in (BriefRecorder, PassingRecorder):
        worlds = [*ran, *(replace(world, rank=rank) for rank in others)]
        for other in worlds[len(ran) :]:
            with suppress(CaptureError):  # it gave what it gave before it ended
                run_script(script, other, adapter, results, recorder)
        found = frozenset[Shared]().union(*(differing(one, other) for one in worlds for other in worlds))
        if not found - world.unlike:
            break
    return found - world.unlike


def _mesh(run: ScriptRun) -> dict[str, int]:
    """The mesh of a run: one that it has a name for, else that of its groups."""
    size, calls = run.world.size, _calls(run)
    groups = {call.ranks for call in calls if call.peer < 0}
    fitting = (m for m in run.meshes if all(axes_of(ranks, m) is not None for ranks in groups))
    named = next(fitting, None)
    if named is None and len(run.meshes) == 1:
        named = run.meshes[0]  # two ranks that share a tensor may lie across its axes
    if named is None:
        found = infer({c.ranks for c in calls}, size, {(run.world.rank, c.peer) for c in calls if c.peer >= 0})
        if found is not None and not run.meshes:
            return found
        named = found or next(iter(run.meshes), None)
    if named is None:
        shown = "; ".join(sorted({str(list(call.ranks[:8])) for call in calls}))
        raise CaptureError(
            f"the groups of rank {run.world.rank} are formulas of no mesh of {size} ranks: {shown}: make them by "
            "init_device_mesh"
        )
    return {name: extent for name, extent in named.items() if extent > 1} or {"dp": 1}
