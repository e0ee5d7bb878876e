"""The same job with more or fewer ranks along axes of its mesh, where no program depends on how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echograph.errors import PlanError
from echograph.ir.graph import Axis, JobGraph


def resized(job: JobGraph, sizes: Mapping[str, int]) -> JobGraph:
    """A job with other sizes of its axes; axes that it has not are not added.

    Args:
        job: a job. Its programs, tensors and operations stay what they are: the caller knows that they do not
            depend on the sizes, as those of data-parallel ranks that share nothing do not.
        sizes: ranks along an axis, by its name.

    Raises:
        PlanError: an axis that programs stand along, or that tensors are divided over.
    """
    changed = {axis.name for axis in job.mesh if sizes.get(axis.name, axis.size) != axis.size}
    if not changed:
        return job
    fixed = {name for program in job.programs for name in program.coordinates}
    fixed |= {job.strings[name] for name in job.tensors.sharded.values.tolist()}
    if stuck := sorted(changed & fixed):
        raise PlanError(
            f"axis {stuck[0]}: programs or tensors of the job depend on its size: lower the step again"
        )
    mesh = tuple(Axis(name=axis.name, size=sizes.get(axis.name, axis.size)) for axis in job.mesh)
    return replace(job, mesh=mesh)
