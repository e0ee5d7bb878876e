"""Peak memory as a row's source reports it."""

from __future__ import annotations

from dataclasses import replace

from echograph.ir.graph import JobGraph
from echograph.models.stacks import load_stack
from echograph.simulator.clusters import Cluster
from echograph.simulator.memory import Memory, Runtime, largest_memory
from echograph.units import MIB
from echograph.workflow.plan import Plan
from echograph.workflow.validation.table import MeasuredStep

GIB = 2**30
RESERVED = ("titan",)
"""Families whose figure is PyTorch's reserved memory; the others' is nvidia-smi's."""

EAGER_KERNELS = ("bloom",)
"""Families of the time before kernels were loaded lazily, on devices before Hopper: BigScience's chronicles of
tr11-176B-ml state 1,573 MiB for them, and cuBLAS takes 8 MiB a handle."""

THOUSANDS = ("bloom",)
"""Families whose GB are thousands of nvidia-smi's MiB: their 80 GB would not fit an A100 as GiB."""


def measured_memory(row: MeasuredStep) -> int | None:
    """The row's figure in bytes; None where it has none."""
    try:
        gib = float(row.text("peak_mem_gib"))
    except ValueError:
        return None
    return round(gib * GIB * (1000 / 1024 if row.family in THOUSANDS else 1)) if 0 < gib < 1e6 else None


def predicted_memory(row: MeasuredStep, job: JobGraph, cluster: Cluster, plan: Plan) -> int | None:
    """The same figure, predicted, of the rank that needs most."""
    memory = largest_memory(job, cluster.memory_bytes, _runtime(row, plan))
    return None if memory is None else _reported(row, memory)


def _reported(row: MeasuredStep, memory: Memory) -> int:
    if row.family in RESERVED and memory.reserved_bytes is not None:
        return memory.reserved_bytes
    return memory.device_bytes


def _runtime(row: MeasuredStep, plan: Plan) -> Runtime:
    runtime = Runtime(expandable_segments=bool(plan.stack) and load_stack(plan.stack).expandable_segments)
    if row.family not in EAGER_KERNELS:
        return runtime
    return replace(runtime, cuda_context_bytes=1573 * MIB, cublas_workspace_bytes=(8 * MIB, 8 * MIB))
