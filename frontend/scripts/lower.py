"""Lowers the recorded steps of the distinct ranks of a job to a `JobGraph`: a program for each."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from echograph.errors import CaptureError
from echograph.frontend.pytorch.annotate import FQN, MODULE, PHASE, VAL
from echograph.frontend.pytorch.call_nodes import is_getitem, is_in_place, is_view, qualified_name
from echograph.frontend.pytorch.lower import DTYPES, PHASES, Lowering, Order
from echograph.frontend.scripts.collectives import Communication
from echograph.frontend.scripts.mesh import axes_of, crossed, offset, place_of
from echograph.frontend.scripts.recorder import COMMUNICATION, COPY, MICRO_BATCH, PAYLOAD, SHARES
from echograph.frontend.scripts.run import Recorded
from echograph.frontend.scripts.streams import AFTER, STREAM
from echograph.ir.builder import Common, GraphBuilder
from echograph.ir.graph import Axis, JobGraph, Workload
from echograph.ir.types import CollectiveKind, DType, Payload, TensorRole

_PAYLOADS = {
    "parameter": Payload.PARAMETER,
    "gradient": Payload.GRADIENT,
    "activation": Payload.ACTIVATION,
    "optimizer_state": Payload.OPTIMIZER_STATE,
    "other": Payload.OTHER,
}
# Of what two ranks exchange in place of an all-reduce: no message of a schedule has it.
_EXCHANGE = 1 << 19
_OF_ROLES = {
    TensorRole.PARAMETER: Payload.PARAMETER,
    TensorRole.GRADIENT: Payload.GRADIENT,
    TensorRole.OPTIMIZER_STATE: Payload.OPTIMIZER_STATE,
}


def lower_job(
    recorded: Sequence[Recorded], mesh: Mapping[str, int], places: Sequence[Mapping[str, int]], workload: Workload
) -> JobGraph:
    """The job of recorded steps.

    Args:
        recorded: a step of each role.
        mesh: axes and sizes, outermost first.
        places: of each role, the coordinates that it has alone; it stands for all ranks that have them.
        workload: what the job trains.

    Raises:
        CaptureError: a group is no formula of the mesh, or a tensor has a type that a graph does not know.
    """
    builder = GraphBuilder(name=workload.model, workload=workload)
    if 1 not in mesh.values() and any(_has_single_ranks(run.recorder.graph) for run in recorded):
        # Frameworks call collectives of single ranks, too: such a group lies along an axis of one.
        mesh = {**mesh, "self": 1}
    builder.mesh = tuple(Axis(name=name, size=size) for name, size in mesh.items())
    for run, place in zip(recorded, places, strict=True):
        begin = builder.op_count()
        lowering = _Rank(builder, run, mesh)
        for node in run.recorder.graph.nodes:
            lowering.add(node)
        role = " ".join(f"{axis}={at}" for axis, at in place.items()) or "every rank"
        builder.program(lowering.calls(begin), role=role, coordinates=place)
    return builder.build(JobGraph)


class _Rank(Lowering):
    """Lowers the step of one rank."""

    def __init__(self, builder: GraphBuilder, run: Recorded, mesh: Mapping[str, int]) -> None:
        super().__init__(builder, run.recorder.graph)
        self._mesh = mesh
        self._rank = run.world.rank
        self._latest: dict[str, int] = {}
        self._reached: dict[Node, int] = {}
        self._labels: dict[tuple[str, str], str] = {}
        self._outliving = _outliving(run.recorder.graph)
        self._lives_on = False
        self._sharded: dict[int, tuple[str, ...]] = {}
        self._divided = self._of_names(run.recorder.graph)
        self._ends: list[tuple[int, int]] = []

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
        if COMMUNICATION in node.meta and node.target is not operator.getitem:
            self._communicate(node)
        else:
            super().add(node)
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
            return
        if self.builder.op_count() > before:
            self._latest[stream] = self.builder.op_count() - 1
        if stream in self._latest:
            self._reached[node] = self._latest[stream]

    def operation(self, node: Node, **fields: Any) -> int:
        """A kernel, or a copy between host and device."""
        direction = node.meta.get(COPY)
        if direction is None:
            return super().operation(node, **fields)
        common = {key: fields[key] for key in ("phase", "module", "inputs", "outputs", "deps", "stream")}
        return self.builder.copy(qualified_name(node), direction, nbytes=fields["bytes_written"], **common)

    def order(self, node: Node, inputs: list[int]) -> Order:
        """On the stream that it was issued to, after what that waited for."""
        # Of several operations of a node, the first one waits for all.
        awaited = () if node in self.made else node.meta.get(AFTER, ())
        deps = {self._reached[n] for n in awaited if n in self._reached}
        stream = self.builder.stream(node.meta.get(STREAM) or "compute")
        return {"deps": sorted(deps.union(self.earlier_writes(inputs))), "stream": stream}

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
            "deps": order["deps"],
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


def _outliving(graph: Graph) -> set[Node]:
    """Nodes whose memory operations of several micro-batches use."""
    root: dict[Node, Node] = {}
    users: dict[Node, set[int]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        same = bool(inputs) and (is_view(node) or is_in_place(node)) and COMMUNICATION not in node.meta
        picked = is_getitem(node) and is_view(inputs[0])
        root[node] = root[inputs[0]] if same or picked else node
        if node.op == "call_function":
            for used in (node, *inputs):
                users.setdefault(root[used], set()).add(node.meta.get(MICRO_BATCH) or 0)
    return {node for node in root if len(users.get(root[node], ())) > 1}


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
