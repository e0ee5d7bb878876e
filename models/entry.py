"""What the zoo knows of a model, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["causal-lm", "masked-lm", "seq2seq", "image-classification"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model: an architecture, its configuration and where the facts come from.

    Attributes:
        name: the one name under which the zoo lists it.
        aliases: other accepted names, public checkpoint names among them; case does not matter.
        family: what it is grouped with.
        architecture: a `transformers` class, or a module of the zoo's own (`echograph.models.build.OWN`).
        kind: which training task its head, inputs and loss belong to.
        config: keyword arguments of the architecture's configuration, under their public names.
        source: where the configuration is published; says so where a value is assumed.
        default_batch_size: samples of a micro-batch where the user names none (a working choice, not a fact).
        default_seq_len: tokens of a sample, or the side of a square image in pixels.
        parameters: exact count of the training module's parameters, shared ones counted once; None where the
            entry was read from a user's configuration.
        forward_flops: of one sample at the default length, as captured; None where `dense_flops` has a closed
            form.
        backward_flops: the same of the backward pass.
        published_parameters: the count its publication or model card states, rounded as it is there.
    """

    name: str
    family: str
    architecture: str
    kind: Kind
    source: str
    default_batch_size: int
    default_seq_len: int
    config: Mapping[str, Any] = field(hash=False)
    aliases: tuple[str, ...] = ()
    parameters: int | None = None
    published_parameters: int | None = None
    forward_flops: int | None = None
    backward_flops: int | None = None

    def with_config(self, **changes: Any) -> ModelEntry:
        """The same architecture with other configuration values (fewer layers, say); its counts are unknown.

        Args:
            changes: configuration keys and their new values.
        """
        return replace(
            self,
            config={**self.config, **changes},
            aliases=(),
            parameters=None,
            published_parameters=None,
            forward_flops=None,
            backward_flops=None,
        )
