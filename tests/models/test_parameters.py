"""Parameter counts: what the data states is what the modules hold, and what model cards publish."""

from __future__ import annotations

import pytest

from echograph.models import get_model, model_entries, parameter_count

pytestmark = pytest.mark.torch
pytest.importorskip("transformers", reason="needs the [torch] extra")

# Totals on the model cards (tensor sizes of the published checkpoints), tied weights once.
MODEL_CARDS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "bloom-176b": 176_247_271_424,
    "mpt-7b": 6_649_286_656,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-30b-a3b": 30_532_122_624,
    "phi-4": 14_659_507_200,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "t5-small": 60_506_624,
    "vit-b-16": 86_567_656,
    "resnet-50": 25_557_032,
    "vgg-19": 143_667_240,
}


@pytest.mark.parametrize("entry", model_entries(), ids=lambda entry: entry.name)
def test_the_stored_count_is_the_modules(entry) -> None:
    assert parameter_count(entry) == entry.parameters


@pytest.mark.parametrize(("name", "published"), MODEL_CARDS.items())
def test_the_stored_count_is_the_model_cards(name: str, published: int) -> None:
    assert get_model(name).parameters == published


@pytest.mark.parametrize("entry", model_entries(), ids=lambda entry: entry.name)
def test_every_configuration_key_is_one_that_the_architecture_knows(entry) -> None:
    """A misspelt key would be ignored by the library, and the default taken in its place."""
    import dataclasses

    import transformers

    if entry.architecture == "Vgg":
        pytest.skip("its keys are arguments, which Python checks")
    config_class = getattr(transformers, entry.architecture).config_class
    known = {field.name for field in dataclasses.fields(config_class)} | config_class.attribute_map.keys()
    known |= {"rope_theta", "rope_scaling", "partial_rotary_factor", "num_labels"}  # older public spellings
    known |= {"head_dim", "tie_word_embeddings", "decoder_start_token_id"}  # read, though not declared, by some
    known |= {"hybrid_override_pattern", "num_hidden_layers"}  # read by Nemotron-H's, which declares other names
    assert entry.config.keys() <= known
