"""What scripts of Megatron-LM do before they train, and a capture leaves out: they compile, and index their data.

A capture needs the shapes of samples, and neither their values nor the files they are in, which are where the job
runs. `LEFT_OUT` is for captures alone: on real ranks kernels are compiled and data are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from echograph.errors import CaptureError
from echograph.frontend.megatron.patches import Patch

_EPOCH = 1 << 31


class TokenSamples(Dataset[dict[str, Tensor]]):
    """Sequences of tokens, in the shapes in which a `GPTDataset` gives them.

    Args:
        config: a `GPTDatasetConfig`.
        split: of which `megatron.core.datasets.utils.Split`.
        size: samples; None: those of an epoch, more than any run takes.
    """

    def __init__(self, config: Any, split: Any, size: int | None) -> None:
        self.config, self.index_split, self._size = config, split, _EPOCH if size is None else size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, _: int) -> dict[str, Tensor]:
        length = self.config.sequence_length
        sample = {name: torch.zeros(length, dtype=torch.int64) for name in ("tokens", "labels")}
        if self.config.create_attention_mask:
            sample["attention_mask"] = torch.zeros(1, length, length, dtype=torch.bool)
        sample["loss_mask"] = torch.ones(length)
        sample["position_ids"] = torch.arange(length)
        return sample


def _build(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Builds samples without data for each split; kinds of data other than tokens of a GPT are refused."""

    def build(builder: Any) -> list[Any]:
        from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
        from megatron.core.datasets.utils import Split

        plain = builder.cls in (GPTDataset, MockGPTDataset) or builder.cls.__getitem__ is GPTDataset.__getitem__
        if not plain:
            if builder.config.mock:
                return original(builder)  # type: ignore[no-any-return]
            raise CaptureError(
                f"{builder.cls.__name__}: a capture has samples of GPTDataset's shapes alone: leave out what "
                "chooses another dataset"
            )
        if not builder.is_built_on_rank():
            return [None] * len(Split)
        return [TokenSamples(builder.config, split, builder.sizes[split.value]) for split in Split]

    return build


def _unrejected(original: Callable[..., None]) -> Callable[..., None]:
    """Looks for values that are no numbers as the script asks, and finds none."""

    def validate(machine: Any, result: Any, rejection_func: Callable[..., Any], *args: Any, **named: Any) -> Any:
        def reject(value: Any) -> bool:
            if rejection_func in (torch.isnan, torch.isinf):
                rejection_func(value)
            return False

        original(machine, result, reject, *args, **named)

    return validate


LEFT_OUT: tuple[Patch, ...] = (
    Patch(
        where="megatron.core.datasets.utils:compile_helpers",
        reason="it compiles what indexes samples, which are not there",
        around=lambda _: lambda: None,
    ),
    Patch(
        where="megatron.legacy.fused_kernels:load",
        reason="it asks CUDA's compiler for its version",
        around=lambda _: lambda _: None,
        optional=True,
    ),
    Patch(
        where="megatron.training.training:checkpoint_and_decide_exit",
        reason="ranks agree on signals and times to end at, which only values tell; a capture ends after its step",
        around=lambda _: lambda *_, **__: False,
        optional=True,
    ),
    Patch(
        where="megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
        reason="a step is run again where its loss is no number, which only values tell",
        around=_unrejected,
    ),
    Patch(
        where="megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.build",
        reason="samples are in files of the machines that train; shapes are what a capture needs of them",
        around=_build,
    ),
)
"""What is not done in a capture."""
