"""Device memory of every rank role over the step: what lives at the peak, what it reserves, and whether it fits.

Three figures, as three tools report them:

- *allocated* (`torch.cuda.max_memory_allocated`): tensors, communication buffers and workspaces that live
  (`lifetimes`, `usage`);
- *reserved* (`max_memory_reserved`): the segments of PyTorch's caching allocator behind them, its rules replayed
  (`allocator`);
- *device* (nvidia-smi): reserved, and what never goes through that allocator: the CUDA context and NCCL's buffers.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

import numpy as np

from echograph.ir.columns import NONE, distinct
from echograph.ir.graph import BETWEEN_STEPS, JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, Phase, TensorRole
from echograph.simulator.memory.allocator import CachingAllocator
from echograph.simulator.memory.lifetimes import COMMUNICATION, WORKSPACE, Allocations, Lifetimes
from echograph.simulator.memory.usage import Usage
from echograph.units import MIB, format_bytes

ROLES = {
    **{int(role): role.name.lower() for role in TensorRole},
    COMMUNICATION: "communication",
    WORKSPACE: "workspace",
}
CONTRIBUTORS, TENSORS, POINTS = 12, 24, 512
# Architectures before Hopper (compute capability 9), of which libraries think that small workspaces do.
_SMALL_WORKSPACES = ("volta", "ampere", "ada")
_ENGINE = "transformer_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a framework takes of the device besides a graph's tensors, and how it allocates.

    Attributes:
        expandable_segments: PyTorch's allocator option of that name; off, as by default.
        cublas_workspace_bytes: of the forward and of the backward thread's cuBLAS handle, 32 MiB each: NVIDIA's
            recommendation for Hopper (cuBLAS documentation, cublasSetWorkspace), which PyTorch follows; on older
            devices it takes two buffers of 4 MiB and eight of 16 KiB (aten/src/ATen/cuda/CublasHandlePool.cpp,
            parseChosenWorkspaceSize). A program that says what cuBLAS holds has that.
        engine_workspace_bytes: of Transformer Engine, each of those that a program has: 32 MiB and 1 KiB from
            Hopper on, 4 MiB on older devices (its cpp_extensions/gemm.py, get_cublas_workspace_size_bytes).
        cuda_context_bytes: CUDA context and loaded kernels. Assumed for lazily loaded kernels (the default since
            CUDA 11.7); without, 1.2 to 1.6 GiB were seen (BigScience, tr11-176B-ml chronicles, on V100 and A100).
        nccl_pair_bytes: buffers of a communicator of two ranks, as a user measured on A100 (NVIDIA/nccl on
            GitHub, 964).
        nccl_bytes: the same of more ranks; their number does not matter (there, and 986).
        other_communicators: those that a framework opens beside the ones of a step's tensors, each by the axes
            of the mesh that it is along: "dp-pp-tp" of all ranks for a barrier, "pp" of a pipeline for the loss.
    """

    expandable_segments: bool = False
    cublas_workspace_bytes: tuple[int, ...] = (32 * MIB, 32 * MIB)
    engine_workspace_bytes: int = 32 * MIB + 1024
    cuda_context_bytes: int = 512 * MIB
    nccl_pair_bytes: int = 544 * MIB
    nccl_bytes: int = 688 * MIB
    other_communicators: tuple[str, ...] = ()

    @classmethod
    def on(cls, architecture: str) -> Runtime:
        """That of a device, by the name of its architecture ("ampere"); "" or one unknown here: as on Hopper."""
        if architecture not in _SMALL_WORKSPACES:
            return cls()
        each = 2 * 4 * MIB + 8 * MIB // 64
        return cls(cublas_workspace_bytes=(each, each), engine_workspace_bytes=4 * MIB)

    def workspaces(self, program: Program) -> tuple[int, ...]:
        """Bytes that libraries hold throughout a step, allocation by allocation."""
        held = {by: nbytes for by, nbytes in program.held.items() if by != BETWEEN_STEPS}
        of_cublas = (held.pop("cublas"),) if "cublas" in held else self.cublas_workspace_bytes
        if _ENGINE in held:
            held[_ENGINE] = held[_ENGINE] * self.engine_workspace_bytes // Runtime().engine_workspace_bytes
        return (*of_cublas, *held.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """A part of what lives at the peak.

    Attributes:
        role: a tensor role, "communication" or "workspace".
        where: the module that holds or makes it, layers as `*`; the operator where no module does.
        nbytes: its bytes.
    """

    role: str
    where: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """Tensors that live at the peak and are alike: made by one operator, in one module, of one shape.

    Attributes:
        role: a tensor role, "communication" or "workspace".
        where: module that makes it, layers as `*`; of what lives through the step its name.
        operator: that makes it; "" for what exists before the step.
        phase: of that operation; "" likewise.
        shape: extents; none of a buffer or workspace.
        dtype: element type; "" likewise.
        count: how many there are, each micro-batch's own.
        nbytes: bytes of all together.
    """

    role: str
    where: str
    operator: str = ""
    phase: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    count: int
    nbytes: int

    def __str__(self) -> str:
        made = f" by {self.operator} ({self.phase})" if self.operator else ""
        what = f" {self.dtype}{list(self.shape)}" if self.dtype else ""
        return f"{format_bytes(self.nbytes)}  {self.count} x{what} {self.role} of {self.where}{made}"

    def to_json(self) -> dict[str, Any]:
        """For results."""
        return {
            "role": self.role, "where": self.where, "operator": self.operator, "phase": self.phase,
            "shape": list(self.shape), "dtype": self.dtype, "count": self.count, "bytes": self.nbytes,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        program: role of the rank.
        peak_bytes: the most that is allocated at one time.
        at_rest_bytes: what is allocated between steps: parameters, optimizer state, gradients that are buffers,
            workspaces, and what the script keeps from one step and drops within the next.
        peak_at: operation of the peak: "operator", "module", "phase" and "micro_batch"; empty where the step takes
            no more than there is before it.
        reserved_bytes: the most that the allocator holds; None where the step is too long to replay.
        overhead_bytes: what does not go through the allocator, by name.
        capacity_bytes: memory of the device.
        fits: whether the step runs: the allocator never asks for more than the device has left.
        by_role: bytes at the peak, by role.
        contributors: the largest parts of the peak, largest first.
        tensors: the largest tensors of the peak, those alike together, largest first.
        curve: (operations run, most bytes allocated until the next point), over the step.
        programs: peak of every program of the job, where this one stands for all.
        at_rest: at rest, of every program.
    """

    program: str = ""
    peak_bytes: int
    at_rest_bytes: int = 0
    peak_at: dict[str, Any] = field(default_factory=dict)
    reserved_bytes: int | None
    overhead_bytes: dict[str, int]
    capacity_bytes: int
    fits: bool
    by_role: dict[str, int]
    contributors: tuple[Contributor, ...]
    tensors: tuple[LiveTensor, ...] = ()
    curve: tuple[tuple[int, int], ...] = field(default=(), repr=False, compare=False)
    programs: dict[str, int] = field(default_factory=dict)
    at_rest: dict[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """What nvidia-smi would show."""
        held = self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes
        return held + sum(self.overhead_bytes.values())

    def lines(self, count: int = 5) -> list[str]:
        """The largest contributors, one line each."""
        return [
            f"{format_bytes(c.nbytes)} ({c.nbytes / max(1, self.peak_bytes):.0%}) {c.role} of {c.where}"
            for c in self.contributors[:count]
        ]

    def listed(self, count: int) -> list[str]:
        """The operation of the peak and its largest tensors, one line each."""
        at = self.peak_at
        where = f", at {at['operator']} of {at['module'] or 'the step'} ({at['phase']})" if at else ""
        rank = f" of {self.program}" if self.program else ""
        levels = f"{format_bytes(self.peak_bytes)}; at rest {format_bytes(self.at_rest_bytes)}"
        return [f"at the peak{rank}{where}, {levels}", *(f"  {tensor}" for tensor in self.tensors[:count])]

    def to_json(self) -> dict[str, Any]:
        """For results."""
        return {
            "peak_bytes": self.peak_bytes,
            "at_rest_bytes": self.at_rest_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "program": self.program,
            "at_peak_bytes": self.by_role,
            "overhead_bytes": self.overhead_bytes,
            "contributors": [{"role": c.role, "where": c.where, "bytes": c.nbytes} for c in self.contributors],
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "peak_at": self.peak_at,
            "peak_bytes_by_program": self.programs,
            "at_rest_bytes_by_program": self.at_rest,
        }


def memory(
    job: JobGraph,
    program: int,
    capacity_bytes: int,
    runtime: Runtime | None = None,
    allocations: Allocations | None = None,
    reserve: bool = True,
) -> Memory | None:
    """Memory of one program.

    Args:
        job: the job.
        program: number of the program.
        capacity_bytes: memory of the device.
        runtime: what the framework takes besides.
        allocations: of the job, where they are at hand already.
        reserve: whether to replay the allocator, which takes most of the time; without, `reserved_bytes` is None.

    Returns:
        None for a job that has no tensors (an imported trace).
    """
    if not len(job.tensors):
        return None
    usage = Usage(Lifetimes(allocations or Allocations(job), program))
    return _of(usage, job, program, capacity_bytes, runtime or Runtime(), reserve=reserve)


def _of(
    usage: Usage,
    job: JobGraph,
    program: int,
    capacity_bytes: int,
    runtime: Runtime,
    *,
    reserve: bool,
    parts: bool = True,
) -> Memory:
    workspaces = runtime.workspaces(job.programs[program])
    overhead = {
        "CUDA context (assumed)": runtime.cuda_context_bytes,
        "NCCL buffers": _nccl_bytes(job, program, runtime),
    }
    limit = capacity_bytes - sum(overhead.values())
    needed = usage.peak_bytes + sum(workspaces)
    reserved, fits = _reserve(usage, runtime, workspaces, limit) if reserve else (None, needed <= limit)
    found = Memory(
        program=job.programs[program].role,
        peak_bytes=needed,
        at_rest_bytes=_at_rest(usage, job.programs[program], workspaces),
        peak_at={},
        reserved_bytes=reserved,
        overhead_bytes={name: nbytes for name, nbytes in overhead.items() if nbytes},
        capacity_bytes=capacity_bytes,
        fits=fits,
        by_role={},
        contributors=(),
    )
    if not parts:
        return found
    by_role, contributors, tensors = _at_peak(usage)
    by_role["workspace"] += sum(workspaces)
    return replace(
        found,
        peak_at=_peak_at(usage),
        by_role=by_role,
        contributors=contributors,
        tensors=tensors,
        curve=usage.curve(POINTS),
    )


def _at_rest(usage: Usage, program: Program, workspaces: tuple[int, ...]) -> int:
    return usage.before_bytes + sum(workspaces) + program.held.get(BETWEEN_STEPS, 0)


def _peak_at(usage: Usage) -> dict[str, Any]:
    """The operation of the peak."""
    if usage.top is None:
        return {}
    job, (call, offset) = usage.lifetimes.job, usage.top
    op = int(usage.calls[call, 1]) + offset
    return {
        "operator": job.strings[job.ops.name[op]],
        "module": job.strings[job.ops.module[op]],
        "phase": Phase(int(job.ops.phase[op])).name.lower(),
        "micro_batch": int(usage.calls[call, 4]),
    }


def _reserve(usage: Usage, runtime: Runtime, workspaces: tuple[int, ...], limit: int) -> tuple[int | None, bool]:
    """Bytes that the allocator reserves, and whether they are within a limit, where it gives back what is free."""
    allocator = CachingAllocator(expandable_segments=runtime.expandable_segments)
    if usage.replay(allocator, workspaces) is None:
        return None, usage.peak_bytes + sum(workspaces) <= limit
    reserved = allocator.peak_reserved_bytes
    if reserved <= limit or usage.peak_bytes > limit:
        return reserved, reserved <= limit
    allocator = CachingAllocator(expandable_segments=runtime.expandable_segments, limit_bytes=limit)
    fits = bool(usage.replay(allocator, workspaces))
    return (allocator.peak_reserved_bytes if fits else reserved), fits


def _nccl_bytes(job: JobGraph, program: int, runtime: Runtime) -> int:
    """Buffers of the communicators that a program uses, and that its framework opens beside them."""
    communicates = np.isin(job.ops.kind, COMMUNICATIONS) & (job.run_counts(program) > 0)
    groups = distinct(job.ops.group[communicates]).tolist()
    sizes = [job.group_size(job.groups[number]) for number in groups]
    along = [set(name.split("-")) for name in runtime.other_communicators]
    sizes += [prod(axis.size for axis in job.mesh if axis.name in axes) for axes in along]
    return sum(0 if n < 2 else runtime.nccl_pair_bytes if n == 2 else runtime.nccl_bytes for n in sizes)


def _at_peak(usage: Usage) -> tuple[dict[str, int], tuple[Contributor, ...], tuple[LiveTensor, ...]]:
    """Bytes by role, the largest parts, and the largest tensors."""
    allocations, alive = usage.lifetimes.allocations, usage.alive
    by_role = Counter(dict.fromkeys(ROLES.values(), 0))
    parts: Counter[tuple[str, str]] = Counter()
    alike: dict[LiveTensor, list[int]] = {}
    known: dict[int, str] = {}
    likes: dict[tuple[int, int, bool, str], LiveTensor] = {}
    for number, count in zip(*np.unique(alive, return_counts=True), strict=True):
        role = ROLES[int(allocations.role[number])]
        nbytes = int(usage.size[number]) * int(count)
        by_role[role] += nbytes
        parts[role, _where(allocations, int(number), known)] += nbytes
        found = alike.setdefault(_alike(allocations, int(number), role, likes), [0, 0])
        found[0] += int(count)
        found[1] += nbytes
    largest = sorted(parts.items(), key=lambda item: (-item[1], item[0]))[:CONTRIBUTORS]
    tensors = [replace(like, count=count, nbytes=nbytes) for like, (count, nbytes) in alike.items() if nbytes]
    tensors.sort(key=lambda tensor: (-tensor.nbytes, str(tensor)))
    contributors = tuple(Contributor(role=r, where=w, nbytes=n) for (r, w), n in largest if n)
    return dict(by_role), contributors, tuple(tensors[:TENSORS])


def _alike(
    allocations: Allocations, number: int, role: str, known: dict[tuple[int, int, bool, str], LiveTensor]
) -> LiveTensor:
    """What an allocation has in common with those like it; those of all instances are one."""
    job = allocations.job
    if number >= allocations.tensors:
        op, row = job.locate_op((number - allocations.tensors) % allocations.ops)[2], NONE
    else:
        row = job.locate_tensor(number)[2]
        op = int(job.maker[row])
    key = op, row, op != NONE and bool(allocations.made[number]), role
    if key not in known:
        known[key] = _like(job, *key)
    return known[key]


def _like(job: JobGraph, op: int, row: int, made: bool, role: str) -> LiveTensor:
    """An allocation of an operation, or of a tensor."""
    like = LiveTensor(role=role, where="", count=0, nbytes=0)
    if row != NONE:
        tensor = job.tensors[row]
        like = replace(like, where=_layers(tensor.name), shape=tensor.shape, dtype=tensor.dtype.text)
    if made:
        where, phase = _layers(job.strings[job.ops.module[op]]), Phase(int(job.ops.phase[op])).name.lower()
        like = replace(like, where=where or like.where, operator=job.strings[job.ops.name[op]], phase=phase)
    return like


def _where(allocations: Allocations, number: int, known: dict[int, str]) -> str:
    """Whose an allocation is: the layer of what lives through the step, else the module that makes it."""
    job = allocations.job
    if number >= allocations.tensors:
        op = job.locate_op((number - allocations.tensors) % allocations.ops)[2]
        named = job.ops.name if allocations.role[number] == COMMUNICATION else job.ops.module
        return _layers(job.strings[named[op]])
    row = job.locate_tensor(number)[2]
    if row not in known:
        known[row] = _whose(job, row)
    return known[row]


def _whose(job: JobGraph, row: int) -> str:
    tensor, maker = job.tensors[row], int(job.maker[row])
    if tensor.role.persistent:
        name = _layers(tensor.name)
        if "*" in name:
            return name[: name.index("*") + 1]
        drop = 1 if tensor.role in (TensorRole.PARAMETER, TensorRole.BUFFER) else 2
        return ".".join(name.split(".")[:-drop]) or name
    if maker == NONE:
        return _layers(tensor.name)
    return _layers(job.strings[job.ops.module[maker]]) or job.strings[job.ops.name[maker]]


def _layers(name: str) -> str:
    """A dotted path with its numbers as `*`."""
    return re.sub(r"(?<![^.])(\d+|\{\})(?![^.])", "*", name)


def largest_memory(
    job: JobGraph,
    capacity_bytes: int,
    runtime: Runtime | None = None,
    most_bytes: float = inf,
    *,
    parts: bool = True,
) -> Memory | None:
    """Memory of the program that has most allocated at its peak, with the peaks of all.

    Args:
        job: the job.
        capacity_bytes: memory of the device.
        runtime: what the framework takes besides.
        most_bytes: what a device may need. The first program that allocates more is told, and of no other, nor
            what the allocator reserves.
        parts: whether to tell what the peak is made of, and its course over the step.

    Returns:
        None for a job that has no tensors (an imported trace).
    """
    if not len(job.tensors):
        return None
    runtime, allocations = runtime or Runtime(), Allocations(job)
    most, needed, largest, peaks, rests = 0, NONE, None, dict[str, int](), dict[str, int]()
    for number, program in enumerate(job.programs):
        usage, also = Usage(Lifetimes(allocations, number)), runtime.workspaces(program)
        name, peak = program.role or str(number), usage.peak_bytes + sum(also)
        peaks[name], rests[name] = peak, _at_rest(usage, program, also)
        # One is kept: what lives when is as large as the calls of a program.
        if (its := peak + _nccl_bytes(job, number, runtime)) > needed:
            most, needed, largest = number, its, usage
        if its + runtime.cuda_context_bytes > most_bytes:
            return _of(usage, job, number, capacity_bytes, runtime, reserve=False, parts=parts)
    assert largest is not None
    found = _of(largest, job, most, capacity_bytes, runtime, reserve=True, parts=parts)
    return replace(found, programs=peaks, at_rest=rests)
