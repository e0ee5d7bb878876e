"""Makes what the scripts of `strangers.toml` read: `python -m benchmarks.strangers_data FOLDER`, of the clones.

Tokens, texts and pictures are random, models have random weights: a capture takes their shapes alone. What lies
there already stays.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_DRAWN = random.Random(0)
_PICTURES_OF_A_CLASS = {"train": 240, "val": 80}


def _words(count: int) -> str:
    return " ".join(f"w{_DRAWN.randrange(900)}" for _ in range(count))


def _rows(at: Path, rows: list[dict[str, object]]) -> None:
    at.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _tokens(folder: Path) -> None:
    at = folder / "nanoGPT" / "data" / "openwebtext"
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(0, 50_257, 1 << 20).astype(np.uint16).tofile(at / name)


def _torchtitan(folder: Path) -> None:
    rows: list[dict[str, object]] = [{"text": _words(300), "timestamp": "", "url": ""} for _ in range(4_000)]
    _rows(folder / "torchtitan" / "tests" / "assets" / "c4_test" / "data.json", rows)


def _wikitext(folder: Path) -> None:
    for part in ("train", "valid", "test"):
        at = folder / "examples" / "word_language_model" / "data" / "wikitext-2" / f"{part}.txt"
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text("".join(f" {_words(30)} \n" for _ in range(1_000)))


def _texts(folder: Path) -> None:
    at = folder / "data" / "text"
    at.mkdir(parents=True)
    rows: list[dict[str, object]] = [{"text": _words(200)} for _ in range(2_048)]
    _rows(at / "train.jsonl", rows)
    written = folder / "data" / "litgpt"
    written.mkdir()
    for number in range(8):
        (written / f"{number}.txt").write_text("\n".join(_words(200) for _ in range(3_000)))


def _picture(at: Path, number: int) -> None:
    from PIL import Image

    noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(noise).resize((256, 256)).save(at, "JPEG")


def _pictures(folder: Path) -> None:
    for part, count in _PICTURES_OF_A_CLASS.items():
        for kind in "abc":
            at = folder / "data" / "images" / part / kind
            at.mkdir(parents=True)
            for number in range(count):
                _picture(at / f"{number}.JPEG", number)


def _imagenet(folder: Path) -> None:
    """dinov2's index of ImageNet-1k, all of whose entries name one picture."""
    at = folder / "data" / "imagenet"
    (at / "train" / "n0").mkdir(parents=True)
    _picture(at / "train" / "n0" / "n0_0.JPEG", 0)
    kinds = [("actual_index", "<u4"), ("class_index", "<u4"), ("class_id", "U2"), ("class_name", "U2")]
    entries = np.zeros(1_281_167, dtype=kinds)
    entries["class_id"] = entries["class_name"] = "n0"
    np.save(at / "entries-TRAIN.npy", entries)
    for name in ("class-ids", "class-names"):
        np.save(at / f"{name}-TRAIN.npy", np.array(["n0"] * 1_000))


def _tokenizer(at: Path, vocabulary: int) -> None:
    special = ("<unk>", "<s>", "</s>", "<pad>")
    names = [*special, *(f"w{number}" for number in range(vocabulary - len(special)))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    told = PreTrainedTokenizerFast(tokenizer_object=made, **tokens)
    told.chat_template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    told.save_pretrained(at)
    # The name that releases of the library before 5 have for its class, too.
    settings = json.loads((at / "tokenizer_config.json").read_text())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (at / "tokenizer_config.json").write_text(json.dumps(settings | kind))


def _llama(at: Path, vocabulary: int, *, tied: bool = True) -> None:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=vocabulary, max_position_embeddings=2048, pad_token_id=3, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(at)
    _tokenizer(at, vocabulary)


def _models(folder: Path) -> None:
    _llama(folder / "data" / "small", 1_000, tied=False)
    _llama(folder / "data" / "llama", 32_000)
    _llama(folder / "data" / "llama3", 128_256, tied=False)
    # The tokenizer's file of Llama 3: one word a byte.
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "data" / "llama3" / "tokenizer.model").write_text("".join(lines))


def _autoencoder(folder: Path) -> None:
    from diffusers import AutoencoderKL

    four = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    made = AutoencoderKL(block_out_channels=(32, 32, 32, 32), **four)
    made.save_pretrained(folder / "DiT" / "stabilityai" / "sd-vae-ft-ema")


def _picotron(folder: Path) -> None:
    given = json.loads((folder / "picotron" / "template" / "base_config.json").read_text())
    given["distributed"] |= {"tp_size": 2, "pp_size": 2, "dp_size": 2}
    model = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    given["model"] |= model | {"name": str(folder / "data" / "small")}
    sizes = {"seq_length": 256, "micro_batch_size": 4, "gradient_accumulation_steps": 4}
    given["training"] |= sizes | {"num_samples": 2_048}
    given["dataset"] |= {"name": str(folder / "data" / "text")}
    weights = folder / "picotron" / "hf_model_safetensors"
    weights.mkdir(exist_ok=True)
    shutil.copy(folder / "data" / "small" / "model.safetensors", weights)
    (folder / "data" / "picotron.json").write_text(json.dumps(given, indent=2))


def _nanochat(folder: Path) -> None:
    """Its shards of text; `python -m scripts.tok_train` makes its tokenizer of them."""
    import pyarrow
    import pyarrow.parquet

    at = folder / "data" / "nanochat" / "base_data_climbmix"
    at.mkdir(parents=True)
    for number in range(2):
        # A group of rows for each of 64 ranks, which take them in turn.
        rows = pyarrow.table({"text": [_words(400) for _ in range(64 * 32)]})
        pyarrow.parquet.write_table(rows, at / f"shard_{number:05d}.parquet", row_group_size=32)


MADE: dict[str, Callable[[Path], None]] = {
    "nanoGPT/data/openwebtext/val.bin": _tokens,
    "torchtitan/tests/assets/c4_test/data.json": _torchtitan,
    "examples/word_language_model/data/wikitext-2/train.txt": _wikitext,
    "data/text": _texts,
    "data/images": _pictures,
    "data/imagenet": _imagenet,
    "data/llama3/tokenizer.model": _models,
    "DiT/stabilityai": _autoencoder,
    "data/picotron.json": _picotron,
    "data/nanochat/base_data_climbmix": _nanochat,
}
"""File or folder, in that of the clones: what makes it, and others beside it."""


def main() -> None:
    """Makes what is not there, for the clones that are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the clones lie")
    folder = parser.parse_args().folder.resolve()
    (folder / "data").mkdir(exist_ok=True)
    for path, make in MADE.items():
        clone = path.partition("/")[0] if path != "data/picotron.json" else "picotron"
        if not (folder / path).exists() and (folder / clone).is_dir():
            make(folder)


if __name__ == "__main__":
    main()
