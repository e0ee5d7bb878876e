"""Settings that a capture does not follow are refused in one line; others pass."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
if find_spec("megatron") is None:
    pytest.skip("needs the [megatron] extra", allow_module_level=True)

from echograph.errors import CaptureError
from echograph.frontend.megatron import graphs
from echograph.frontend.megatron.patches import in_place
from echograph.frontend.megatron.settings import CHECKED, REFUSALS

pytestmark = pytest.mark.torch


def config(**settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **settings)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cpu_offloading", True),
        ("tp_comm_overlap", True),
        ("symmetric_ar_type", "one_shot"),
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
        assert config(fp8="hybrid").fp8 == "hybrid"


def test_cuda_graphs_are_told_and_not_made() -> None:
    told: list[Any] = []
    notes: list[str] = []
    made = config(cuda_graph_impl="local")
    graphs.taken(made, told.append, notes.append)
    assert made.cuda_graph_impl == "none" and len(notes) == 1
    (graph_of,) = told
    assert graph_of("module.decoder.layers.3.mlp.linear_fc1") == "module.decoder.layers.3 layer"
    assert graph_of("module.decoder.final_layernorm") == ""
    graphs.taken(config(), told.append, notes.append)
    assert len(told) == len(notes) == 1


@pytest.mark.parametrize(
    ("impl", "parts", "module", "graph"),
    [
        ("full_iteration", [], "module.embedding", "step"),
        ("transformer_engine", ["attn"], "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0 attn"),
        ("transformer_engine", ["attn"], "decoder.layers.0.mlp.linear_fc1", ""),
        ("transformer_engine", ["moe_router", "moe_preprocess"], "layers.12.mlp.router", "layers.12 moe_router"),
        ("transformer_engine", ["moe_router"], "layers.12.mlp.experts.linear_fc1", ""),
    ],
)
def test_parts_of_layers_have_graphs_of_their_own(impl: str, parts: list[str], module: str, graph: str) -> None:
    assert graphs.graph_of(impl, parts)(module) == graph


def test_an_unknown_part_names_those_there_are() -> None:
    with pytest.raises(CaptureError, match=r"--cuda-graph-modules half: a capture knows attn, mlp"):
        graphs.graph_of("local", ["half"])


def test_megatrons_fsdp_is_refused_as_well() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    with in_place(CHECKED), pytest.raises(CaptureError, match="--use-megatron-fsdp"):
        DistributedDataParallelConfig(use_megatron_fsdp=True)
