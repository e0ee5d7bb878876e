"""Settings that a capture does not follow are refused in one line; others pass."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
if find_spec("megatron") is None:
    pytest.skip("needs the [megatron] extra", allow_module_level=True)

from echograph.errors import CaptureError
from echograph.frontend.megatron.patches import in_place
from echograph.frontend.megatron.settings import CHECKED, REFUSALS

pytestmark = pytest.mark.torch


def config(**settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **settings)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cuda_graph_impl", "local"),
        ("cpu_offloading", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("tp_comm_overlap", True),
        ("fp8", "hybrid"),
        ("moe_token_dispatcher_type", "flex"),
    ],
)
def test_what_is_not_followed_is_one_line(setting: str, value: Any) -> None:
    option = next(refusal.option for refusal in REFUSALS if refusal.setting == setting)
    with in_place(CHECKED), pytest.raises(CaptureError) as raised:
        config(**{setting: value})
    assert str(raised.value).startswith(option)
    assert "\n" not in str(raised.value)


def test_what_is_followed_passes() -> None:
    with in_place(CHECKED):
        assert config().cuda_graph_impl == "none"
        assert config(moe_token_dispatcher_type="alltoall").num_layers == 2


def test_megatrons_fsdp_is_refused_as_well() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    with in_place(CHECKED), pytest.raises(CaptureError, match="--use-megatron-fsdp"):
        DistributedDataParallelConfig(use_megatron_fsdp=True)
