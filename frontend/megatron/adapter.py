"""Megatron scripts for `echoc capture megatron`: shims, hooks, the mesh of `parallel_state`, one rank a stage.

What megatron-core keeps from step to step is told as well: which ranks have shares of it, its flat buffers, its
masters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from echograph.frontend.megatron import fp8, graphs, kernels, mamba, muon, transformer_engine
from echograph.frontend.megatron.attention import PACKS, is_flash_alone, is_one_kernel
from echograph.frontend.megatron.flex import Flex
from echograph.frontend.megatron.hashes import hashing
from echograph.frontend.megatron.hooks import hooks, optimizers
from echograph.frontend.megatron.patches import DISTRIBUTION, TESTED, in_place
from echograph.frontend.megatron.settings import CHECKED
from echograph.frontend.megatron.shims import LEFT_OUT, balanced, shimmed
from echograph.frontend.pytorch import annotate
from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.capture import WITHIN_CONTEXT
from echograph.frontend.scripts.collectives import ranks_of
from echograph.frontend.scripts.installed import of_library
from echograph.frontend.scripts.memory import LivingTensors
from echograph.frontend.scripts.torch_adapter import TorchAdapter, compiling, converted_in_place
from echograph.ir.passes.model import CONTEXT

if TYPE_CHECKING:
    from echograph.frontend.scripts.recorder import ScriptRecorder
    from echograph.frontend.scripts.world import World


_BUFFERS = ("buffers", "expert_parallel_buffers")


def tell(memory: LivingTensors) -> None:
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
    for name, tensor in _shared_buffers().items():
        memory.name(tensor, annotate.BUFFER, name)
    for number, buffer in enumerate(_buffers(memory)):
        over = list(dict.fromkeys(ranks for p in buffer.params if id(p) in names for ranks in _shares(p)))
        for tensor, role, name in (
            (buffer.param_data, annotate.PARAMETER, f"flat.{number}"),
            (buffer.grad_data, annotate.GRADIENT, f"flat.{number}.grad"),
        ):
            if isinstance(tensor, Tensor):
                memory.divide(tensor, over)
                memory.name(tensor, role, name)


def _shared_buffers() -> dict[str, Tensor]:
    """What megatron-core takes once for all layers: of unfused attention's scores, of gathered inputs."""
    from megatron.core import parallel_state as state

    held: Any = state._GLOBAL_MEMORY_BUFFER
    return {} if held is None else {f"{key[0]} buffer": tensor for key, tensor in held.buffer.items()}


def _buffers(memory: LivingTensors) -> Iterator[Any]:
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


class MegatronAdapter(TorchAdapter):
    """megatron-core, and scripts written with it."""

    name: ClassVar[str] = "megatron"
    stack: ClassVar[str] = "megatron-core"
    host: ClassVar[str] = "megatron-core"
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "megatron": "megatron"}
    tested: ClassVar[Mapping[str, tuple[str, str]]] = {DISTRIBUTION: TESTED}
    compiles: ClassVar[tuple[str, ...]] = ("megatron.core",)
    runs_alone: ClassVar[bool] = False  # its initialization asks for what a launcher says

    @contextmanager
    def installed(self, world: World, recorder: ScriptRecorder) -> Iterator[None]:
        """Shims and hooks of megatron-core, around those of plain PyTorch."""
        # Scripts that launch Megatron-LM set it, and it refuses to go on without, its FSDP with it.
        # The world restores what was.
        if not any("fsdp" in argument for argument in sys.argv):
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        with (
            of_library(*_places()),
            # What megatron-core compiles, it gives torch.compile where it is imported.
            patched(torch, "compile", lambda _: compiling(recorder, self.compiles)),
            shimmed(),
            kernels.told(recorder.in_region),
            patched(transformer_engine.DotProductAttention, "__init__", lambda f: _noted(recorder, f)),
            patched(fp8.ScalingRecipe, "__init__", lambda f: _said(recorder, f, _IN_FP8)),
            patched(mamba.GatedNorm, "__init__", lambda f: _said(recorder, f, _MAMBA)),
            patched(muon.OrthogonalizedOptimizer, "__init__", lambda f: _said(recorder, f, _MUON)),
            patched(transformer_engine.Linear, "__init__", lambda f: _working(recorder, f, 1)),
            patched(transformer_engine.GroupedLinear, "__init__", lambda f: _working(recorder, f, 1 + _STREAMS)),
            super().installed(world, recorder),
            patched(nn.Module, "_apply", converted_in_place),
            in_place(CHECKED),
            patched(_config(), "__post_init__", lambda f: _graphs_taken(recorder, f)),
            in_place((*hashing(recorder), *LEFT_OUT, *balanced(recorder.note), *Flex(recorder.note).patches())),
            in_place(optimizers(recorder.stepping)),
            in_place(hooks(recorder, lambda: recorder.is_early)),
        ):
            recorder.memory.state_providers.append(lambda: tell(recorder.memory))
            try:
                yield
            finally:
                _forget_groups()

    def axes(self, world: World) -> Mapping[str, int] | None:
        """The mesh in Megatron's order of ranks (tensor parallel innermost, pipeline outermost).

        Experts are divided over ranks that have other places for everything else (`axes_with_experts`).
        """
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            return None
        sizes = {
            "pp": state.get_pipeline_model_parallel_world_size(),
            "dp": state.get_data_parallel_world_size(),
            "cp": state.get_context_parallel_world_size(),
            "tp": state.get_tensor_model_parallel_world_size(),
        }
        levels = list(state.get_hierarchical_context_parallel_groups(check_initialized=False) or ())
        if len(levels) > 1:
            sizes = within_context(sizes, levels[0].size())
        experts = state.get_expert_model_parallel_world_size() or 1
        if experts == 1:
            return sizes
        return axes_with_experts(sizes, experts, state.get_expert_tensor_parallel_world_size() or 1)


def within_context(sizes: Mapping[str, int], inner: int) -> dict[str, int]:
    """Axes of which both all ranks of context parallelism and the innermost `inner` of them are some."""
    made: dict[str, int] = {}
    for name, size in sizes.items():
        made[name] = size // inner if name == CONTEXT else size
        if name == CONTEXT:
            made[WITHIN_CONTEXT] = inner
    return made


def axes_with_experts(sizes: Mapping[str, int], experts: int, tensor: int) -> dict[str, int]:
    """Axes of which both the groups of dense layers and those of experts are some.

    Both number the same ranks: the first by `sizes`, the others with `tensor` ranks of an expert innermost and
    then `experts` of expert parallelism. An axis that a group of experts takes a part of is two: of "dp", the
    inner part is "ep"; of another, it is named after both ("tp_ep").

    Args:
        sizes: of the axes of dense layers, outermost first.
        experts: ranks over which experts are divided.
        tensor: ranks over which an expert is.
    """
    made: dict[str, int] = {}
    low = 1
    for name, size in reversed(list(sizes.items())):
        high = low * size
        cuts = sorted({low, high, *(cut for cut in (tensor, tensor * experts) if low < cut < high)})
        for begin, end in pairwise(cuts):
            of_experts = tensor <= begin and end <= tensor * experts
            whole = len(cuts) == 2 and name != "dp"
            made[name if whole or not of_experts else "ep" if name == "dp" else f"{name}_ep"] = end // begin
        made.setdefault(name, 1)
        low = high
    return dict(reversed(made.items()))


def _noted(recorder: ScriptRecorder, original: Callable[..., None]) -> Callable[..., None]:
    def init(*args: Any, **named: Any) -> None:
        recorder.note(
            "Transformer Engine is not installed: layers of PyTorch's operators stand in for its, with its shapes "
            "and collectives, and without user buffers and kernels that do several things at once"
        )
        if is_flash_alone():
            recorder.attention = "flash2"
        elif is_one_kernel() and str(named.get("attn_mask_type", "")).startswith("padding"):
            recorder.note(PACKS)
        in_order = torch.are_deterministic_algorithms_enabled()
        if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0" and not in_order:
            recorder.note(
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 without deterministic algorithms of PyTorch: attention's "
                "backward pass, which then adds in one order, is taken to be as fast as without"
            )
        original(*args, **named)

    return init


_IN_FP8 = "FP8: the casts and products of Transformer Engine, without what single scales take"
_MAMBA = "mamba_ssm is not installed: one operation each stands for its convolution, its scan and its norm"
_MUON = "emerging_optimizers is not installed: operators of PyTorch stand in for its Muon"


def _said(recorder: ScriptRecorder, original: Callable[..., None], line: str) -> Callable[..., None]:
    def init(*args: Any, **named: Any) -> None:
        recorder.note(line)
        original(*args, **named)

    return init


_STREAMS, _WORKSPACE = 4, 32 * 2**20 + 1024


def _working(recorder: ScriptRecorder, original: Callable[..., None], workspaces: int) -> Callable[..., None]:
    """Transformer Engine has a workspace for all its products, and one for each stream of its grouped ones.

    Their sizes are those on the GPU that a capture shows, a Hopper (get_cublas_workspace of its
    pytorch/cpp_extensions/gemm.py, nvte_get_num_compute_streams of common/util/multi_stream.cpp).
    """

    def init(*args: Any, **named: Any) -> None:
        before = recorder.held.get("transformer_engine", 0)
        recorder.held["transformer_engine"] = max(before, workspaces * _WORKSPACE)
        original(*args, **named)

    return init


def _places() -> tuple[str, ...]:
    """Folders of Megatron, beside the script where that is a checkout's: what lies there is no script's own."""
    found = find_spec("megatron")
    return tuple(found.submodule_search_locations or ()) if found else ()


def _config() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig


def _graphs_taken(recorder: ScriptRecorder, original: Callable[..., None]) -> Callable[..., None]:
    def check(config: Any) -> None:
        original(config)
        graphs.taken(config, recorder.graphs, recorder.note)

    return check


def _forget_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
