"""Which ranks have shares of a tensor, as PyTorch's own wrappers say it: DTensor, and FSDP's flat parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from echograph.frontend.scripts.collectives import ranks_of

Groups = tuple[tuple[int, ...], ...]
"""Global ranks of each group over whose ranks the elements of a tensor are divided."""


def groups_of(tensor: Tensor) -> Groups:
    """The groups of a DTensor's shards; none of another tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    shards = [i for i, p in enumerate(tensor.placements) if not (p.is_replicate() or p.is_partial())]  # type: ignore[attr-defined]
    return tuple(ranks_of(mesh.get_group(i)) for i in shards if mesh.size(i) > 1)


def fsdp_shards(root: nn.Module) -> Iterator[tuple[Tensor, Groups, int]]:
    """Parameters that the first FSDP divides, with the groups that have shares and the elements of the whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in FullyShardedDataParallel.fsdp_modules(root):
        handle: Any = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat, over = handle.flat_param, (ranks_of(handle.process_group),)
        yield flat, over, sum(flat._numels)
        if flat._params is not None:
            for parameter, elements in zip(flat._params, flat._numels, strict=True):
                yield parameter, over, elements
