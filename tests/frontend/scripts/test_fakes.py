"""What a script would download is made of its published shapes where the user names it, and said in a note."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from echograph.errors import CaptureError, InputError, UnknownNameError, UsageError
from echograph.frontend.scripts.fakes import Fakes
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.workflow.capture import CaptureOptions, capture, parse_fakes

LANGUAGE = """import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer
words = AutoTokenizer.from_pretrained("some-lab/small-bert")
model = AutoModelForSequenceClassification.from_pretrained("some-lab/small-bert").cuda()
from datasets import load_dataset
rows = load_dataset("nyu-mll/glue", "mrpc", split="train[:50%]")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def together(picked):
    made = words([row["sentence1"] for row in picked], [row["sentence2"] for row in picked], padding="max_length",
                 max_length=64, truncation=True, return_tensors="pt")
    return made | {"labels": torch.tensor([row["label"] for row in picked])}

for batch in DataLoader(rows, batch_size=4, collate_fn=together):
    model(**{name: part.cuda() for name, part in batch.items()}).loss.backward()
    optimizer.step()
"""
SMALL = {
    "architectures": ["BertForPreTraining"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "vocab_size": 500, "max_position_embeddings": 64,
}  # fmt: skip
IMAGES = """import torch
from torchvision import datasets, transforms
images = datasets.MNIST("nowhere", train=True, download=True, transform=transforms.ToTensor())
assert len(images) == 60_000 and images[7][1] == 7
model = torch.nn.Linear(784, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader(images, batch_size=8):
    torch.nn.functional.cross_entropy(model(x.cuda().flatten(1)), y.cuda()).backward()
    optimizer.step()
"""


def run(folder: Path, text: str, fakes: Fakes) -> ScriptRun:
    path = folder / "train.py"
    path.write_text(text)
    return run_script(Script(path=path, fakes=fakes), World(), TorchAdapter())


STEPS = """model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_model_and_a_data_set_of_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    fakes = Fakes(data={"nyu-mll/glue": None}, weights={"some-lab/small-bert": SMALL})
    before = dict(os.environ)
    found = run(tmp_path, LANGUAGE, fakes).recorder
    assert found.sample is not None and tuple(found.sample.shape) == (4, 64)
    parameters = sum(
        node.meta["val"].numel() for node in found.graph.nodes if node.meta.get("role") == "parameter"
    )
    layer = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 32 + 64 + 4 * 32
    assert parameters == (500 + 64 + 2) * 32 + 2 * 32 + 2 * layer + 32 * 32 + 32 + 2 * 32 + 2
    told = " ".join(found.notes)
    assert "some-lab/small-bert: weights without values" in told and "nyu-mll/glue: columns as published" in told
    assert dict(os.environ) == before


def test_a_package_that_the_script_does_not_import_may_be_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "evaluate.py").write_text("raise OSError('Could not load this library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    assert run(tmp_path, f"import torch\n{STEPS}", Fakes(data={"nyu-mll/glue": None})).recorder.recorded


def test_the_hub_has_a_data_set_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may ask whether there is one before it loads it; what the user's own cache has stays as it is."""
    pytest.importorskip("datasets")
    own = tmp_path / "own" / "datasets--nyu-mll--glue"
    own.mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(own.parent))
    text = f"""import os, torch
from huggingface_hub import snapshot_download
assert os.path.isdir(snapshot_download(repo_id="nyu-mll/glue", repo_type="dataset", ignore_patterns=["*"]))
{STEPS}"""
    assert run(tmp_path, text, Fakes(data={"nyu-mll/glue": None})).recorder.recorded
    assert not list(own.iterdir())


def test_a_package_that_makes_data_and_is_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datasets.py").write_text("raise OSError('no such library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with pytest.raises(
        CaptureError, match=r"datasets is installed, and cannot be imported.*OSError: no such library"
    ):
        run(tmp_path, "", Fakes(data={"nyu-mll/glue": None}))


def test_rows_of_a_file(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one two"}\n' * 6)
    text = """import torch
from datasets import load_dataset
assert load_dataset("mine/own")["train"].num_rows == 6
assert load_dataset("mine/own")["train_prefs"].num_rows == 6
assert load_dataset("mine/own", split="test_prefs[:10]+train").num_rows == 6
model = torch.nn.Linear(2, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for row in load_dataset("mine/own", split="validation"):
    model(torch.ones(len(row["text"].split()), 2).cuda()).sum().backward()
    optimizer.step()
"""
    found = run(tmp_path, text, Fakes(data={"mine/own": rows}))
    assert "6 rows of rows.jsonl" in " ".join(found.recorder.notes)
    with pytest.raises(UnknownNameError, match="unknown data set 'mine/own'"):
        run(tmp_path, text, Fakes(data={"mine/own": None}))


def test_images_of_torchvision(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    found = run(tmp_path, IMAGES, Fakes(data={"MNIST": None})).recorder
    assert found.sample is not None and tuple(found.sample.shape) == (8, 784)
    assert "MNIST: 60,000 images of 28 x 28 without content" in " ".join(found.notes)


def test_what_is_not_named_says_how_to_name_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    asked = "AutoConfig.from_pretrained('nobody/has-this', local_files_only=True)"
    text = f"from transformers import AutoConfig\n{asked}\n"
    with pytest.raises(CaptureError, match="--fake-weights"):
        run(tmp_path, text, Fakes())


def test_a_cache_of_the_scripts_own_has_what_is_made(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 32}
    text = f"""import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("some-lab/small", cache_dir={str(tmp_path / "own")!r}).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 4, dtype=torch.long, device="cuda")).logits.sum().backward()
    optimizer.step()
"""
    held = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    assert run(tmp_path, text, Fakes(weights={"some-lab/small": held})).recorder.recorded


HUB = """import torch
from torch.hub import load_state_dict_from_url
model = torch.nn.Linear(4, 2)
held = load_state_dict_from_url("https://nowhere.invalid/models/small-1234.pth", progress=False{checked})
model.load_state_dict({taken})
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(3, 4).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("taken", ["held", "held['model']", "held.get('state_dict', held)"])
def test_a_file_of_weights_that_pytorch_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    text = HUB.format(taken=taken, checked=", check_hash=True")
    found = run(tmp_path, text, Fakes(files=frozenset({"small-1234.pth"}))).recorder
    assert any("small-1234.pth: weights of the shapes" in note for note in found.notes)
    assert any(tuple(node.meta["val"].shape) == (2, 4) for node in found.graph.nodes if "role" in node.meta)


def test_weights_that_cannot_be_downloaded_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no values in a capture, downloaded or not; what a server does not have is another error."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    text = HUB.format(taken="held", checked="")
    found = run(tmp_path, text, Fakes()).recorder
    assert "small-1234.pth: weights of the shapes of the model that takes them, which" in " ".join(found.notes)
    with pytest.raises(
        CaptureError,
        match=r"^train\.py:4: URLError.* https://.*/small\.json is downloaded, and is not here",
    ):
        run(tmp_path, text.replace("small-1234.pth", "small.json"), Fakes())


FETCHED = """import torch
from urllib.request import urlretrieve
model = torch.nn.Linear(4, 2).cuda()
urlretrieve("https://models.invalid/{file}", "held/{file}")
model.load_state_dict(torch.load("held/{file}", map_location="cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(3, 4).cuda()).sum().backward()
    optimizer.step()
"""


def test_weights_that_a_script_fetches_itself_are_made(tmp_path: Path) -> None:
    found = run(tmp_path, FETCHED.format(file="small.pth"), Fakes()).recorder
    assert found.recorded and "small.pth: weights of the shapes of the model" in " ".join(found.notes)
    with pytest.raises(CaptureError, match=r"train\.py:4: URLError"):
        run(tmp_path, FETCHED.format(file="small.csv"), Fakes())


def test_images_that_cannot_be_downloaded_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those to test with, too, which come with those to train with; not where nobody would download them."""
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    tested = 'assert len(datasets.MNIST("nowhere", train=False)) == 10_000\n'
    text = IMAGES.replace("\nmodel", f"\n{tested}model", 1)
    assert "60,000 images" in " ".join(run(tmp_path, text, Fakes()).recorder.notes)
    with pytest.raises(CaptureError, match="Dataset not found"):
        run(tmp_path, text.replace(", download=True", ""), Fakes())
    for fakes in (Fakes(), Fakes(data={"MNIST": None})):  # derived from it
        notes = run(tmp_path, IMAGES.replace("MNIST", "KMNIST"), fakes).recorder.notes
        assert any(note.startswith("KMNIST: 60,000 images") for note in notes)


def test_pictures_of_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    text = """import torch
from datasets import load_dataset
import numpy as np
rows = load_dataset("ylecun/mnist", split="train")
model = torch.nn.Linear(784, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for row in rows:
    picture = torch.from_numpy(np.asarray(row["image"]).astype("float32"))
    out = model(picture.cuda().flatten()[None])
    torch.nn.functional.cross_entropy(out, torch.tensor([row["label"]]).cuda()).backward()
    optimizer.step()
"""
    found = run(tmp_path, text, Fakes(data={"ylecun/mnist": None})).recorder
    assert any(tuple(getattr(n.meta.get("val"), "shape", ())) == (1, 784) for n in found.graph.nodes)


def test_words_of_the_options(tmp_path: Path) -> None:
    assert parse_fakes(["MNIST", "a/b=rows.jsonl"]) == {"MNIST": None, "a/b": "rows.jsonl"}
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(InputError, match=r"--fake-data x=gone\.jsonl: no such file"):
        capture(script, fake_data={"x": "gone.jsonl"})
    with pytest.raises(InputError, match=r"--fake-data x=train\.py: give a file of rows \(\.jsonl"):
        capture(script, fake_data={"x": script.name})
    with pytest.raises(UsageError, match="any other: --fake-weights nobody/has-this=DIR, a folder"):
        capture(script, fake_weights={"nobody/has-this": None})
    with pytest.raises(InputError, match=r"--fake-weights x=/gone/model: no such folder"):
        capture(script, fake_weights={"x": "/gone/model"})
    with pytest.raises(UsageError, match=r"--fake-weights w\.pth=gpt2: .*give its name alone"):
        capture(script, fake_weights={"w.pth": "gpt2"})
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"--fake-data MNIST=.*rows\.jsonl: it is made as published"):
        capture(script, fake_data={"MNIST": tmp_path / "rows.jsonl"})
    for two in (["a=gpt2", "a=bert"], ["MNIST", "MNIST=rows.jsonl"], [""], ["=gpt2"], ["a="]):
        with pytest.raises(UsageError, match=r"said of .* before|give NAME or NAME=WHAT"):
            parse_fakes(two)
    with pytest.raises(UsageError, match="vgg"):
        capture(script, fake_weights={"x": "vgg-19"})


OF_A_FILE = """import torch
model = torch.nn.Linear(8, 8)
model.load_state_dict(torch.load("kept/first_stage.ckpt", map_location="cpu")["state_dict"])
model.cuda()
weights = torch.hub.load_state_dict_from_url("https://example.invalid/lpips_weights.pt", progress=False)
assert [tuple(part.shape) for part in weights] == [(1, n, 1, 1) for n in (64, 128, 256, 512, 512)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_file_of_weights_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaptureError, match=r"train.py:3: .*--fake-weights first_stage.ckpt$"):
        run(tmp_path, OF_A_FILE, Fakes())
    fakes = Fakes(files=frozenset({"first_stage.ckpt", "lpips_weights.pt"}))
    found = run(tmp_path, OF_A_FILE, fakes)
    assert fakes.asked == {"first_stage.ckpt", "lpips_weights.pt"}
    assert "first_stage.ckpt: weights of the shapes" in " ".join(found.recorder.notes)


OF_DIFFUSERS = """import torch
from diffusers import AutoencoderKL
model = AutoencoderKL.from_pretrained("stabilityai/sd-vae-ft-ema").cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 3, 32, 32, device="cuda")).sample.sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_model_of_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    folder = tmp_path / "vae"
    folder.mkdir()
    sizes = {"block_out_channels": [32, 64], "layers_per_block": 1, "norm_num_groups": 8}
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    (folder / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", **sizes, **kinds}))
    options = CaptureOptions(script=tmp_path / "train.py", fake_weights=(f"stabilityai/sd-vae-ft-ema={folder}",))
    assert run(tmp_path, OF_DIFFUSERS, options.fakes).recorder.recorded


def test_weights_of_torchvision_have_their_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may change what it fetched before a model takes it."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    (tmp_path / "torchvision" / "models.py").write_text("""
import types, torch
def list_models(): return ["resnet18"]
def get_model_weights(name): return [types.SimpleNamespace(url="https://download.pytorch.org/models/resnet18-now.pth")]
def get_model(name, weights): return torch.nn.Linear(3, 2)
""")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    found = run(
        tmp_path,
        """import torch
held = torch.hub.load_state_dict_from_url("https://download.pytorch.org/models/resnet18-then.pth")
other = torch.hub.load_state_dict_from_url("https://example.invalid/models/resnet18-then.pth")
assert {name: tuple(part.shape) for name, part in held.items()} == {"weight": (2, 3), "bias": (2,)} and not other
held["weight"] = torch.cat([held["weight"]] * 2, 1) / 2
model = torch.nn.Linear(6, 2).cuda()
model.load_state_dict(held)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 6, device="cuda")).sum().backward()
    optimizer.step()
""",
        Fakes(),
    )
    assert found.recorder.recorded
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)


OF_TIKTOKEN = {
    "tiktoken/__init__.py": "from tiktoken.registry import get_encoding",
    "tiktoken/registry.py": """
import importlib
ENCODINGS, ENCODING_CONSTRUCTORS = {}, None
def get_encoding(name):
    global ENCODING_CONSTRUCTORS
    if ENCODING_CONSTRUCTORS is None:
        ENCODING_CONSTRUCTORS = importlib.import_module("tiktoken_ext.openai_public").ENCODING_CONSTRUCTORS
    return ENCODINGS.setdefault(name, ENCODING_CONSTRUCTORS[name]())
""",
    "tiktoken_ext/openai_public.py": """
def load_tiktoken_bpe(url):
    raise ConnectionError("nobody is there")
data_gym_to_mergeable_bpe_ranks = load_tiktoken_bpe
def of(name):
    return lambda: load_tiktoken_bpe(f"https://example.invalid/{name}.tiktoken")
ENCODING_CONSTRUCTORS = {name: of(name) for name in ("gpt2", "p50k_base", "cl100k_base", "of_somebody")}
""",
}


@pytest.mark.parametrize("named", [False, True])
def test_an_encoding_has_as_many_words_as_published(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in OF_TIKTOKEN.items():
        (tmp_path / "packages" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "packages" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    fakes = Fakes(data={"gpt2": None} if named else {})
    text = """import tiktoken
assert sorted(tiktoken.get_encoding("gpt2").values()) == list(range(50_256))
assert sorted(tiktoken.get_encoding("p50k_base").values()) == [*range(50_256), *range(50_257, 50_281)]
assert len(tiktoken.get_encoding("cl100k_base")) == 100_256
tiktoken.get_encoding("of_somebody")
"""
    try:
        registry = importlib.import_module("tiktoken.registry")
        with pytest.raises(CaptureError, match=r"ConnectionError: nobody is there"):
            run(tmp_path, text, fakes)
        assert registry.ENCODINGS == {} and registry.ENCODING_CONSTRUCTORS is None
    finally:
        for name in [name for name in sys.modules if name.startswith("tiktoken")]:
            del sys.modules[name]
    assert fakes.asked == {"gpt2", "p50k_base", "cl100k_base"}


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("Qwen/Qwen2.5-0.5B-Instruct", 896), ("meta-llama/Llama-2-7b-chat-hf", 4096), ("google/gemma-2-2b-it", 2304)],
)
def test_what_a_model_was_trained_from_has_its_shapes(
    name: str, hidden: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = CaptureOptions(script=tmp_path / "train.py", fake_weights=(name, "mine=Qwen/Qwen2.5-0.5B"))
    weights = asked.fakes.weights
    assert weights[name]["hidden_size"] == hidden and weights["mine"]["hidden_size"] == 896
    assert f"{name}: taken to have the shapes of" in caplog.text
