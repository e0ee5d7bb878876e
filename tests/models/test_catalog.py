"""The catalog: names, aliases, data files. Nothing here needs torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echograph.errors import DataError, UnknownNameError
from echograph.models import get_model, model_entries, model_names
from echograph.models.catalog import read_family

PUBLISHED_TOLERANCE = 0.05  # publications round, and count heads or embeddings differently


def test_reading_the_catalog_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, echograph.models as m;"
        "[(e.name, e.family, e.parameters, e.published_parameters) for e in m.model_entries()];"
        "m.dense_flops(m.get_model('gpt2'), 1, 1024);"
        "assert not {'torch', 'transformers', 'google.protobuf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_and_aliases_name_one_model_each() -> None:
    names = [name.lower() for entry in model_entries() for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    assert model_names() == tuple(entry.name for entry in model_entries())


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("google-bert/bert-base-uncased", "bert-base-uncased"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("META-LLAMA/LLAMA-3.1-8b", "llama-3.1-8b"),
        ("openai-community/gpt2", "gpt2"),
        ("microsoft/resnet-50", "resnet-50"),
        ("bigscience/bloom", "bloom-176b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ],
)
def test_public_checkpoint_names_are_aliases_whatever_their_case(asked: str, name: str) -> None:
    assert get_model(asked).name == name


@pytest.mark.parametrize(
    ("asked", "nearest"), [("lama-3-8b", "llama-3-8b"), ("google-bert/bert-base", "google-bert/bert-base-uncased")]
)
def test_an_unknown_name_names_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{nearest}'") as caught:
        get_model(asked)
    assert caught.value.nearest == nearest


@pytest.mark.parametrize("entry", model_entries(), ids=lambda entry: entry.name)
def test_every_entry_is_complete_and_near_its_published_size(entry) -> None:
    assert entry.source and entry.default_batch_size >= 1 and entry.default_seq_len >= 1
    assert entry.parameters == pytest.approx(entry.published_parameters, rel=PUBLISHED_TOLERANCE)


def test_the_published_shapes_of_gpt3_and_megatron_are_kept() -> None:
    """Heads times head size makes the width; 6 layers-wide sums make the size that the tables state."""
    for entry in model_entries():
        if entry.family in ("gpt3", "megatron-gpt"):
            width, layers, heads = (entry.config[key] for key in ("n_embd", "n_layer", "n_head"))
            assert width % heads == 0
            closed = 12 * layers * width**2 * (1 + 13 / (12 * width))  # Narayanan et al. 2021, equation 2
            closed += width * (entry.config["vocab_size"] + entry.config["n_positions"])
            assert entry.parameters == pytest.approx(closed, rel=1e-4)


def test_changing_a_configuration_forgets_the_counts_and_keeps_the_original() -> None:
    entry = get_model("gpt2")
    small = entry.with_config(n_layer=2)
    assert (small.config["n_layer"], small.config["n_embd"]) == (2, 768)
    assert (small.parameters, small.published_parameters, small.aliases) == (None, None, ())
    assert entry.config["n_layer"] == 12


VALID = """family = "f"
architecture = "GPT2LMHeadModel"
kind = "causal-lm"
default_batch_size = 1
[[models]]
name = "m"
source = "s"
default_seq_len = 8
config = { n_layer = 1 }
"""


def test_a_family_file_gives_its_defaults_to_its_models(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(VALID.replace("[[models]]", "[config]\nn_layer = 3\nn_head = 4\n[[models]]"))
    (entry,) = read_family(path)
    assert (entry.default_batch_size, entry.config) == (1, {"n_layer": 1, "n_head": 4})


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "m"', 'name = "m"\nbatch = 3', "unknown key 'batch' in 'm'"),
        ('source = "s"\n', "", "'m': .*source"),
        ('"causal-lm"', '"causal"', "'m': .*kind|'m': Invalid enum"),
        ("default_seq_len = 8", 'default_seq_len = "8"', "'m': .*int"),
        ("[[models]]", "[[models", "f.toml"),
    ],
)
def test_a_broken_family_file_is_one_line(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text(VALID.replace(old, new))
    with pytest.raises(DataError, match=complaint) as caught:
        list(read_family(path))
    assert "\n" not in str(caught.value)
