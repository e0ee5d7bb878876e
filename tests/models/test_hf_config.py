"""A user's config.json: what is read from it, and what is said of one that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echograph.errors import InputError
from echograph.models import build, from_config, get_model, parameter_count

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"},
    "quantization_config": {"quant_method": "fp8"},
    "torch_dtype": "float16",
    "_name_or_path": "somewhere/else",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_a_directory_a_file_and_a_dict_read_the_same(directory: Path) -> None:
    from_directory, from_file = from_config(directory), from_config(directory / "config.json")
    assert from_directory == from_file
    assert (from_directory.name, from_directory.family, from_directory.default_seq_len) == (
        "my-llama",
        "llama",
        128,
    )
    assert from_config(LLAMA, name="mine").config == from_directory.config
    assert not {"auto_map", "quantization_config", "_name_or_path"} & from_directory.config.keys()


def test_what_is_read_builds_and_steps(directory: Path) -> None:
    module, inputs, loss = build(from_config(directory), batch_size=2)
    assert type(module).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert inputs["input_ids"].shape == (2, 128)
    assert loss(module(**inputs)).isfinite()


@pytest.mark.parametrize(
    ("config", "architecture", "kind"),
    [
        ({"model_type": "gpt2"}, "GPT2LMHeadModel", "causal-lm"),
        ({"model_type": "llama", "architectures": ["LlamaModel"]}, "LlamaForCausalLM", "causal-lm"),
        ({"model_type": "bert"}, "BertForMaskedLM", "masked-lm"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "BertForPreTraining", "masked-lm"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "BertLMHeadModel", "causal-lm"),
        ({"model_type": "mpt", "architectures": ["MPTForCausalLM"]}, "MptForCausalLM", "causal-lm"),
        ({"model_type": "t5"}, "T5ForConditionalGeneration", "seq2seq"),
        ({"model_type": "bart"}, "BartForConditionalGeneration", "seq2seq"),
        ({"model_type": "vit", "image_size": 384}, "ViTForImageClassification", "image-classification"),
    ],
)
def test_the_training_class_is_the_one_named_or_the_types_own(config: dict, architecture: str, kind: str) -> None:
    entry = from_config(config)
    assert (entry.architecture, entry.kind) == (architecture, kind)


@pytest.mark.parametrize("model_type", ["longt5", "t5"])
def test_tokens_that_a_type_leaves_open_are_any(model_type: str) -> None:
    """By which labels are shifted; published files of LongT5 say it, its class does not."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    entry = from_config({"model_type": model_type, **sizes, "pad_token_id": None})
    module, inputs, loss = build(entry, batch_size=1, seq_len=32)
    assert loss(module(**inputs)).isfinite()


def test_the_zoos_own_configuration_reads_back_to_the_same_size() -> None:
    entry = get_model("qwen2.5-0.5b")
    assert parameter_count(from_config({"model_type": "qwen2", **entry.config})) == entry.parameters


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ("{}", "no 'model_type'"),
        ('{"model_type": 3}', "no 'model_type'"),
        ('{"model_type": "lama"}', "model type 'lama' is not one of"),
        ('{"model_type": "sam"}', "no training head known here"),
        (
            '{"model_type": "bert", "architectures": ["BertForMultipleChoice"]}',
            "name one of Bert.* instead",
        ),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_file_that_is_no_model_is_one_line(content: str | bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=complaint) as caught:
        from_config(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_huge_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        from_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b" " * (4 * 2**20 + 1))
    with pytest.raises(InputError, match="larger than"):
        from_config(tmp_path)
