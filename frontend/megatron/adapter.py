"""Megatron scripts for `echoc capture megatron`: shims, seams, the mesh of `parallel_state`, one rank a stage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from echograph.frontend.megatron import checkout
from echograph.frontend.megatron.patches import DISTRIBUTION, TESTED, in_place
from echograph.frontend.megatron.seams import seams
from echograph.frontend.megatron.shims import shimmed
from echograph.frontend.scripts.torch_adapter import TorchAdapter

if TYPE_CHECKING:
    from echograph.frontend.scripts.recorder import ScriptRecorder
    from echograph.frontend.scripts.world import World


class MegatronAdapter(TorchAdapter):
    """megatron-core, and scripts written with it."""

    name: ClassVar[str] = "megatron"
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "megatron": "megatron"}
    tested: ClassVar[Mapping[str, tuple[str, str]]] = {DISTRIBUTION: TESTED}
    counts_optimizer_steps: ClassVar[bool] = False

    @contextmanager
    def installed(self, world: World, recorder: ScriptRecorder) -> Iterator[None]:
        """Shims and seams of megatron-core, around those of plain PyTorch."""
        # Scripts that launch Megatron-LM set it, and it refuses to go on without; the world restores what was.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        with (
            shimmed(),
            super().installed(world, recorder),
            in_place((*checkout.LEFT_OUT, *seams(recorder, lambda: recorder.is_early))),
        ):
            try:
                yield
            finally:
                _forget_groups()

    def axes(self, world: World) -> Mapping[str, int] | None:
        """The mesh in Megatron's order of ranks (tensor parallel innermost, pipeline outermost).

        Experts are divided over ranks that are data-parallel for everything else: that axis is then two, "dp" and
        "ep".
        """
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            return None
        experts = state.get_expert_model_parallel_world_size() or 1
        replicas = state.get_data_parallel_world_size()
        sizes = {
            "pp": state.get_pipeline_model_parallel_world_size(),
            "dp": replicas,
            "cp": state.get_context_parallel_world_size(),
            "tp": state.get_tensor_model_parallel_world_size(),
        }
        if experts > 1 and replicas % experts == 0 and sizes["cp"] == 1:
            sizes = {"pp": sizes["pp"], "dp": replicas // experts, "ep": experts, "tp": sizes["tp"]}
        return sizes


def _forget_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
