"""SimAI's workload text: one pipeline stage as rows of computation and of communication after it.

SimAI runs the forward columns of all rows from the first to the last. Then, from the last row to the first, it
runs the input-gradient column and after it the weight-gradient column. A micro-batch has rows of its own. The
communication of the first two columns is of the tensor-parallel group (or `_EP`, `_DP_EP`), and SimAI waits for
it; that of the third is of the data-parallel group, and it goes on after issuing it. So a layer becomes as many
rows as it has communications one after the other, and what happens once a step stands in the first rows, which
run last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from echograph.errors import PlanError, UsageError
from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Group, JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Phase, TensorRole

MAX_PP_BYTES = 2**31 - 1
MIN_FORWARD_BYTES = 4096
PS_PER_NS = 1000

_WORDS = {
    CollectiveKind.ALL_REDUCE: "ALLREDUCE",
    CollectiveKind.ALL_GATHER: "ALLGATHER",
    CollectiveKind.REDUCE_SCATTER: "REDUCESCATTER",
    CollectiveKind.ALL_TO_ALL: "ALLTOALL",
}
_FORWARD, _INPUT, _WEIGHT = range(3)


@dataclass(slots=True, kw_only=True)
class _Part:
    """What a row does in one of the two directions: picoseconds and a communication for each of its columns."""

    picoseconds: list[int] = field(default_factory=lambda: [0, 0, 0])
    said: dict[int, tuple[str, int]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Layer:
    """A layer in one micro-batch: its parts forward and backward, each in the order in which they run."""

    name: str
    forward: list[_Part] = field(default_factory=lambda: [_Part()])
    backward: list[_Part] = field(default_factory=lambda: [_Part()])


def write_simai(job: JobGraph, output: Path, *, device: str) -> Exported:
    """Writes the pipeline stage with the most work.

    Args:
        job: a job over a mesh, every operation of which has a duration on the device.
        output: the file.
        device: name of the device whose durations are written.

    Raises:
        UsageError: the job has no mesh.
        PlanError: a pipeline message is over 2^31 - 1 bytes, or stages exchange none.
        OutputError: the file cannot be written.
    """
    if not job.mesh:
        raise UsageError("SimAI's workload is of a mesh of tp, ep, dp and pp, and this job lists its ranks")
    sizes = {axis.name: axis.size for axis in job.mesh}
    picoseconds = np.maximum(job.ops.duration_on(device)[0], 0)
    # As floats: durations may add up to more than 64 bits hold.
    own = np.where(np.isin(job.ops.kind, COMMUNICATIONS), 0.0, picoseconds)
    work = np.concatenate([[0.0], np.cumsum(own)])
    totals = [float((work[p.calls[:, 2]] - work[p.calls[:, 1]]).sum()) for p in job.programs]
    stage = _Stage(job, job.programs[int(np.argmax(totals))], picoseconds)
    rows = list(stage.rows())
    pp = sizes.get("pp", 1)
    head = (
        f"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: {sizes.get('tp', 1)} ep: {sizes.get('ep', 1)} "
        f"pp: {pp} vpp: {stage.chunks()} ga: {stage.micro_batches} all_gpus: {job.world_size} "
        f"checkpoints: 0 checkpoint_initiates: 0 pp_comm: {_pp_bytes(job, pp)}\n{len(rows)}\n"
    )
    written = write_whole(output, [head, *rows])
    return Exported(files=1, bytes=written, notes=tuple(_notes(job, stage, device)))


def _pp_bytes(job: JobGraph, pp: int) -> int:
    """Bytes of the largest message between stages."""
    ops = job.ops
    between = [number for number, group in enumerate(job.groups) if group.axes == ("pp",)]
    sizes = ops.nbytes[(ops.kind == OpKind.SEND) & np.isin(ops.group, between)]
    found = int(sizes.max(initial=0)) if pp > 1 else 0
    if found > MAX_PP_BYTES:
        raise PlanError(
            f"a message between stages has {found:,} bytes, and SimAI's pp_comm holds at most {MAX_PP_BYTES:,}: "
            "take a smaller --micro-batch"
        )
    if pp > 1 and not found:
        raise PlanError("the job has stages that send each other nothing, and SimAI's pp_comm must not be 0 then")
    return found


class _Stage:
    """A program, as layers of its micro-batches; counts what has no place in them."""

    def __init__(self, job: JobGraph, program: Program, picoseconds: np.ndarray) -> None:
        self.job, self.program, self.picoseconds = job, program, picoseconds.tolist()
        self.lost: Counter[str] = Counter()
        self.lost_bytes: Counter[str] = Counter()
        self.raised = 0
        self.suffix = [_suffix(job, group) for group in job.groups]
        self.micro_batches = len(np.unique(program.calls[:, 4])) or 1
        ops, outputs = job.ops, job.ops.outputs
        makes = job.tensors.role[outputs.values] == TensorRole.GRADIENT
        self.of_weight = np.bincount(outputs.rows, weights=makes, minlength=len(ops)) > 0

    def rows(self) -> Iterator[str]:
        """The rows: what happens once a step, then every micro-batch."""
        once = _Layer(name="optimizer")
        batches: dict[int, dict[str, _Layer]] = {}
        last: dict[int, str] = {}
        for block, begin, end, instance, micro_batch in self.program.calls.tolist():
            layers = batches.setdefault(micro_batch, {})
            for row in range(begin, end):
                phase = self.job.ops.phase[row]
                if phase in (Phase.OPTIMIZER, Phase.OTHER):
                    self._run(row, once.backward, backward=True)
                    continue
                key = self._key(block, instance, row) or last.get(micro_batch, "main")
                backward = phase != Phase.FORWARD
                if backward and key not in layers:
                    key = last.get(micro_batch, key)
                last[micro_batch] = key
                layer = layers.setdefault(key, _Layer(name=key))
                self._run(row, layer.backward if backward else layer.forward, backward=backward)
        carried = [0, 0, 0]
        for layer in (once, *(layer for layers in batches.values() for layer in layers.values())):
            yield from _written(layer, carried)

    def _key(self, block: int, instance: int, row: int) -> str:
        """The layer of an operation: the instance of a repeated block, else its module."""
        of = self.job.blocks[block]
        if len(of.instances) > 1:
            return f"{of.name}.{of.instances[instance].label or instance}"
        module: str = self.job.strings[self.job.ops.module[row]]
        return module.replace("{}", of.instances[instance].label)

    def _run(self, row: int, parts: list[_Part], *, backward: bool) -> None:
        kind = self.job.ops.kind[row]
        if kind in (OpKind.SEND, OpKind.RECV):
            self._lose(row, "sends and receives (pp_comm stands for those between stages)")
        elif kind == OpKind.COLLECTIVE:
            self._communicate(row, parts, backward=backward)
        else:
            column = _FORWARD if not backward else _WEIGHT if self.of_weight[row] else _INPUT
            parts[-1].picoseconds[column] += self.picoseconds[row]

    def _communicate(self, row: int, parts: list[_Part], *, backward: bool) -> None:
        ops = self.job.ops
        word, suffix = _WORDS.get(CollectiveKind(int(ops.variant[row]))), self.suffix[int(ops.group[row])]
        axes = "+".join(self.job.groups[int(ops.group[row])].axes) or "a list of ranks"
        nbytes = int(ops.nbytes[row])
        if word is None:
            return self._lose(row, f"{CollectiveKind(int(ops.variant[row])).name.lower()} collectives")
        if suffix is None or (suffix == "DP" and not backward):
            return self._lose(row, f"{Phase(int(ops.phase[row])).name.lower()} collectives of {axes}")
        if suffix == "" or nbytes == 0:
            return None  # a group of one rank, or nothing to send
        column = (_WEIGHT if suffix == "DP" else _INPUT) if backward else _FORWARD
        self.raised += column == _FORWARD and nbytes < MIN_FORWARD_BYTES
        parts[-1].said[column] = (word if suffix in ("TP", "DP") else f"{word}_{suffix}", nbytes)
        parts.append(_Part())
        return None

    def _lose(self, row: int, what: str) -> None:
        self.lost[what] += 1
        self.lost_bytes[what] += int(self.job.ops.nbytes[row])

    def chunks(self) -> int:
        """Model chunks of the stage: how often it comes to the forward pass of one micro-batch."""
        ops, runs, before = self.job.ops, 0, (0, 0)
        first = int(self.program.calls[:, 4].min(initial=0))
        for _, begin, end, _, micro_batch in self.program.calls.tolist():
            works = (ops.kind[begin:end] == OpKind.COMPUTE) & ~ops.is_view[begin:end]
            for phase in ops.phase[begin:end][works].tolist():
                runs += (phase, micro_batch) == (Phase.FORWARD, first) != before
                before = (phase, micro_batch)
        return max(1, runs)


def _suffix(job: JobGraph, group: Group) -> str | None:
    """Which of SimAI's groups a group is (TP, DP, EP, DP_EP); "" if it has one rank, None if it is no such."""
    wide = {axis.name for axis in job.mesh if axis.size > 1}
    if not group.axes or group.positions:
        return None
    axes = wide & set(group.axes)
    data = wide - {"tp", "pp"}
    kinds = {frozenset(): "", frozenset({"tp"}): "TP", frozenset(data): "DP"}
    if "ep" in wide:
        kinds = {frozenset(data - {"ep"}): "DP_EP", frozenset({"ep"}): "EP"} | kinds
    return kinds.get(frozenset(axes))


def _written(layer: _Layer, carried: list[int]) -> Iterator[str]:
    """The rows of a layer; what rounding to nanoseconds leaves of a column goes on to its next row."""
    count = max(len(layer.forward), len(layer.backward))
    name = "_".join(layer.name.split()) or "main"
    for number in range(count):
        forward = layer.forward[number] if number < len(layer.forward) else _Part()
        # Rows run backwards from the last one, so the parts stand in the other order.
        backward = layer.backward[~number] if number < len(layer.backward) else _Part()
        columns = []
        for column, part in enumerate((forward, backward, backward)):
            nanoseconds, carried[column] = divmod(carried[column] + part.picoseconds[column], PS_PER_NS)
            word, nbytes = part.said.get(column, ("NONE", 0))
            columns.append(f"{nanoseconds}\t{word}\t{nbytes}")
        empty = all(text == "0\tNONE\t0" for text in columns)
        if not empty:
            yield f"{name}\t-1\t" + "\t".join(columns) + "\t0\n"


def _notes(job: JobGraph, stage: _Stage, device: str) -> Iterator[str]:
    """What the text does not say."""
    if len(job.programs) > 1:
        names = _names(p.role for p in job.programs if p is not stage.program)
        yield f"one stage for all: it is {stage.program.role or 'the first'}, which has the most work; not {names}"
    for what, count in sorted(stage.lost.items()):
        yield f"left out: {count} {what}, {stage.lost_bytes[what]:,} bytes a rank"
    issue = job.ops.duration_on(f"{device}/host")[0]
    if (issue > 0).any():
        before = np.concatenate([[0.0], np.cumsum(np.maximum(issue, 0.0))])
        calls = stage.program.calls
        total = float((before[calls[:, 2]] - before[calls[:, 1]]).sum())
        yield f"the host's time to issue operations is left out: {total / 1e9:.3g} ms a step, if nothing hid it"
    if len(job.streams) > 1:
        yield (
            f"{len(job.streams)} streams became one row after the other: communication forward and in the "
            "input-gradient columns is waited for, that of gradients is not, even by the optimizer"
        )
    if stage.raised:
        yield f"SimAI raises {stage.raised} forward communications to {MIN_FORWARD_BYTES} bytes"
    if prod(axis.size for axis in job.mesh if axis.name == "cp") > 1:
        yield "SimAI has no context-parallel group: its ranks are among the data-parallel ones"
    yield "the pipeline's schedule is not in the text: SimAI adds a bubble of its own, and takes all ranks as one"


def _names(roles: Iterable[str]) -> str:
    found = [role or "a role without a name" for role in roles]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
