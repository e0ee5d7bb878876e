"""From an entry to the training module, its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from echograph.errors import EchoError, InputError, UsageError
from echograph.models.catalog import ModelEntry, require_transformers
from echograph.registry import Table

if TYPE_CHECKING:
    import torch

OWN = Table("model architecture", {"Vgg": "echograph.models.vgg:vgg"})
"""Architectures that transformers does not have: name -> a function of the configuration's keys returning
the module."""

ATTENTIONS = ("sdpa", "fused", "eager", "fused-softmax")


class Built(NamedTuple):
    """A training step's parts: `loss(module(**inputs))` is the scalar to call `backward` on.

    Attributes:
        module: the model in train mode, parameters in the caller's default dtype on the caller's default
            device.
        inputs: keyword tensors of one micro-batch, labels among them.
        loss: the scalar loss in the module's output.
    """

    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    loss: Callable[[Any], torch.Tensor]


def build(
    entry: ModelEntry,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
) -> Built:
    """Builds the module, one micro-batch of inputs and the loss, without weights, network or remote code.

    Everything is made by plain torch factory calls, so it lands in whatever FakeTensorMode, default device
    and default dtype the caller has entered. Set the dtype there: torch 2.13 cannot convert a module whose
    parameters are fake, and its grouped product of experts accepts fake operands in bfloat16 alone. Weights
    are initialised only where they are real (neither fake nor meta).

    Inputs hold no attention mask: training packs every sequence full. Token ids count up and wrap around;
    every position is labelled, which costs what a masked-out label costs. Images are in the default dtype,
    as the weights.

    Args:
        entry: the model.
        batch_size: samples of the micro-batch; the entry's default if None.
        seq_len: tokens a sample, or the image side in pixels; if None the entry's default, or as many as the
            module has positions for. A
            sequence-to-sequence model gets that many encoder tokens, and the decoder tokens that span
            corruption leaves of them.
        attention: `sdpa` (one fused operation), `fused` (the same where the architecture asks more of it than
            PyTorch's has, as sinks, which are left out), `eager` (matrix products, scale, mask and softmax) or
            `fused-softmax` (matrix products around one kernel for scale, mask and softmax); None takes `sdpa`
            where the architecture has it and `eager` where not (BLOOM, MPT, Gemma 2, gpt-oss).

    Raises:
        UsageError: a size is not positive, the sequence is longer than the model's positions, or the
            attention is not one the architecture has.
        InputError: the architecture rejects the configuration, or what it takes is not known here.
        MissingExtraError: torch or transformers is not installed.
    """
    batch = entry.default_batch_size if batch_size is None else batch_size
    length = entry.default_seq_len if seq_len is None else seq_len
    if batch < 1 or length < 1:
        raise UsageError(f"model {entry.name}: batch size {batch} and length {length} must be at least 1")
    require_transformers()
    from echograph.models.inputs import training_inputs
    from echograph.models.transformers_model import learned_positions

    module = _module(entry, length, attention)
    limit = learned_positions(entry, module) or length
    if length > limit and seq_len is not None:
        raise UsageError(f"model {entry.name}: {length} tokens exceed its {limit} learned positions")
    module.train()
    loss = _mean_square if entry.kind == "features" else _loss
    try:
        inputs = training_inputs(entry, module, batch, min(length, limit))
    except EchoError:
        raise
    except Exception as error:  # a configuration that lacks what others of its kind have
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise InputError(
            f"model {entry.name}: what {entry.architecture} takes is not known here: {reason}"
        ) from error
    return Built(module, inputs, loss)


def parameter_count(entry: ModelEntry) -> int:
    """Exact number of parameters of the training module, shared ones counted once.

    Counted on the meta device, all layers built: seconds for the largest.

    Raises:
        InputError: the architecture rejects the configuration.
        MissingExtraError: torch or transformers is not installed.
    """
    require_transformers()
    import torch

    with torch.device("meta"):
        module = _module(entry, entry.default_seq_len, None)
    return sum(parameter.numel() for parameter in module.parameters())


def _module(entry: ModelEntry, seq_len: int, attention: str | None) -> torch.nn.Module:
    if attention not in (None, *ATTENTIONS):
        raise UsageError(f"model {entry.name}: attention '{attention}': choose {', '.join(ATTENTIONS)}")
    if entry.architecture in OWN:
        module: torch.nn.Module = OWN[entry.architecture](entry.config)
        return module
    from echograph.models.transformers_model import transformers_model

    return transformers_model(entry, seq_len, attention)


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def _mean_square(output: Any) -> torch.Tensor:
    features: torch.Tensor = output.last_hidden_state
    return features.float().square().mean()
