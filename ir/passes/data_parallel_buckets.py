"""Buckets: gradients, or parameters, that are communicated together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, lcm, prod

from echograph.ir import types as t
from echograph.ir.graph import Axis
from echograph.ir.passes.data_parallel_axes import reduction_axes

MIB = 2**20
_ALIGNED = 128
"""Megatron-LM fills a bucket up to a multiple of this many elements, and of the ranks."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Tensors of one data type and one set of ranks, with their ids.

    Attributes:
        axes: along which the ranks lie.
        dtype: of all.
        tensors: each with its id, in order.
        elements: of all together.
    """

    axes: tuple[str, ...]
    dtype: t.DType
    tensors: list[tuple[int, t.Tensor]] = field(default_factory=list)
    elements: int = 0

    def nbytes(self, ranks: int = 1) -> int:
        """Bytes, filled up so that ranks get equal shards; as they are for one rank."""
        step = lcm(ranks, _ALIGNED) if ranks > 1 else 1
        return ceil(self.elements / step) * step * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a bucket is full.

    Attributes:
        nbytes: a bucket closes when it holds as much; None: Megatron-LM's number of elements; infinite: never.
        first_nbytes: the same for the first bucket of its type and ranks; None: as all others.
    """

    nbytes: float | None = None
    first_nbytes: float | None = None

    def of(self, bucket: Bucket, ranks: int, first: bool) -> float:
        """Bytes at which a bucket closes."""
        if first and self.first_nbytes is not None:
            return self.first_nbytes
        return max(40_000_000, 1_000_000 * ranks) * bucket.dtype.itemsize if self.nbytes is None else self.nbytes


def fill(tensors: Iterable[tuple[int, t.Tensor]], mesh: tuple[Axis, ...], limits: Limits) -> list[Bucket]:
    """Puts tensors into buckets, one open bucket for each data type and set of ranks.

    Args:
        tensors: each with its id, in the order in which they are ready; those of no data axis are left out.
        mesh: of the job.
        limits: when a bucket is full.
    """
    sizes = {axis.name: axis.size for axis in mesh}
    opened: dict[tuple[tuple[str, ...], t.DType], Bucket] = {}
    closed: list[Bucket] = []
    begun = set()
    for identity, tensor in tensors:
        axes = reduction_axes(mesh, tensor.sharded)
        if not axes:
            continue
        key = axes, tensor.dtype
        bucket = opened.setdefault(key, Bucket(axes=axes, dtype=tensor.dtype))
        bucket.tensors.append((identity, tensor))
        bucket.elements += tensor.numel
        ranks = prod(sizes[axis] for axis in axes)
        if bucket.nbytes() >= limits.of(bucket, ranks, first=key not in begun):
            closed.append(opened.pop(key))
            begun.add(key)
    return [*closed, *opened.values()]


def by_axes(buckets: list[Bucket]) -> dict[tuple[str, ...], list[Bucket]]:
    """The buckets of each set of ranks."""
    found: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.axes, []).append(bucket)
    return found
