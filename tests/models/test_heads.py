"""Heads beside language modelling: a real step runs on the inputs that their configurations ask for."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

import torch

from echograph.errors import InputError
from echograph.models import build, from_config

pytestmark = pytest.mark.torch

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BERT = {"model_type": "bert", "vocab_size": 96, "max_position_embeddings": 16, **SIZES}
LLAMA = {"model_type": "llama", "vocab_size": 96, "max_position_embeddings": 16, **SIZES}
IMAGES = {"image_size": 32, "patch_size": 16, "num_channels": 3}
LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
SOUND = {"num_mel_bins": 16, "max_length": 32, "patch_size": 16, "frequency_stride": 16, "time_stride": 16}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}
QWEN = {
    **{"model_type": "qwen3_5_moe_text", "vocab_size": 96, "max_position_embeddings": 16, **SIZES},
    **{"num_key_value_heads": 1, "head_dim": 16, "layer_types": ["full_attention"] * 2, "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
HEADS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "BertForSequenceClassification": ({**BERT, **LABELS}, {"input_ids": (2, 16), "labels": (2,)}),
    "LlamaForSequenceClassification": (
        {**LLAMA, **LABELS, "pad_token_id": 0},
        {"input_ids": (2, 16), "labels": (2,)},
    ),
    "BertForTokenClassification": ({**BERT, **LABELS}, {"input_ids": (2, 16), "labels": (2, 16)}),
    "BertForQuestionAnswering": (BERT, {"input_ids": (2, 16), "start_positions": (2,), "end_positions": (2,)}),
    "ASTForAudioClassification": (
        {"model_type": "audio-spectrogram-transformer", **SIZES, **SOUND, **LABELS},
        {"input_values": (2, 32, 16), "labels": (2,)},
    ),
    "TimesformerForVideoClassification": (
        {"model_type": "timesformer", **SIZES, **IMAGES, **LABELS, "num_frames": 2},
        {"pixel_values": (2, 2, 3, 32, 32), "labels": (2,)},
    ),
    "VJEPA2ForVideoClassification": (
        {"model_type": "vjepa2", **SIZES, **LABELS, "frames_per_clip": 2, "crop_size": 32, "image_size": 32,
         "pred_hidden_size": 32, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1,
         "num_pooler_layers": 1},
        {"pixel_values_videos": (2, 2, 3, 32, 32), "labels": (2,)},
    ),
    "SegformerForSemanticSegmentation": (
        {"model_type": "segformer", **SEGFORMER, **LABELS, "image_size": 32},
        {"pixel_values": (2, 3, 32, 32), "labels": (2, 32, 32)},
    ),
    "GitForCausalLM": (
        {**BERT, "model_type": "git", "vision_config": {**SIZES, **IMAGES}},
        {"input_ids": (2, 16), "labels": (2, 16), "pixel_values": (2, 3, 32, 32)},
    ),
    "Qwen3_5MoeForCausalLM": (
        {"model_type": "qwen3_5_moe", "vision_config": {"depth": 2}, "text_config": QWEN},
        {"input_ids": (2, 16), "labels": (2, 16)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", HEADS)
def test_a_real_step_runs_on_the_inputs(architecture: str) -> None:
    config, shapes = HEADS[architecture]
    module, inputs, loss = build(from_config({**config, "architectures": [architecture]}), batch_size=2)
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == shapes
    value = loss(module(**inputs))
    value.backward()
    assert value.isfinite()


@pytest.mark.parametrize(
    ("labels", "problem", "shape", "dtype"),
    [
        ({"0": "score"}, None, (2,), torch.float32),
        ({"0": "a", "1": "b"}, "regression", (2, 2), torch.float32),
        ({"0": "a", "1": "b"}, "multi_label_classification", (2, 2), torch.float32),
        ({"0": "a", "1": "b"}, None, (2,), torch.int64),
    ],
)
def test_labels_are_what_the_problem_asks_for(
    labels: dict[str, str], problem: str | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    config = {
        **BERT,
        "architectures": ["BertForSequenceClassification"],
        "id2label": labels,
        "problem_type": problem,
    }
    module, inputs, loss = build(from_config(config), batch_size=2)
    assert (tuple(inputs["labels"].shape), inputs["labels"].dtype) == (shape, dtype)
    assert loss(module(**inputs)).isfinite()


def test_the_default_length_is_one_that_positions_hold() -> None:
    """RoBERTa and its kin leave the first positions to padding."""
    config = {**BERT, "model_type": "mpnet", "architectures": ["MPNetForMaskedLM"]}
    module, inputs, loss = build(from_config(config))
    assert inputs["input_ids"].shape == (1, 14)
    assert loss(module(**inputs)).isfinite()


def test_a_configuration_that_lacks_what_its_kind_has_is_one_line() -> None:
    config = {"model_type": "canine", "architectures": ["CanineForSequenceClassification"], **SIZES}
    with pytest.raises(
        InputError, match=r"what CanineForSequenceClassification takes is not known here: .*vocab_size"
    ):
        build(from_config(config))


def test_layers_that_a_tower_leaves_out_by_chance_all_run() -> None:
    tower = {**SIZES, "num_mel_bins": 16, "subsampling_conv_channels": 16, "layerdrop": 0.9}
    module: Any = build(from_config({"model_type": "lasr_ctc", "vocab_size": 96, "encoder_config": tower})).module
    assert module.encoder.layerdrop == 0.0
