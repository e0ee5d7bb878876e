"""Multi-token prediction: modules behind a language model's layers that each predict a token further on.

A module takes what the layers made of a position and the embedding of the token after it, each normalised, joins
them by a linear layer, and runs layers like the model's last ones; the model's own head gives the logits of the
token after that (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2). Its loss is added to the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from echograph.errors import PlanError, UsageError

LOSS_SHARE = 0.1
"""What a further token's loss counts beside the model's; it costs the same whatever it is."""
_NORMS = ("norm", "norm_f")


class FurtherToken(nn.Module):
    """What predicts one token further.

    Args:
        width: of the hidden states.
        norm: makes a norm of that width.
        layers: of its own.
    """

    def __init__(self, width: int, norm: Callable[[int], nn.Module], layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.final_layernorm = (norm(width) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, given: list[tuple[Any, Any]]) -> Any:
        """The hidden states of the next depth, before and after their norm.

        Args:
            hidden: [batch, sequence, width], of the depth before.
            embedded: of the tokens that come next.
            given: what the model gave its layers beside hidden states.
        """
        hidden = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        for layer, (args, kwargs) in zip(self.layers, given, strict=True):
            hidden = layer(hidden, *args, **kwargs)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden, self.final_layernorm(hidden)


def add_further_tokens(model: Any, depths: int, repeated: bool) -> None:
    """Makes a causal language model of transformers predict further tokens, too.

    Args:
        model: changed in place: it gets modules, and a loss with theirs.
        depths: tokens further on.
        repeated: whether one module does all of it, with the same weights.

    Raises:
        UsageError: it is no decoder with layers, a last norm and a head.
        PlanError: it lacks a layer of a kind that its configuration wants there.
    """
    base, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    layers = getattr(base, "layers", None)
    norm = next((getattr(base, name) for name in _NORMS if hasattr(base, name)), None)
    if base is None or head is None or norm is None or not layers:
        raise UsageError(f"--mtp-num-layers: {type(model).__name__} has no layers, last norm and head of its own")
    config, places = model.config, _places(model.config, len(layers))
    model.mtp = nn.ModuleList(
        FurtherToken(config.hidden_size, type(norm), [type(layers[at])(config, at) for at in places])
        for _ in range(1 if repeated else depths)
    )
    _Hooks(model, [layers[at] for at in places], depths).install(base)


def _places(config: Any, depth: int) -> list[int]:
    """Which layers those of further tokens are like: the last one, or the last of each kind that is asked for."""
    kinds, of = getattr(config, "mtp_layers_block_type", None), getattr(config, "layers_block_type", None)
    if not kinds or not of:
        return [depth - 1]
    missing = set(kinds) - set(of)
    if missing:
        raise PlanError(f"multi-token prediction: no layer is a {min(missing)}: build the model deeper")
    return [max(at for at, kind in enumerate(of) if kind == wanted) for wanted in kinds]


class _Hooks:
    """What the model is asked on its way, and the losses that are added to its own.

    Args:
        model: with its `mtp`.
        like: the layers whose arguments those of further tokens get.
        depths: tokens further on.
    """

    def __init__(self, model: Any, like: list[nn.Module], depths: int) -> None:
        self.model, self.like, self.depths = model, like, depths
        self.given: dict[nn.Module, tuple[Any, Any]] = {}
        self.hidden: Any = None

    def install(self, base: nn.Module) -> None:
        """Registers the hooks."""
        for layer in self.like:
            layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
        base.register_forward_hook(self._leave_base)
        self.model.register_forward_hook(self._leave, with_kwargs=True)

    def _enter_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self.given[layer] = args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}

    def _leave_base(self, base: nn.Module, args: Any, output: Any) -> None:
        self.hidden = output[0]

    def _leave(self, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
        tokens, labels = kwargs["input_ids"], kwargs["labels"]
        hidden, given = self.hidden, [self.given[layer] for layer in self.like]
        for depth in range(self.depths):
            tokens, labels = (torch.roll(ids, -1, dims=1) for ids in (tokens, labels))
            embedded = model.get_input_embeddings()(tokens)
            hidden, normed = model.mtp[min(depth, len(model.mtp) - 1)](hidden, embedded, given)
            logits = model.lm_head(normed)
            loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)
            output.loss = output.loss + LOSS_SHARE * loss
        self.hidden, self.given = None, {}
        return output
