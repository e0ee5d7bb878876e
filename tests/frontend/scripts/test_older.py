"""Scripts that are older than what is installed find what there was."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from script_ranks import SMALL_TRAINING

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import once_imported
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

_TRAIN = "\nimport torch\n{old}\n" + SMALL_TRAINING


def _run(folder: Path, old: str) -> ScriptRun:
    path = folder / "train.py"
    path.write_text(_TRAIN.format(old=old))
    return run_script(Script(path=path), World(size=1), TorchAdapter())


_SCHEDULED = """optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
class Warm(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer):
        super().__init__(optimizer, -1, False)
    def get_lr(self):
        return [group["lr"] / 2 for group in self.optimizer.param_groups]
assert Warm(optimizer).get_last_lr() == [0.05]
torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", verbose=True)
torch.optim.lr_scheduler.StepLR(optimizer, 1, verbose=True)
"""
_SAMPLED = """class Every(torch.utils.data.Sampler):
    def __init__(self, data):
        super().__init__(data)
        self.data = data
    def __iter__(self):
        return iter(range(len(self.data)))
assert list(Every([1, 2])) == [0, 1]
"""


@pytest.mark.parametrize(
    ("old", "note"),
    [
        (
            "from torch._six import inf, string_classes\nassert inf > 1e9 and string_classes is str",
            "torch._six.inf",
        ),
        (
            "import ruamel_yaml as yaml\nassert yaml.load('a: 1', Loader=yaml.Loader) == {'a': 1}",
            "the module ruamel_yaml is no more",
        ),
        ("import torch._six\nassert issubclass(dict, torch._six.container_abcs.Mapping)", "container_abcs"),
        (
            "import numpy as np\nassert np.zeros(2, np.float).dtype == np.float64",
            r"train.py:4 asks for numpy.float",
        ),
        (
            "import numpy as np, warnings\nwarnings.simplefilter('ignore', np.RankWarning)",
            "numpy.exceptions.RankWarning stands for it",
        ),
        ("import random, numpy as np\nrandom.seed(np.int64(3))", "random.seed takes no integers of NumPy"),
        (
            "import numpy\nassert numpy.sctypes['int'] and numpy.bool8 is numpy.bool_",
            "numpy.sctypes, which is no more",
        ),
        ("from numpy import product, Inf\nassert product([2, 3]) == 6", "numpy.prod stands for it"),
        ("import collections\nassert isinstance([], collections.Iterable)", "collections.abc.Iterable"),
        ("from fractions import gcd\nassert gcd(4, 6) == 2", "math.gcd"),
        ("from torch._utils import _accumulate\nassert list(_accumulate([1, 2])) == [1, 3]", "itertools"),
        (_SCHEDULED, "take no `verbose`"),
        (_SAMPLED, ""),
        ("import inspect\nassert inspect.getargspec(lambda a, b=1: a).args == ['a', 'b']", "inspect.getargspec"),
        ("import time\nassert time.clock() <= time.perf_counter()", "time.perf_counter stands for it"),
        ("import yaml\nassert yaml.load('a: [1e-3, x]')['a'][1] == 'x'", "yaml.load asks for a Loader"),
        (
            "import numpy as np\nassert np.fromstring(b'ab', np.uint8).tolist() == [97, 98]\n"
            "assert np.fromstring('1 2', sep=' ').tolist() == [1.0, 2.0]",
            "numpy.fromstring takes no bytes",
        ),
        (
            "batches = iter(torch.utils.data.DataLoader(range(4), batch_size=2))\n"
            "assert batches.next().tolist() == [0, 1] and next(batches).tolist() == [2, 3]",
            "_BaseDataLoaderIter has no next any more",
        ),
        ("assert torch.stft(torch.zeros(64), 8, window=torch.ones(8)).shape == (5, 33, 2)", ""),
        ("assert torch.stft(input=torch.zeros(64), n_fft=8, return_complex=True).shape == (5, 33)", ""),
    ],
)
def test_what_newer_releases_took_away_is_there(tmp_path: Path, old: str, note: str) -> None:
    run = _run(tmp_path, old)
    assert run.recorder.recorded
    assert not note or any(note in line for line in run.recorder.notes)
    assert not hasattr(np, "float") and "torch._six" not in sys.modules and not hasattr(torch, "_six")
    with pytest.raises(TypeError):
        torch.utils.data.Sampler([1])  # type: ignore[call-arg]


def test_arguments_by_place_are_named(tmp_path: Path) -> None:
    package = tmp_path / "librosa"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "filters.py").write_text(
        "def mel(*, sr, n_fft, n_mels=128, fmin=0.0): return sr, n_fft, n_mels, fmin"
    )
    run = _run(tmp_path, "from librosa.filters import mel\nassert mel(8, 16, 4, fmin=1.0) == (8, 16, 4, 1.0)")
    assert any("librosa.filters.mel takes arguments by name" in line for line in run.recorder.notes)


_TORCHVISION = {
    "__init__.py": "",
    "utils.py": "def make_grid(tensor, nrow=8, value_range=None): return nrow, value_range",
    "models/__init__.py": "from . import resnet",
    "models/resnet.py": """import enum, types
class ResNet18_Weights(enum.Enum):
    IMAGENET1K_V1 = types.SimpleNamespace(url="https://host/resnet18-f37.pth")
    DEFAULT = IMAGENET1K_V1
""",
    "transforms/__init__.py": "from .transforms import *",
    "transforms/functional.py": "\n".join(
        f"def adjust_{what}(picture, factor): return [*picture, ('{what}', factor)]"
        for what in ("brightness", "contrast", "saturation", "hue")
    )
    + "\ndef affine(interpolation=0, fill=0): pass\ndef rotate(interpolation=0): pass",
    "transforms/transforms.py": """from . import functional as F
class ColorJitter:
    @staticmethod
    def get_params(*ranges):
        return [1, 0, 3, 2], 0.5, None, 0.7, 0.9
class Resize:
    pass
class RandomRotation:
    def __init__(self, degrees, interpolation=0): self.interpolation = interpolation
class RandomAffine:
    def __init__(self, degrees, interpolation=0, fill=0): self.told = interpolation, fill
""",
}


@pytest.mark.parametrize(
    ("old", "note"),
    [
        (
            "from torchvision.utils import make_grid\nassert make_grid(0, range=(0, 1)) == (8, (0, 1))",
            "value_range",
        ),
        (
            "from torchvision.models.resnet import model_urls\n"
            "assert model_urls == {'resnet18': 'https://host/resnet18-f37.pth'}",
            "",
        ),
        (
            "from torchvision import transforms\nchosen = transforms.ColorJitter.get_params(1, 1, 1, 1)\n"
            "assert chosen([]) == [('brightness', 0.5), ('hue', 0.9), ('saturation', 0.7)] and len(chosen) == 5",
            "is applied in turn",
        ),
        (
            "from torchvision import transforms as t\nassert t.RandomRotation(3, resample=2).interpolation == 2\n"
            "assert t.RandomAffine(3, resample=2, fillcolor=5).told == (2, 5) and t.Scale is t.Resize",
            "has no argument fillcolor",
        ),
    ],
)
def test_what_torchvision_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, note: str) -> None:
    for name, text in _TORCHVISION.items():
        path = tmp_path / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    run = _run(tmp_path, old)
    assert not note or any(note in line for line in run.recorder.notes)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)


def test_pictures_of_text_and_of_figures_are_as_large_as_they_were(tmp_path: Path) -> None:
    pytest.importorskip("PIL"), pytest.importorskip("matplotlib")
    run = _run(
        tmp_path,
        "import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as plt\n"
        "from PIL import Image, ImageDraw\n"
        "figure = plt.figure(figsize=(1, 2), dpi=10)\nfigure.canvas.draw()\n"
        "assert len(figure.canvas.tostring_rgb()) == 10 * 20 * 3\n"
        "assert ImageDraw.Draw(Image.new('L', (9, 9))).textsize('a')[0] > 0",
    )
    assert any("FigureCanvasAgg has no tostring_rgb any more" in line for line in run.recorder.notes)
    assert any("ImageDraw has no textsize any more" in line for line in run.recorder.notes)


def test_observations_are_of_the_environments_space(tmp_path: Path) -> None:
    package = tmp_path / "gymnasium" / "wrappers"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "transform_observation.py").write_text(
        "class TransformObservation:\n    def __init__(self, env, func, observation_space):\n"
        "        self.space = observation_space\n"
    )
    made = "types.SimpleNamespace(observation_space=3)"
    old = (
        "import types\nfrom gymnasium.wrappers.transform_observation import TransformObservation as T\n"
        f"assert T({made}, abs).space == 3\nassert T({made}, abs, 4).space == 4\n"
        f"assert T({made}, func=abs, observation_space=None).space is None"
    )
    assert [line for line in _run(tmp_path, old).recorder.notes if "TransformObservation" in line]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs Transformers")
def test_an_optimizer_that_transformers_had(tmp_path: Path) -> None:
    old = "import torch\nfrom transformers import AdamW\n" + SMALL_TRAINING.replace("torch.optim.SGD", "AdamW")
    path = tmp_path / "train.py"
    path.write_text(old)
    run = run_script(Script(path=path), World(size=1), TorchAdapter())
    assert any("asks for transformers.AdamW, which is no more" in line for line in run.recorder.notes)
    updates = [node.name for node in run.recorder.graph.nodes if node.meta.get("phase") == "optimizer"]
    parameters = sum(name == "parameter" for name in (node.meta.get("role") for node in run.recorder.graph.nodes))
    # Each parameter is updated by kernels of its own, and with no weight decay where nobody asks for it.
    assert sum(name.startswith("addcdiv_") for name in updates) == parameters > 1


def test_masks_of_bytes_are_read_as_booleans(tmp_path: Path) -> None:
    """As in `attention.float().masked_fill(mask.byte(), -inf)`, of scripts from before there were booleans."""
    old = (
        "x = torch.ones(4, 3, device='cuda', requires_grad=True)\nmask = torch.ones(4, 3, device='cuda').byte()\n"
        "assert x.masked_fill(mask, 0).shape == torch.masked_fill(x, mask=mask, value=0).shape == (4, 3)\n"
        "(x * 2).masked_fill_(mask, 0).sum().backward()\n"
        "known = torch.tensor([1, 0, 1], dtype=torch.uint8)\n"
        "assert torch.tensor([3, 4, 5]).masked_select(known).tolist() == [3, 5]\n"
        "assert torch.tensor([3, 4, 5]).masked_fill(known, 1).tolist() == [1, 4, 1]"
    )
    notes = _run(tmp_path, old).recorder.notes
    assert sum("no mask of bytes" in note for note in notes) == 3


def test_who_asks_whether_a_module_is_there_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As packages that look for one another do: `importlib.util.find_spec("transformers")`."""
    (tmp_path / "looked_for.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    entered: list[str] = []
    with (
        once_imported("looked_for", lambda: nullcontext(entered.append("first"))),
        once_imported("looked_for", lambda: nullcontext(entered.append("second"))),
    ):
        assert importlib.util.find_spec("looked_for") is not None and not entered
        assert importlib.import_module("looked_for").x == 1
        assert sorted(entered) == ["first", "second"]
        del sys.modules["looked_for"]  # as Transformers does with itself
        assert importlib.import_module("looked_for").x == 1
    assert sorted(entered) == ["first", "first", "second", "second"]
    del sys.modules["looked_for"]


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="needs Pillow")
def test_filters_of_pictures_have_their_old_names(tmp_path: Path) -> None:
    assert _run(tmp_path, "from PIL import Image\nassert Image.ANTIALIAS == Image.LANCZOS").recorder.recorded


@pytest.mark.parametrize(
    ("old", "line"),
    [
        ("import numpy\nnumpy.no_such_name", "train.py:4: AttributeError: module 'numpy' has no attribute"),
        ("from no_such_package import It\nimport dataclasses\ndataclasses.fields(It)", "install no_such_package"),
        (
            "from torch.utils import cpp_extension\ncpp_extension.include_paths(device_type='cuda')\n"
            "cpp_extension.load('mine', 'mine.cu')",
            "load",
        ),
        ("import collections\ncollections.NoSuch", "module 'collections' has no attribute 'NoSuch'"),
        ("raise ImportError(\"'A' requires 'b>=0.6.0'\")", "'b>=0.6.0': install what it names beside echograph"),
        ("from torch.no_such_module import it\nit()", "No module named 'torch.no_such_module'"),
        (
            "w = torch.zeros(2, requires_grad=True)\nx = w * 1\ny = x * x\nx += 1\ny.sum().backward()",
            "as on real ranks of today's PyTorch",
        ),
    ],
)
def test_what_is_not_known_ends_as_ever(tmp_path: Path, old: str, line: str) -> None:
    with pytest.raises(CaptureError) as error:
        _run(tmp_path, old)
    assert line in str(error.value)


def test_a_file_that_may_run_code_is_named(tmp_path: Path) -> None:
    torch.save(np.zeros(2), tmp_path / "data.pt")
    with pytest.raises(CaptureError, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"):
        _run(tmp_path, f"torch.load({str(tmp_path / 'data.pt')!r})")


@pytest.mark.slow
def test_arguments_of_the_trainer_that_are_no_more(tmp_path: Path) -> None:
    """By name, and on the command line of a script whose arguments are derived from them."""
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text("""
import dataclasses, torch
from transformers import HfArgumentParser, TrainingArguments

@dataclasses.dataclass
class Mine(TrainingArguments):
    more: int = 3

(given,) = HfArgumentParser(Mine).parse_args_into_dataclasses()
assert given.warmup_steps == 0.1 and given.eval_strategy == "no" and given.more == 4
assert TrainingArguments(output_dir="x", warmup_ratio=0.2, overwrite_output_dir=True).warmup_steps == 0.2
assert Mine("x", warmup_ratio=0.3, no_cuda=False, more=5).warmup_steps == 0.3
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
""")
    said = "--output_dir x --more 4 --overwrite_output_dir --warmup_ratio 0.1 --evaluation_strategy no"
    script = Script(path=tmp_path / "train.py", arguments=said.split())
    run = run_script(script, World(size=2), TorchAdapter())
    assert any("has no argument overwrite_output_dir any more" in note for note in run.recorder.notes)


def test_the_similarity_of_images_has_channels_as_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Today's passes `multichannel` over without a word, and compares channels as if they were pixels."""
    package = tmp_path / "skimage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "metrics.py").write_text("def structural_similarity(a, b, **given): return given")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = "{'channel_axis': -1, 'data_range': 1}"
    old = "from skimage.metrics import structural_similarity as compare\n"
    old += f"assert compare(0, 0, multichannel=True, data_range=1) == {told}"
    run = _run(tmp_path, old + "\nassert compare(0, 0) == {}")
    assert any("takes no multichannel any more" in note for note in run.recorder.notes)
    for name in ("skimage", "skimage.metrics"):
        sys.modules.pop(name, None)
