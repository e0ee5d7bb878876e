"""What ZeRO-3 does slice by slice, for each of 1,024 ranks, done at once: the same bytes in one operator.

To gather parameters, and to scatter gradients, DeepSpeed makes a view for every rank of every parameter. Views
cost a device nothing; captured, there would be more than a million of them in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echograph.frontend.scripts.adapter import patched

GATHER = "_PartitionedParameterCoordinator__all_gather_params_"


@contextmanager
def at_once(hook_point: Callable[[str, str], Any], rank: int) -> Iterator[None]:
    """In the context, ZeRO-3 handles the slices of all ranks together.

    Args:
        hook_point: (module of DeepSpeed, class or "") -> it.
        rank: of this process.
    """
    handle = hook_point("runtime.zero.partition_parameters", "AllGatherCoalescedHandle")
    coordinator = hook_point("runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator")
    reduce = hook_point("runtime.comm.coalesced_collectives", "")
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(
            patched(
                hook_point("runtime.zero.stage3", ""),
                "reduce_scatter_coalesced",
                lambda _: partial(_scatter, reduce),
            )
        )
        enter(patched(handle, "wait", _wait))
        enter(patched(coordinator, GATHER, lambda f: _gather(f, rank)))
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    """Another rank's part of a tensor, of which nothing is asked but what it is a part of."""

    whole: Tensor


class _OwnSlices(TorchFunctionMode):
    """Makes no view of one of the equal parts of a tensor, where that is another rank's."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.narrow and len(args) == 4:
            whole, dim, start, length = args
            equal = dim == 0 and whole.dim() == 1 and length and whole.numel() % length == 0
            # Ranks of a group, the world or a machine, follow each other.
            if equal and start // length != self._rank % (whole.numel() // length):
                return _Slice(whole)
        return func(*args, **(kwargs or {}))


def _gather(original: Callable[..., Any], rank: int) -> Callable[..., Any]:
    def gather(*args: Any, **kwargs: Any) -> Any:
        with _OwnSlices(rank):
            return original(*args, **kwargs)

    return gather


def _wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Takes each parameter out of what was gathered: rank by rank, a part of every parameter."""

    def wait(handle: Any, *args: Any, **kwargs: Any) -> None:
        whole = next((part.whole for part in handle.partitions if isinstance(part, _Slice)), None)
        if handle.complete or whole is None or handle.quantization:
            original(handle, *args, **kwargs)
            return
        handle.allgather_handle.wait()
        ranks = whole.view(handle.world_size, -1)
        offset = 0
        for parameter in handle.params:
            share = parameter.ds_tensor.ds_numel
            share *= parameter.ds_secondary_tensor_num_of_groups if handle.use_secondary_tensor else 1
            parts = ranks.narrow(1, offset, share).clone(memory_format=torch.contiguous_format)
            flat = parts.view(-1).narrow(0, 0, parameter.ds_numel)
            parameter.data = flat.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
            parameter.ds_status = type(parameter.ds_status).AVAILABLE
            offset += share
        handle.complete = True

    return wait


def _scatter(reduce: Any, tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Averages gradients over ranks; each gets its share of every one."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shares = [-(-tensor.numel() // size) for tensor in tensors]
    padding = sum(shares) * size - sum(tensor.numel() for tensor in tensors)
    if len(tensors) == 1 and not padding:
        flat = tensors[0].view(-1)
    else:
        flat = torch.cat([*(tensor.view(-1) for tensor in tensors), tensors[0].new_empty(padding)])
    flat.div_(size)
    share = flat.narrow(0, rank * sum(shares), sum(shares))
    reduce._torch_reduce_scatter_fn(flat, share, group=group)
    made, offset = [], 0
    for tensor, length in zip(tensors, shares, strict=True):
        own = max(0, min(length, tensor.numel() - rank * length))
        made.append(share.narrow(0, offset, own))
        offset += length
    return made
