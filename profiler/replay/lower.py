"""The pieces of all ranks to a job graph: one program a rank, collectives that ranks ran together in one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from echograph.errors import InputError
from echograph.ir.builder import Common, GraphBuilder
from echograph.ir.graph import JobGraph, Workload
from echograph.ir.types import CollectiveKind, CopyDirection, DType, Duration, Payload, Phase, Source
from echograph.profiler.replay.pieces import Piece, Work
from echograph.profiler.replay.rank import rank_pieces
from echograph.profiler.traces.alignment import align, clocks
from echograph.profiler.traces.collectives import Meeting, meetings
from echograph.profiler.traces.trace import NONE, TraceSet

STEP = "step"
"""What stands for the device in a duration that is not of the operation, but of the step that it ends."""
CPU = "cpu"

_DIRECTIONS = {
    "HtoD": CopyDirection.HOST_TO_DEVICE,
    "HostToDevice": CopyDirection.HOST_TO_DEVICE,
    "DtoH": CopyDirection.DEVICE_TO_HOST,
    "DeviceToHost": CopyDirection.DEVICE_TO_HOST,
}
_DTYPES = {
    "float": DType.FP32, "double": DType.FP64, "half": DType.FP16, "c10::half": DType.FP16,
    "bfloat16": DType.BF16, "c10::bfloat16": DType.BF16, "long": DType.INT64, "long int": DType.INT64,
    "int": DType.INT32, "short": DType.INT16, "char": DType.INT8, "bool": DType.BOOL,
}  # fmt: skip
_PAYLOADS = {Phase.BACKWARD: Payload.GRADIENT, Phase.OPTIMIZER: Payload.GRADIENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A job graph from traces.

    Attributes:
        graph: the job; its durations are measured.
        notes: what was taken for something, or could not be matched, a line each.
    """

    graph: JobGraph
    notes: tuple[str, ...] = ()


def lower(traces: TraceSet, name: str = "", say: Callable[[str], None] = lambda _: None) -> Lowered:
    """The job graph of the traces of a job.

    Clocks are aligned where they contradict one another: where a collective would have ended on one rank before
    another one had begun it.

    Args:
        traces: one a rank; they are replayed from first to last event.
        name: of the graph.
        say: told how far it is.

    Raises:
        InputError: a trace's file is gone, or no trace has anything in it.
    """
    if not any(len(trace) for trace in traces.values()):
        raise InputError(f"{next(iter(traces.values())).path}: no complete event in it: nothing to replay")
    return _Lowering(traces, name, say).run()


@dataclass(slots=True)
class _Lowering:
    traces: TraceSet
    name: str
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    builder: GraphBuilder = field(init=False)
    groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def run(self) -> Lowered:
        self.builder = GraphBuilder(name=self.name, workload=Workload(model=self.name), streams=("main",))
        pieces = self._pieces()
        met = self._meet(pieces)
        if clocks(self.traces, met).apart:
            self.traces, found = align(self.traces)
            self.say(f"clocks aligned to {found.residual_ps / 1e6:.1f} us")
            pieces = self._pieces()
            met = self._meet(pieces)
        self._groups(met, pieces)
        for rank, order in pieces.items():
            begin = self.builder.op_count()
            self._program(rank, order)
            calls = [(0, begin, self.builder.op_count(), 0, 0)]
            self.builder.program(calls, role=f"rank {rank}", ranks=(rank,))
        notes = [*self.traces.notes, *self.notes, *(f"{n:,} {what}" for what, n in self.left_out.items())]
        return Lowered(graph=self.builder.build(JobGraph), notes=tuple(dict.fromkeys(notes)))

    def _pieces(self) -> dict[int, list[Piece]]:
        found = {}
        self.left_out.clear()
        for rank, trace in self.traces.items():
            self.say(f"rank {rank}: {len(trace):,} events")
            found[rank], dropped = rank_pieces(trace).in_order()
            if dropped:
                self.left_out["waits left out: by the trace's clock, what was waited for came later"] += dropped
        return found

    def _meet(self, pieces: Mapping[int, Sequence[Piece]]) -> list[Meeting]:
        calls = {rank: [p.call for p in order if p.call is not None] for rank, order in pieces.items()}
        met, self.notes = meetings(calls)
        return met

    def _groups(self, met: Sequence[Meeting], pieces: Mapping[int, Sequence[Piece]]) -> None:
        """Finds the group of each collective, and its duration: from when the last of its ranks had begun."""
        of_call = {id(p.call): p for order in pieces.values() for p in order if p.call is not None}
        for one in met:
            same = {rank: of_call[id(call)] for rank, call in one.calls.items()}
            ranks = tuple(sorted(same))
            if len(pieces) > len(ranks) or one.group == "":
                name = ",".join(map(str, ranks)) if len(ranks) < len(pieces) else "world"
            else:
                name = f"group {one.group}"
            number = self.builder.group(name, ranks=ranks)
            begun = max(piece.start for piece in same.values())
            for piece in same.values():
                self.groups[id(piece)] = number, max(0, piece.end - begun)
        alone = sum(p.work is Work.COLLECTIVE and id(p) not in self.groups for o in pieces.values() for p in o)
        if alone:
            self.left_out["collectives whose other ranks were not traced: as long as they took, waiting included"] = alone

    def _program(self, rank: int, order: Sequence[Piece]) -> None:
        device = self._device(rank)
        number: dict[int, int] = {}
        forward: dict[int, int] = {}
        for piece in order:
            common: Common = {
                "phase": piece.phase,
                "stream": self.builder.stream(piece.line),
                "deps": sorted({number[id(one)] for one in piece.after}),
                "durations": (_duration(device, piece.duration),),
            }
            number[id(piece)] = at = self._add(rank, piece, common, forward)
            if piece.sequence != NONE and piece.work is Work.COMPUTE:
                forward[piece.sequence] = at

    def _add(self, rank: int, piece: Piece, common: Common, forward: Mapping[int, int]) -> int:
        match piece.work:
            case Work.HOST:
                if piece.step != NONE:
                    # What runs a host's work takes the last of its durations.
                    common["durations"] = (_duration(STEP, piece.step), *common["durations"])
                return self.builder.host(piece.name, **common)
            case Work.COMPUTE:
                return self.builder.compute(piece.name, forward_op=forward.get(piece.forward), **common)
            case Work.COPY:
                direction = next((d for w, d in _DIRECTIONS.items() if w in piece.name), None)
                direction = direction or CopyDirection.DEVICE_TO_DEVICE
                return self.builder.copy(piece.name, direction, nbytes=piece.nbytes, **common)
            case Work.COLLECTIVE:
                return self._collective(rank, piece, common)

    def _collective(self, rank: int, piece: Piece, common: Common) -> int:
        assert piece.call is not None
        if id(piece) in self.groups:
            group, duration = self.groups[id(piece)]
            common["durations"] = (_duration(self._device(rank), duration),)
        else:
            group = self.builder.group("not traced", ranks=(rank,))
        return self.builder.collective(
            piece.name, CollectiveKind[piece.call.kind.upper()], group=group, bytes_per_rank=piece.nbytes,
            dtype=_DTYPES.get(piece.call.dtype, DType.UINT8), payload=_PAYLOADS.get(piece.phase, Payload.OTHER),
            asynchronous=True, **common,
        )  # fmt: skip

    def _device(self, rank: int) -> str:
        """The first device that any trace names: ranks of one job have the same kind."""
        del rank
        for trace in self.traces.values():
            known = trace.header.get("deviceProperties")
            if isinstance(known, list) and known and isinstance(known[0], dict) and known[0].get("name"):
                return str(known[0]["name"])
        return CPU


def _duration(device: str, picoseconds: int) -> Duration:
    return Duration(device=device, picoseconds=picoseconds, source=Source.MEASURED, samples=1)
