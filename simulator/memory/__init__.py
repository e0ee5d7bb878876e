"""Device memory of every rank role over the step: what lives at the peak, what it reserves, and whether it fits.

Three figures, as three tools report them:

- *allocated* (`torch.cuda.max_memory_allocated`): tensors, communication buffers and workspaces that live;
- *reserved* (`max_memory_reserved`): the segments of PyTorch's caching allocator behind them, its rules replayed;
- *device* (nvidia-smi): reserved, and what never goes through that allocator: the CUDA context and NCCL's buffers.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from echograph.ir.columns import NONE
from echograph.ir.graph import JobGraph
from echograph.ir.types import COMMUNICATIONS, TensorRole
from echograph.simulator.memory.allocator import CachingAllocator
from echograph.simulator.memory.kinds import COMMUNICATION, ROLES, Memories
from echograph.simulator.memory.lifetimes import Lifetimes, Usage
from echograph.units import format_bytes

MIB = 2**20
CONTRIBUTORS, POINTS = 12, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a framework takes of the device besides a graph's tensors, and how it allocates.

    Attributes:
        expandable_segments: PyTorch's allocator option of that name; off, as by default.
        cublas_workspace_bytes: of the forward and of the backward thread's cuBLAS handle, 32 MiB each: NVIDIA's
            recommendation for Hopper (cuBLAS documentation, cublasSetWorkspace), which PyTorch follows; it takes
            8 MiB on older devices.
        cuda_context_bytes: CUDA context and loaded kernels. Assumed for lazily loaded kernels (the default since
            CUDA 11.7); without, 1.2 to 1.6 GiB were seen (BigScience, tr11-176B-ml chronicles, on V100 and A100).
        nccl_pair_bytes: buffers of a communicator of two ranks, as a user measured on A100 (NVIDIA/nccl on
            GitHub, 964).
        nccl_bytes: the same of more ranks; their number does not matter (there, and 986).
    """

    expandable_segments: bool = False
    cublas_workspace_bytes: tuple[int, ...] = (32 * MIB, 32 * MIB)
    cuda_context_bytes: int = 512 * MIB
    nccl_pair_bytes: int = 544 * MIB
    nccl_bytes: int = 688 * MIB


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
class Memory:
    """Bytes of one rank.

    Attributes:
        program: role of the rank.
        peak_bytes: the most that is allocated at one time.
        reserved_bytes: the most that the allocator holds; None where the step is too long to replay.
        overhead_bytes: what does not go through the allocator, by name.
        capacity_bytes: memory of the device.
        fits: whether the step runs: the allocator never asks for more than the device has left.
        by_role: bytes at the peak, by role.
        contributors: the largest parts of the peak, largest first.
        curve: (operations run, most bytes allocated until the next point), over the step.
        programs: peak of every program of the job, where this one stands for all.
    """

    program: str = ""
    peak_bytes: int
    reserved_bytes: int | None
    overhead_bytes: dict[str, int]
    capacity_bytes: int
    fits: bool
    by_role: dict[str, int]
    contributors: tuple[Contributor, ...]
    curve: tuple[tuple[int, int], ...] = field(default=(), repr=False, compare=False)
    programs: dict[str, int] = field(default_factory=dict)

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

    def to_json(self) -> dict[str, Any]:
        """For results."""
        return {
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "program": self.program,
            "at_peak_bytes": self.by_role,
            "overhead_bytes": self.overhead_bytes,
            "contributors": [{"role": c.role, "where": c.where, "bytes": c.nbytes} for c in self.contributors],
            "peak_bytes_by_program": self.programs,
        }


def memory(
    job: JobGraph,
    program: int,
    capacity_bytes: int,
    runtime: Runtime | None = None,
    memories: Memories | None = None,
    reserve: bool = True,
) -> Memory | None:
    """Memory of one program.

    Args:
        job: the job.
        program: number of the program.
        capacity_bytes: memory of the device.
        runtime: what the framework takes besides.
        memories: of the job, where they are at hand already.
        reserve: whether to replay the allocator, which takes most of the time; without, `reserved_bytes` is None.

    Returns:
        None for a job that has no tensors (an imported trace).
    """
    if not len(job.tensors):
        return None
    usage = Usage(Lifetimes(memories or Memories(job), program))
    return _of(usage, job, program, capacity_bytes, runtime or Runtime(), reserve=reserve)


def _of(
    usage: Usage, job: JobGraph, program: int, capacity_bytes: int, runtime: Runtime, *, reserve: bool
) -> Memory:
    workspaces = runtime.cublas_workspace_bytes
    overhead = {
        "CUDA context (assumed)": runtime.cuda_context_bytes,
        "NCCL buffers": _nccl_bytes(job, program, runtime),
    }
    limit = capacity_bytes - sum(overhead.values())
    needed = usage.peak_bytes + sum(workspaces)
    reserved, fits = _reserve(usage, runtime, limit) if reserve else (None, needed <= limit)
    by_role, contributors = _at_peak(usage)
    by_role["workspace"] += sum(workspaces)
    return Memory(
        program=job.programs[program].role,
        peak_bytes=needed,
        reserved_bytes=reserved,
        overhead_bytes={name: nbytes for name, nbytes in overhead.items() if nbytes},
        capacity_bytes=capacity_bytes,
        fits=fits,
        by_role=by_role,
        contributors=contributors,
        curve=usage.curve(POINTS),
    )


def _reserve(usage: Usage, runtime: Runtime, limit: int) -> tuple[int | None, bool]:
    """Bytes that the allocator reserves, and whether they are within a limit, where it gives back what is free."""
    workspaces = runtime.cublas_workspace_bytes
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
    """Buffers of the communicators that a program uses."""
    groups: set[int] = set()
    communicates = np.isin(job.ops.kind, COMMUNICATIONS)
    for begin, end in {(begin, end) for _, begin, end, _, _ in job.programs[program].calls.tolist()}:
        groups.update(job.ops.group[begin:end][communicates[begin:end]].tolist())
    total = 0
    for ranks in (job.group_size(job.groups[number]) for number in groups):
        total += 0 if ranks < 2 else runtime.nccl_pair_bytes if ranks == 2 else runtime.nccl_bytes
    return total


def _at_peak(usage: Usage) -> tuple[dict[str, int], tuple[Contributor, ...]]:
    """Bytes by role, and the largest parts."""
    memories, alive = usage.lifetimes.memories, usage.alive
    by_role = Counter(dict.fromkeys(ROLES.values(), 0))
    parts: Counter[tuple[str, str]] = Counter()
    known: dict[int, str] = {}
    for number, count in zip(*np.unique(alive, return_counts=True), strict=True):
        role = ROLES[int(memories.role[number])]
        nbytes = int(usage.size[number]) * int(count)
        by_role[role] += nbytes
        parts[role, _where(memories, int(number), known)] += nbytes
    largest = sorted(parts.items(), key=lambda item: (-item[1], item[0]))[:CONTRIBUTORS]
    return dict(by_role), tuple(Contributor(role=r, where=w, nbytes=n) for (r, w), n in largest if n)


def _where(memories: Memories, number: int, known: dict[int, str]) -> str:
    """What holds a memory: for what lives through the step the layer, for the rest the module that makes it."""
    job = memories.job
    if number >= memories.tensors:
        op = job.locate_op((number - memories.tensors) % memories.ops)[2]
        named = job.ops.name if memories.role[number] == COMMUNICATION else job.ops.module
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


def largest_memory(job: JobGraph, capacity_bytes: int, runtime: Runtime | None = None) -> Memory | None:
    """Memory of the program that has most allocated at its peak, with the peaks of all.

    Args:
        job: the job.
        capacity_bytes: memory of the device.
        runtime: what the framework takes besides.

    Returns:
        None for a job that has no tensors (an imported trace).
    """
    if not len(job.tensors):
        return None
    runtime, memories = runtime or Runtime(), Memories(job)
    usages = [Usage(Lifetimes(memories, number)) for number in range(len(job.programs))]
    most = max(range(len(usages)), key=lambda n: (usages[n].peak_bytes + _nccl_bytes(job, n, runtime), -n))
    found = _of(usages[most], job, most, capacity_bytes, runtime, reserve=True)
    workspaces = sum(runtime.cublas_workspace_bytes)
    peaks = {job.programs[n].role or str(n): usage.peak_bytes + workspaces for n, usage in enumerate(usages)}
    return replace(found, programs=peaks)
