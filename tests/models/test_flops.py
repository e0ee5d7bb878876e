"""The closed form of a step's FLOPs against what torch counts operator by operator."""

from __future__ import annotations

import pytest

from echograph.errors import UsageError
from echograph.models import build, dense_flops, get_model, model_entries

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers")
DENSE = [
    *("bert-base-uncased", "roberta-base", "distilbert-base-uncased", "gpt2", "gpt3-1.3b", "megatron-gpt-1.7b"),
    *("opt-125m", "opt-350m", "bloom-7b1", "mpt-7b", "llama-2-70b", "llama-3-8b", "mistral-7b", "qwen2.5-0.5b"),
    *("qwen3-0.6b", "phi-2", "phi-4", "gemma-2b", "gemma-2-9b"),
]


def counted(entry, batch_size: int, seq_len: int, attention: str) -> tuple[int, int]:
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def forward(query, key, value, *_, **__) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(gradient, query, key, value, *_, **__) -> int:
        return sdpa_backward_flop_count(gradient, query, key, value)

    # torch's table has the GPU kernels of attention and leaves the CPU's out.
    mapping = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    module, inputs, loss = build(entry, batch_size=batch_size, seq_len=seq_len, attention=attention)
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        value = loss(module(**inputs))
        first = counter.get_total_flops()
        value.backward()
    return first, counter.get_total_flops() - first


@pytest.mark.parametrize("name", DENSE)
def test_the_closed_form_is_within_a_hundredth_of_torchs_count(name: str, fake) -> None:
    entry = get_model(name)
    layers = next(key for key in LAYER_KEYS if key in entry.config)
    entry = entry.with_config(**{layers: 2})
    with fake():
        forward, backward = counted(entry, 2, 256, "eager")
    assert dense_flops(entry, 2, 256, fused_attention=False) == pytest.approx((forward, backward), rel=0.01)


@pytest.mark.parametrize("name", ["opt-1.3b", "llama-3-8b", "phi-2"])
def test_fused_attention_counts_its_recomputed_scores(name: str, fake) -> None:
    entry = get_model(name).with_config(num_hidden_layers=2)
    with fake():
        forward, backward = counted(entry, 1, 2048, "sdpa")
    assert dense_flops(entry, 1, 2048) == pytest.approx((forward, backward), rel=0.01)


def test_a_long_known_step_agrees() -> None:
    """Narayanan et al. 2021, equation 3, without recomputation: 72 B s l h^2 (1 + s / 6h + V / 12 l h)."""
    for entry in model_entries():
        if entry.family == "megatron-gpt":
            width, layers, vocabulary = (entry.config[key] for key in ("n_embd", "n_layer", "vocab_size"))
            published = (
                72 * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + vocabulary / (12 * layers * width))
            )
            assert sum(dense_flops(entry, 1, 2048, fused_attention=False)) == pytest.approx(published, rel=1e-9)


def test_an_architecture_without_a_closed_form_says_so() -> None:
    with pytest.raises(UsageError, match="MixtralForCausalLM has no closed form"):
        dense_flops(get_model("mixtral-8x7b"), 1, 2048)


def test_every_entry_knows_its_flops() -> None:
    for entry in model_entries():
        if entry.forward_flops is None:
            assert dense_flops(entry, 1, entry.default_seq_len).forward > 0
        else:
            assert entry.backward_flops is not None
            with pytest.raises(UsageError):
                dense_flops(entry, 1, entry.default_seq_len)


@pytest.mark.parametrize(
    "name",
    ["resnet-50", "vgg-19", "vit-b-16"]
    + [
        pytest.param(n, marks=pytest.mark.slow)
        for n in ("t5-base", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b", "resnet-152")
    ],
)
def test_stored_flops_are_those_of_the_capture(name: str) -> None:
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.workflow.compile import compile_entry
    from echograph.workflow.summary import summarize

    entry = get_model(name)
    flops = summarize(compile_entry(entry, StepSpec(), batch_size=1))["flops"]
    assert (flops["forward"], flops["backward"]) == (entry.forward_flops, entry.backward_flops)
