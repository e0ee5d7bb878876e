"""What megatron-core keeps from step to step: which ranks have shares of it, its flat buffers, its masters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from echograph.frontend.pytorch import annotate
from echograph.frontend.scripts.collectives import ranks_of
from echograph.frontend.scripts.memory import Memory

_BUFFERS = ("buffers", "expert_parallel_buffers")


def tell(memory: Memory) -> None:
    """Says what tensors are and who has shares of them: parameters, their masters, and the buffers they lie in."""
    names = {id(parameter): name for parameter, name in memory.parameters()}
    for parameter, name in memory.parameters():
        over = list(_shares(parameter))
        # The last stage has a copy of the embeddings that it shares with the first.
        memory.divide(parameter, over, 0 if getattr(parameter, "shared", False) else None)
        master = getattr(parameter, "main_param", None)
        if isinstance(master, Tensor):
            replicas = [_replicas(parameter)] if getattr(parameter, "main_param_sharded", False) else []
            memory.divide(master, [*replicas, *over])
            memory.call(master, f"{name}.master")
    for number, buffer in enumerate(_buffers(memory)):
        over = list(dict.fromkeys(ranks for p in buffer.params if id(p) in names for ranks in _shares(p)))
        for tensor, role, name in (
            (buffer.param_data, annotate.PARAMETER, f"flat.{number}"),
            (buffer.grad_data, annotate.GRADIENT, f"flat.{number}.grad"),
        ):
            if isinstance(tensor, Tensor):
                memory.divide(tensor, over)
                memory.name(tensor, role, name)


def _buffers(memory: Memory) -> Iterator[Any]:
    for root in memory.roots:
        for module in root.modules():
            for attribute in _BUFFERS:
                held = getattr(module, attribute, ())
                if isinstance(held, list):
                    yield from (buffer for buffer in held if hasattr(buffer, "grad_data"))


def _shares(parameter: Tensor) -> Iterator[Sequence[int]]:
    """The groups over whose ranks megatron-core divides a parameter: tensor- and expert-parallel ones."""
    from megatron.core import parallel_state as state

    of_expert = not getattr(parameter, "allreduce", True)
    if of_expert and state.get_expert_model_parallel_world_size() > 1:
        yield ranks_of(state.get_expert_model_parallel_group())
    if getattr(parameter, "tensor_model_parallel", False):
        group = state.get_expert_tensor_parallel_group if of_expert else state.get_tensor_model_parallel_group
        yield ranks_of(group())


def _replicas(parameter: Tensor) -> Sequence[int]:
    """The group whose ranks have a part each of what the distributed optimizer keeps of a parameter."""
    from megatron.core import parallel_state as state

    if not getattr(parameter, "allreduce", True):
        return ranks_of(state.get_expert_data_parallel_group())
    return ranks_of(state.get_data_parallel_group(with_context_parallel=True))
