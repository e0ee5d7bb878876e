"""Settings of megatron-core that change kernels, memory or order, and that a capture does not follow.

Each is refused in one line as soon as a model's settings are made: followed in part, it would give another step
than the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echograph.errors import CaptureError
from echograph.frontend.megatron.patches import Patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A setting that is not followed.

    Attributes:
        setting: of `TransformerConfig`; one that a version does not have is not asked for.
        followed: its values that are.
        option: of Megatron-LM, that sets it.
        reason: why it is not.
    """

    setting: str
    followed: tuple[Any, ...] = (None, False)
    option: str
    reason: str


_HOST = "a capture has one memory, and not the host's beside the GPU's"
_ENGINE = "its kernels are Transformer Engine's, which a capture does not run"

REFUSALS = (
    Refusal(
        setting="fine_grained_activation_offloading",
        option="--fine-grained-activation-offloading",
        reason=_HOST,
    ),
    Refusal(setting="cpu_offloading", option="--cpu-offloading-num-layers", reason=_HOST),
    Refusal(
        setting="tp_comm_overlap",
        option="--tp-comm-overlap",
        reason="products in parts beside their communication are kernels that a capture does not run",
    ),
    Refusal(setting="symmetric_ar_type", option="--symmetric-ar-type", reason=_ENGINE),
    Refusal(setting="fp8", followed=(None, False, "e4m3", "hybrid"), option="--fp8-format", reason=_ENGINE),
    Refusal(setting="fp4", option="--fp4-format", reason=_ENGINE),
    Refusal(setting="quant_recipe", option="--te-precision-config-file", reason=_ENGINE),
    Refusal(setting="use_transformer_engine_op_fuser", option="--use-transformer-engine-op-fuser", reason=_ENGINE),
    Refusal(
        setting="moe_flex_dispatcher_backend",
        followed=(None, "deepep", "hybridep"),
        option="--moe-flex-dispatcher-backend",
        reason="it takes memory that ranks share: give hybridep in place of it",
    ),
)


_SHARDED = (
    Refusal(
        setting="use_megatron_fsdp",
        option="--use-megatron-fsdp",
        reason="a capture does not know where Megatron's FSDP gathers what, nor its buffers",
    ),
)


def _checking(refusals: Sequence[Refusal]) -> Callable[[Any], Any]:
    def around(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def check(config: Any) -> None:
            for refusal in refusals:
                value = getattr(config, refusal.setting, None)
                if value not in refusal.followed:
                    given = "" if value is True else f" {value}"
                    remedy = "" if "give" in refusal.reason else ": leave it out"
                    raise CaptureError(f"{refusal.option}{given}: {refusal.reason}{remedy}")
            original(config)

        return check

    return around


CHECKED = tuple(
    Patch(
        where=f"megatron.core.{where}.__post_init__",
        reason="settings that a capture does not follow are refused before anything is built",
        around=_checking(refusals),
    )
    for where, refusals in (
        ("transformer.transformer_config:TransformerConfig", REFUSALS),
        ("distributed.distributed_data_parallel_config:DistributedDataParallelConfig", _SHARDED),
    )
)
"""What refuses them."""
