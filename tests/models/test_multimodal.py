"""Models that see or hear: their inputs fit them, real and fake steps are the same, and they lower."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

import torch

from echograph.errors import InputError, UsageError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.models import build, from_config, multimodal, parameter_count
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.system import System

pytestmark = pytest.mark.torch

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
TEXT = {**LAYERS, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 128}
TOWER = {**LAYERS, "image_size": 32, "patch_size": 8}
QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 32,
    "patch_size": 56,
}
HEARS = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    **{"conv_dim": [16, 16], "conv_kernel": [10, 10], "conv_stride": [40, 40], "num_feat_extract_layers": 2},
    **{
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "vocab_size": 32,
        "apply_spec_augment": False,
    },
}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **TOWER},
        "image_token_index": 90,
        "vision_feature_layer": -2,
    },
    "llava_next": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **TOWER},
        "image_token_index": 90,
        "image_grid_pinpoints": [[32, 64], [64, 32]],
    },
    "voxtral": {
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {**LAYERS, "num_mel_bins": 8, "max_source_positions": 16},
        "audio_token_id": 90,
    },
    "glmasr": {
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {**LAYERS, "num_mel_bins": 8, "max_position_embeddings": 16},
        "audio_token_id": 90,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
    },
    "idefics3": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": TOWER,
        "image_token_id": 90,
        "scale_factor": 2,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 16},
        "image_token_index": 3,
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {
            **TEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
        },
        "vision_config": QWEN_TOWER,
        **{"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
    },
    "mllama": {
        "architectures": ["MllamaForConditionalGeneration"],
        "text_config": {
            **TEXT,
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "model_type": "mllama_text_model",
            **MARKS,
        },
        "vision_config": {
            **{
                "model_type": "mllama_vision_model",
                "hidden_size": 32,
                "attention_heads": 2,
                "num_hidden_layers": 2,
            },
            **{
                "num_global_layers": 1,
                "intermediate_size": 64,
                "image_size": 28,
                "patch_size": 14,
                "max_num_tiles": 2,
            },
            **{
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
        },
        "image_token_index": 95,
    },
    "clip": {"text_config": {**LAYERS, "vocab_size": 96}, "vision_config": TOWER, "projection_dim": 16},
    "siglip": {"text_config": {**LAYERS, "vocab_size": 96}, "vision_config": TOWER},
    "whisper": {
        **{
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "vocab_size": 96,
        },
        **{"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 20},
        **{
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
            "num_mel_bins": 8,
        },
    },
    "wav2vec2": {"architectures": ["Wav2Vec2ForCTC"], **HEARS},
    "vit_mae": {
        **{**TOWER, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2},
        **{"architectures": ["ViTMAEForPreTraining"], "decoder_intermediate_size": 64},
    },
    "dinov3_vit": {"architectures": ["DINOv3ViTModel"], **TOWER},
}
LENGTH = {"clip": 32, "siglip": 32, "vit_mae": 32, "dinov3_vit": 32, "whisper": 16, "wav2vec2": 16}
"""Pixels of a side, or tokens; 64 tokens where none is given."""


def entry_of(kind: str):
    return from_config({"model_type": kind, **CONFIGURATIONS[kind]})


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_real_step_runs_on_the_inputs(kind: str) -> None:
    """The library checks itself that as many tokens stand for an image as its tower gives."""
    entry = entry_of(kind)
    module, inputs, loss = build(entry, batch_size=2, seq_len=LENGTH.get(kind, 64))
    torch.manual_seed(0)
    value = loss(module(**inputs))
    value.backward()
    assert value.isfinite()
    assert sum(parameter.numel() for parameter in module.parameters()) == parameter_count(entry)
    reached = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    towers = ("vision", "visual") if "vision_config" in CONFIGURATIONS[kind] else ("",)
    assert any(tower in name for name in reached for tower in towers)


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_fake_and_real_steps_have_the_same_products(kind: str) -> None:
    entry = entry_of(kind)
    graph = compile_entry(entry, StepSpec(dtype="fp32"), batch_size=2, seq_len=LENGTH.get(kind, 64))
    module, inputs, loss = build(entry, batch_size=2, seq_len=LENGTH.get(kind, 64))
    with torch.autograd.profiler.profile() as trace:
        loss(module(**inputs)).backward()
    ran = Counter(event.name for event in trace.function_events)
    kept = Counter[str]()
    for block in graph.blocks:
        for row in block.ops:
            kept[graph.strings[graph.ops.name[row]]] += len(block.instances)
    for product in ("aten::mm", "aten::addmm", "aten::convolution_backward"):
        assert kept[product.replace("::", ".")] == ran[product]


@pytest.mark.parametrize(
    "kind",
    [
        "llava",
        "whisper",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2_5_vl", "vit_mae", "clip", "dinov3_vit")),
    ],
)
def test_it_lowers_and_runs_in_two_stages_of_two_ranks(kind: str) -> None:
    graph = compile_entry(entry_of(kind), StepSpec(), batch_size=2, seq_len=LENGTH.get(kind, 64))
    result, _ = predict(graph, Plan(gpus=8, tp=2, pp=2, zero=1), System("dgx-h100"))
    assert result.step_ps > 0


def test_the_text_is_counted_up_between_tokens_that_stand_for_something() -> None:
    config: Any = build(entry_of("mistral3"), batch_size=1, seq_len=64).module.config
    ids = multimodal.text_ids(config, 2, 100).unique().tolist()
    assert ids == list(range(4, 96))  # 3 is the image


def test_an_image_larger_than_the_text_is_refused() -> None:
    with pytest.raises(UsageError, match="16 tokens do not hold an image of 16 tokens"):
        build(entry_of("llava"), batch_size=1, seq_len=16)


def test_images_that_nobody_can_feed_are_one_line() -> None:
    """Features of a layer that the tower does not have."""
    config = {"model_type": "llava", **CONFIGURATIONS["llava"], "vision_feature_layer": 9}
    with pytest.raises(InputError, match="vision tower does not run without data"):
        compile_entry(from_config(config), StepSpec(), batch_size=1, seq_len=64)


def test_what_no_input_reaches_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Whose images nobody here makes, and whose text is a model of its own."""
    phi = {
        **{"model_type": "phi4_multimodal", **TEXT, "pad_token_id": 0, "tie_word_embeddings": True},
        **{"vision_config": {**TOWER, "crop_size": 32}, "audio_config": {"num_blocks": 1}},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
    compile_entry(from_config(phi), StepSpec(), batch_size=1, seq_len=64)
    assert "parameters get no gradient, and are not counted: model.embed_tokens_extend" in caplog.text


def test_a_model_without_a_loss_is_said_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    compile_entry(entry_of("dinov3_vit"), StepSpec(), batch_size=1, seq_len=32)
    assert "the mean square of its output stands for one" in caplog.text
