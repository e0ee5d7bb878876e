"""What DeepSpeed 0.19 cannot do without ranks, a device and values, and what stands in for it.

A shim changes nothing that a capture records: each stands for a check, a measurement, or a decision that depends
on values. What it is for stands beside it. What ZeRO-3 does slice by slice, for each of 1,024 ranks, is done at
once: the same bytes in one operator (`at_once`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.torch_adapter import converted_in_place
from echograph.frontend.scripts.world import World

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


Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def load() -> None:
    """Imports DeepSpeed, which asks for a device and for values as it is imported: it finds a CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with unset_fake_temporarily():
        importlib.import_module("deepspeed")


@contextmanager
def installed(world: World) -> Iterator[None]:
    """In the context DeepSpeed runs as one rank under fake process groups; nothing of that stays."""
    from deepspeed.accelerator import real_accelerator

    from echograph.frontend.deepspeed.device import CapturedAccelerator, stand_in

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_as_it_was())
        real_accelerator.ds_accelerator = CapturedAccelerator(world)
        enter(patched(nn.Module, "_apply", converted_in_place))
        enter(patched(hook_point("ops.op_builder.builder", "OpBuilder"), "load", stand_in))
        enter(at_once(hook_point, world.rank))
        for module, owner, name, around in _SHIMS:
            at = hook_point(module, owner)
            if name != _SINCE_0_19_1 or hasattr(at, name):
                enter(patched(at, name, around))
        yield


def hook_point(module: str, owner: str = "") -> Any:
    """DeepSpeed (""), a module of it, or a class in that.

    Raises:
        CaptureError: it is not there in this version.
    """
    where = f"deepspeed.{module}".rstrip(".")
    try:
        found = importlib.import_module(where)
        return getattr(found, owner) if owner else found
    except (ImportError, AttributeError):
        missing = f"{where}.{owner}" if owner else where
        raise CaptureError(
            f"this version of DeepSpeed has no {missing}: install one that the adapter was tested with (0.19.x)"
        ) from None


@contextmanager
def _as_it_was() -> Iterator[None]:
    """DeepSpeed keeps its communication backend, its groups and more in global variables of its modules."""
    modules = [module for name, module in sys.modules.items() if _is_deepspeed(name, module)]
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, variables in before:
            vars(module).update(variables)


def _is_deepspeed(name: str, module: Any) -> bool:
    return isinstance(module, ModuleType) and (name == "deepspeed" or name.startswith("deepspeed."))


def _never(original: Callable[..., Any]) -> Callable[..., Any]:
    """Does as the original, and answers no: there are no values, and gradients are taken to be finite."""

    def run(*args: Any, **kwargs: Any) -> bool:
        original(*args, **kwargs)
        return False

    return run


def _false(original: Callable[..., Any]) -> Callable[..., Any]:
    """The norm of the gradients is taken to be a number."""
    del original
    return lambda *_: False


def _nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    """All ranks are this one, and agree."""
    del original
    return lambda *_, **__: None


def _with_capacity(original: Callable[..., Any]) -> Callable[..., Any]:
    """Experts take as many tokens as their capacity says; as many as come is a shape that only values tell."""

    def init(gate: Any, *args: Any, **kwargs: Any) -> None:
        original(gate, *args, **kwargs)
        if not gate.drop_tokens:
            raise CaptureError(
                "deepspeed.moe with drop_tokens=False gives experts as many tokens as come, which only values "
                "tell: leave it out, with a capacity_factor"
            )

    return init


# Versions before it do not look.
_SINCE_0_19_1 = "is_invalid_grad_norm"
_SHIMS: tuple[tuple[str, str, str, Around], ...] = (
    # Builds an extension in C++ for ranks of one machine, for minutes.
    ("comm.torch", "", "build_shm_op", _nothing),
    # Compare numbers that rank 0 broadcast with this rank's own.
    ("runtime.zero.partition_parameters", "", "assert_ints_same_as_other_ranks", _nothing),
    ("runtime.zero.partitioned_param_coordinator", "", "assert_ints_same_as_other_ranks", _nothing),
    ("runtime.zero.stage3", "", "assert_ints_same_as_other_ranks", _nothing),
    # A step with gradients that are not finite is left out: by values, which are not there.
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "has_overflow", _never),
    ("runtime.zero.stage_1_and_2", "", "is_invalid_grad_norm", _false),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "has_overflow", _never),
    ("runtime.zero.stage3", "", "is_invalid_grad_norm", _false),
    ("runtime.utils", "CheckOverflow", "has_overflow", _never),
    ("runtime.utils", "CheckOverflow", "check_using_norm", _never),
    ("runtime.bf16_optimizer", "", "is_invalid_grad_norm", _false),
    ("moe.sharded_moe", "TopKGate", "__init__", _with_capacity),
    # Measure the memory and the time of a process that does not compute.
    ("runtime.engine", "", "see_memory_usage", _nothing),
    ("runtime.zero.stage_1_and_2", "", "see_memory_usage", _nothing),
    ("runtime.zero.stage3", "", "see_memory_usage", _nothing),
)
"""(module of DeepSpeed, class or "", function, what stands in for it)."""
