"""What a script would download, made of its published shapes: data sets and weights that the user names.

A data set has the columns, or images of the size, that its card states, and values that say nothing; weights have
names, shapes and types alone. Weights lie in a cache of the Hugging Face hub that is there for the run, so whoever
asks the hub finds them; the hub itself is not asked.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import inspect
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from echograph.errors import CaptureError, MissingExtraError, UnknownNameError, UsageError
from echograph.frontend.scripts.adapter import once_imported, patched, replaced
from echograph.frontend.scripts.opened import OnOpen, listening
from echograph.frontend.scripts.values import NoteTaker

MOST_ROWS = 1024
"""Rows of a data set of the hub that are made: epochs are shorter, steps are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fakes:
    """What is made in place of what would be downloaded.

    Attributes:
        data: name of a data set -> a file of rows with its columns (JSON lines, CSV, Parquet); None: as published.
        weights: name on the hub -> the configuration of the model, as its config.json has it.
        files: names of files of weights that PyTorch downloads, or loads (`resnet50-0676ba61.pth`).
        asked: names of all these that a script asked for.
    """

    data: Mapping[str, Path | None] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: frozenset[str] = frozenset()
    asked: set[str] = field(default_factory=set, compare=False, repr=False)


@contextmanager
def installed(fakes: Fakes, note: NoteTaker) -> Iterator[None]:
    """In the context, what was named is there.

    Args:
        fakes: what.
        note: is told what was made.

    Raises:
        UsageError: rows are given of what is made as published.
        UnknownNameError: nothing is known of a data set; names those of which something is.
        MissingExtraError: a package is not installed that such data are of.
    """
    with ExitStack() as stack:
        for name, file in fakes.data.items():
            if file is not None and name in (*_IMAGES, *_WORDS_OF):
                raise UsageError(f"--fake-data {name}={file}: it is made as published: give its name alone")
            if file is None and name in _IMAGES:
                _package("torchvision.datasets")
            elif file is None and name in _WORDS_OF:
                _package("tiktoken.registry")
            elif file is None and name not in _COLUMNS:
                raise UnknownNameError("data set", name, [*_IMAGES, *_COLUMNS, *_WORDS_OF], _BY_ROWS.format(name))
        rows = {name: file for name, file in fakes.data.items() if name not in (*_IMAGES, *_WORDS_OF)}
        if rows:
            package = _package("datasets")
            for owner in (package, _package("datasets.load")):
                stack.enter_context(patched(owner, "load_dataset", lambda f: _rows(rows, fakes.asked, f, note)))
            stack.enter_context(once_imported("evaluate", _metrics))
            hub = _package("huggingface_hub")
            stack.enter_context(patched(hub, "snapshot_download", partial(_of_data, rows, fakes, note)))
        stack.enter_context(once_imported("torchvision.datasets", partial(_published, fakes, note)))
        stack.enter_context(once_imported("tiktoken.registry", _known_anew))
        stack.enter_context(once_imported("tiktoken_ext.openai_public", partial(_encodings, fakes, note)))
        for kept in _files(fakes.files, fakes.asked, note):
            stack.enter_context(kept)
        if fakes.weights:
            folder = str(_hub(fakes, note))
            stack.enter_context(listening(_asking_for(folder, fakes)))
            # Read from the environment as the package is imported, which may have been before.
            constants = _package("huggingface_hub.constants")
            stack.enter_context(replaced(constants, "HF_HUB_CACHE", folder))
            stack.enter_context(replaced(constants, "HF_HUB_OFFLINE", True))
            if importlib.util.find_spec("transformers") is not None:
                asked = _package("transformers.utils.hub")
                if hasattr(asked, "TRANSFORMERS_CACHE"):  # before 5 it keeps a place of its own
                    stack.enter_context(replaced(asked, "TRANSFORMERS_CACHE", folder))
                for function in _LOOKING:
                    stack.enter_context(patched(asked, function, partial(_kept_in, folder, fakes.weights)))
        yield


def _of_data(
    rows: Collection[str], fakes: Fakes, note: NoteTaker, original: Callable[..., Any]
) -> Callable[..., Any]:
    """What fetches a folder of the hub, which of a data set that is made is there, and empty."""

    def fetch(repo_id: str, *args: Any, **kwargs: Any) -> Any:
        if repo_id not in rows or kwargs.get("repo_type") != "dataset":
            return original(repo_id, *args, **kwargs)
        return str(_snapshot(_hub(fakes, note), "datasets", repo_id))

    return fetch


def _metrics() -> AbstractContextManager[None]:
    """In the context, a metric counts nothing."""
    return patched(sys.modules["evaluate"], "load", lambda _: lambda *_, **__: _Metric())


_LOOKING = ("hf_hub_download", "snapshot_download", "try_to_load_from_cache")


def _kept_in(folder: str, names: Collection[str], original: Callable[..., Any]) -> Callable[..., Any]:
    """What looks for a file of the hub, where a script has a cache of its own (`cache_dir=`)."""

    def look(repo_id: str, *args: Any, **kwargs: Any) -> Any:
        return original(repo_id, *args, **(kwargs | {"cache_dir": folder} if repo_id in names else kwargs))

    return look


def _package(name: str) -> Any:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise MissingExtraError(name.partition(".")[0], "torch", "making data of its kind")
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever its own modules, or libraries that it loads, raise
        told = f"{type(error).__name__}: {error}"
        raise CaptureError(
            f"{name} is installed, and cannot be imported, which is what makes data: {told}"
        ) from error


_BY_ROWS = "any other by a few lines with its columns: {0}=rows.jsonl"
# Function of a package that asks for what is downloaded: its argument with the name.
_ASKING = {
    "load_dataset": "path", "from_pretrained": "pretrained_model_name_or_path", "hf_hub_download": "repo_id",
    "load_state_dict_from_url": "url",
}  # fmt: skip


def option_for(error: BaseException) -> str:
    """The option that makes what could not be downloaded; "" where nobody asked for it that a fake stands for.

    Args:
        error: what the script raised; who asked, and for what, is in its frames.
    """
    option = ""
    if isinstance(error, FileNotFoundError) and str(error.filename).endswith(WEIGHTS):
        return f"--fake-weights {Path(error.filename).name}"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package, asking = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if package.startswith("torchvision.datasets") and type(frame.f_locals.get("self")).__name__ in _IMAGES:
            return f"--fake-data {type(frame.f_locals['self']).__name__}"
        asked = frame.f_locals.get(_ASKING.get(asking, ""))
        if isinstance(asked, str) and asked:
            return _option(asking, asked)
        if package.partition(".")[0] in _MAKERS:
            option = "--fake-data NAME, --fake-weights NAME"
    return option


_MAKERS = ("datasets", "huggingface_hub", "tiktoken", "tokenizers", "transformers")


def _option(asking: str, asked: str) -> str:
    if asking == "load_dataset":
        rows = "" if asked in _COLUMNS else "=rows.jsonl (a few lines with its columns)"
        return f"--fake-data {asked}{rows}"
    if asking == "load_state_dict_from_url":
        return f"--fake-weights {_file_of(asked)}"
    return f"--fake-weights {asked}, or {asked}=DIR with its config.json"


# -- images of torchvision --------------------------------------------------------------------------------------

_DIGITS, _PICTURES = (28, 28), (32, 32, 3)
# Class of torchvision.datasets: size of an image, classes, images to train and to test with.
_IMAGES = {
    "MNIST": (_DIGITS, 10, 60_000, 10_000), "FashionMNIST": (_DIGITS, 10, 60_000, 10_000),
    "KMNIST": (_DIGITS, 10, 60_000, 10_000), "CIFAR10": (_PICTURES, 10, 50_000, 10_000),
    "CIFAR100": (_PICTURES, 100, 50_000, 10_000),
}  # fmt: skip


@contextmanager
def _published(fakes: Fakes, note: NoteTaker) -> Iterator[None]:
    """In the context, images are made that are named, or cannot be downloaded: their number and size are known."""
    datasets = importlib.import_module("torchvision.datasets")
    fetched: set[str] = set()  # what fetches images to train with fetches those to test with, too

    def made(name: str, original: Callable[..., None]) -> Callable[..., None]:
        make = _images(name, set(), note, "which cannot be downloaded here")

        def init(images: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(images, *args, **kwargs)
            except (OSError, RuntimeError):
                asked = inspect.signature(original).bind(images, *args, **kwargs).arguments
                if not asked.get("download") and name not in fetched:
                    raise
                fetched.add(name)
                make(images, *args, **kwargs)

        return init

    # Before any is another: some are derived from others, whose constructors they have.
    originals = {name: getattr(datasets, name).__init__ for name in _IMAGES}
    with ExitStack() as stack:
        for name, original in originals.items():
            init = _images(name, fakes.asked, note) if name in fakes.data else made(name, original)
            stack.enter_context(replaced(getattr(datasets, name), "__init__", init))
        yield


def _images(name: str, asked: set[str], note: NoteTaker, why: str = "as --fake-data asks") -> Callable[..., None]:
    size, classes, training, test = _IMAGES[name]

    def init(
        images: Any, root: Any = ".", train: bool = True, transform: Any = None, target_transform: Any = None,
        download: bool = False,
    ) -> None:  # fmt: skip
        del download
        asked.add(name)
        base = importlib.import_module("torchvision.datasets").VisionDataset
        base.__init__(images, root, transform=transform, target_transform=target_transform)
        count = training if train else test
        note(f"{name}: {count:,} images of {' x '.join(map(str, size))} without content, {why}")
        pixels, labels = np.zeros((count, *size), np.uint8), np.arange(count) % classes
        images.train, images.data, images.targets = train, pixels, labels.tolist()
        images.classes = [str(number) for number in range(classes)]
        if size == _DIGITS:
            with _disable_current_modes():
                images.data, images.targets = torch.from_numpy(pixels), torch.from_numpy(labels)

    return init


# -- tokenizers of tiktoken -------------------------------------------------------------------------------------

_P50K = (*range(50_256), *range(50_257, 50_281))  # a special one is between them
# Its encodings, and the numbers that their words have, besides the special ones.
_WORDS_OF: dict[str, Sequence[int]] = {
    "gpt2": range(50_256), "r50k_base": range(50_256), "p50k_base": _P50K, "p50k_edit": _P50K,
    "cl100k_base": range(100_256), "o200k_base": range(199_998), "o200k_harmony": range(199_998),
}  # fmt: skip


@contextmanager
def _known_anew() -> Iterator[None]:
    """In the context, tiktoken keeps encodings of the capture alone."""
    registry = importlib.import_module("tiktoken.registry")
    with replaced(registry, "ENCODINGS", {}), replaced(registry, "ENCODING_CONSTRUCTORS", None):
        yield


@contextmanager
def _encodings(fakes: Fakes, note: NoteTaker) -> Iterator[None]:
    """In the context, encodings are made that are named, or cannot be downloaded: each byte is a token."""
    published = importlib.import_module("tiktoken_ext.openai_public")

    def of(name: str, original: Callable[[], Any]) -> Callable[[], Any]:
        def construct() -> Any:
            why = "as --fake-data asks"
            if name not in fakes.data:
                try:
                    return original()
                except OSError:
                    why = "which cannot be downloaded here"
            fakes.asked.add(name)
            note(f"{name}: an encoding of as many words as published, in which each byte is a token, {why}")
            words = {bytes([byte]): byte for byte in range(256)}
            words |= {b"\xff\xff" + number.to_bytes(4): number for number in _WORDS_OF[name][256:]}
            with ExitStack() as stack:
                for loads in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
                    stack.enter_context(replaced(published, loads, lambda *_, **__: words))
                return original()

        return construct

    originals = published.ENCODING_CONSTRUCTORS
    made = {name: of(name, originals[name]) for name in _WORDS_OF if name in originals}
    with replaced(published, "ENCODING_CONSTRUCTORS", {**originals, **made}):
        yield


# -- data sets of the hub ---------------------------------------------------------------------------------------

_GLUE = {"sentence1": 22, "sentence2": 22, "label": ("not_equivalent", "equivalent"), "idx": int}
_WIKI = {"text": 60}
# Name on the hub: columns, each with the words of a text (a choice of ours: cards do not state them), the size
# of an image, the names of its classes or `int`; rows of each split, as the data set's card has both.
_COLUMNS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "nyu-mll/glue": (_GLUE, {"train": 3668, "validation": 408, "test": 1725}),  # of the configuration mrpc
    "roneneldan/TinyStories": ({"text": 170}, {"train": 2_119_719, "validation": 21_990}),
    "Salesforce/wikitext": (_WIKI, {"train": 36_718, "validation": 3_760, "test": 4_358}),
    "wikitext": (_WIKI, {"train": 36_718, "validation": 3_760, "test": 4_358}),
    "tatsu-lab/alpaca": ({"instruction": 12, "input": 4, "output": 45, "text": 90}, {"train": 52_002}),
    "yahma/alpaca-cleaned": ({"output": 110, "input": 4, "instruction": 12}, {"train": 51_760}),
    "Dahoas/rm-static": (
        {"prompt": 120, "response": 50, "chosen": 50, "rejected": 50}, {"train": 76_256, "test": 5_103},
    ),
    "stanfordnlp/imdb": ({"text": 230, "label": ("neg", "pos")}, {"train": 25_000, "test": 25_000}),
}  # fmt: skip
_DIGITS_OF_HUB = {"image": _DIGITS, "label": tuple(map(str, range(10)))}
_DIGITS_ROWS = {"train": 60_000, "test": 10_000}
_COLUMNS |= {
    "mnist": (_DIGITS_OF_HUB, _DIGITS_ROWS), "ylecun/mnist": (_DIGITS_OF_HUB, _DIGITS_ROWS),
    "fashion_mnist": (_DIGITS_OF_HUB, _DIGITS_ROWS),
    "zalando-datasets/fashion_mnist": (_DIGITS_OF_HUB, _DIGITS_ROWS),
    "uoft-cs/cifar10": (
        {"img": _PICTURES, "label": tuple(map(str, range(10)))}, {"train": 50_000, "test": 10_000},
    ),
}  # fmt: skip
_COLUMNS["cifar10"] = _COLUMNS["uoft-cs/cifar10"]
_WORDS = 1000


def _rows(
    named: Mapping[str, Path | None], asked: set[str], original: Callable[..., Any], note: NoteTaker
) -> Callable[..., Any]:
    def load(path: str, name: Any = None, *args: Any, split: Any = None, **kwargs: Any) -> Any:
        if path not in named:
            return original(path, name, *args, split=split, **kwargs)
        asked.add(path)
        file = named[path]
        if file is not None:
            kind = {".jsonl": "json", ".txt": "text"}.get(file.suffix, file.suffix[1:])
            made = original(kind, data_files=str(file), split="train")
            parts = {"train": made, "validation": made, "test": made}
            note(f"{path}: {len(made):,} rows of {file.name}, for each of its splits, as --fake-data asks")
        else:
            columns, sizes = _COLUMNS[path]
            parts = {part: _made(columns, min(count, MOST_ROWS)) for part, count in sizes.items()}
            note(
                f"{path}: columns as published ({', '.join(columns)}), random words, at most {MOST_ROWS:,} rows, "
                "as --fake-data asks"
            )
        if split is not None:
            name = str(split).partition("[")[0].partition("+")[0]
            part = made if file is not None else parts[name]
            return part.to_iterable_dataset() if kwargs.get("streaming") else part
        package = importlib.import_module("datasets")
        return package.DatasetDict(parts) if file is None else _any_split(package, parts, made)

    return load


def _any_split(package: Any, parts: Mapping[str, Any], rows: Any) -> Any:
    """Rows for each split, whatever a data set calls it: who asks for one more by its name has them, too."""
    return type("AnySplit", (package.DatasetDict,), {"__missing__": lambda *_: rows})(parts)


def _made(columns: Mapping[str, Any], count: int) -> Any:
    package = importlib.import_module("datasets")
    drawn = random.Random(0)
    rows: dict[str, list[Any]] = {}
    features = {}
    for name, kind in columns.items():
        if isinstance(kind, tuple) and isinstance(kind[0], int):
            blank = importlib.import_module("PIL.Image").fromarray(np.zeros(kind, np.uint8))
            rows[name], features[name] = [blank] * count, package.Image()
        elif isinstance(kind, tuple):
            rows[name] = [number % len(kind) for number in range(count)]
            features[name] = package.ClassLabel(names=list(kind))
        elif kind is int:
            rows[name], features[name] = list(range(count)), package.Value("int32")
        else:
            lengths = [drawn.randint(kind // 2, kind + kind // 2) for _ in range(count)]
            rows[name] = [" ".join(f"w{drawn.randrange(_WORDS)}" for _ in range(length)) for length in lengths]
            features[name] = package.Value("string")
    return package.Dataset.from_dict(rows, features=package.Features(features))


class AnyWeights(dict[str, Any]):
    """What a file of weights has, for whichever model takes it: parts are such weights, too, and names none."""

    def __missing__(self, name: str) -> AnyWeights:
        """A part of it, as `file["model"]`."""
        return self

    def pop(self, name: str, default: Any = None) -> Any:
        """Of what is not to be taken there is nothing."""
        del name
        return default


# Files that hold a list of weights, and the shapes in it: what takes them counts them.
_LISTS = {"lpips_weights.pt": [(1, width, 1, 1) for width in (64, 128, 256, 512, 512)]}
WEIGHTS = (".pth", ".pt", ".ckpt", ".bin", ".tar", ".safetensors")
"""Endings of files of weights."""


def _file_of(url: str) -> str:
    return Path(urlparse(url).path).name


def _of_torchvision(url: str) -> dict[str, Any]:
    """What a file of torchvision's weights has, by name; nothing where the file is another's."""
    place, _, file = url.rpartition("/")
    if place != "https://download.pytorch.org/models" or importlib.util.find_spec("torchvision") is None:
        return {}
    models = importlib.import_module("torchvision.models")
    stem = file.partition("-")[0]
    files = ((name, _file_of(one.url)) for name in models.list_models() for one in models.get_model_weights(name))
    name = next((name for name, known in files if known.partition("-")[0] == stem), None)
    if name is None:
        return {}
    with _disable_current_modes(), torch.device("meta"):
        held = models.get_model(name, weights=None).state_dict()
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in held.items()}


def _files(names: frozenset[str], asked: set[str], note: NoteTaker) -> Iterator[Any]:
    """In the contexts, files that PyTorch downloads or loads are there; a model has what they say already."""
    fetched: dict[Path, str] = {}

    def tell(name: str) -> None:
        why = "as --fake-weights asks" if name in names else "which cannot be downloaded here"
        note(f"{name}: weights of the shapes of the model that takes them, {why}")
        asked.add(name)

    def downloading(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def download(url: str, dst: Any = None, *args: Any, **kwargs: Any) -> Any:
            if _file_of(url) not in names:
                try:
                    return original(url, dst, *args, **kwargs)
                except URLError as error:
                    # Weights have no values here, whether they were downloaded or not.
                    if dst is None or isinstance(error, HTTPError) or not _file_of(url).endswith(WEIGHTS):
                        raise
            tell(_file_of(url))
            dst = dst or _file_of(url)
            fetched[Path(dst).absolute()] = url
            return dst, {}  # of which `urlretrieve` alone makes something

        return download

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(f, str | os.PathLike):
                return original(f, *args, **kwargs)
            name = Path(f).name
            if name in names and not Path(f).is_file():
                tell(name)
            elif Path(f).absolute() not in fetched:
                return original(f, *args, **kwargs)
            if name in _LISTS:
                return [torch.empty(size) for size in _LISTS[name]]
            return _of_torchvision(fetched.get(Path(f).absolute(), "")) or AnyWeights()

        return load

    def taking(original: Callable[..., Any]) -> Callable[..., Any]:
        def take(module: torch.nn.Module, /, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(state_dict, AnyWeights):
                return original(module, module.state_dict(), *args, **kwargs)
            return original(module, state_dict, *args, **kwargs)

        return take

    yield patched(torch.hub, "download_url_to_file", downloading)
    yield patched(urllib.request, "urlretrieve", downloading)
    yield patched(torch, "load", loading)
    yield patched(torch.nn.Module, "load_state_dict", taking)


class _Metric:
    """What `evaluate.load` would download: it counts nothing."""

    def add_batch(self, **_: Any) -> None:
        """Of a batch there are no values."""

    add = add_batch

    def compute(self, **_: Any) -> dict[str, float]:
        """Nothing."""
        return {}


# -- models of the hub ------------------------------------------------------------------------------------------


def _asking_for(folder: str, fakes: Fakes) -> OnOpen:
    """A model is asked for where a file of its folder is opened, whoever opens it."""
    names = {f"{folder}{os.sep}{_folder_of(name)}{os.sep}": name for name in fakes.weights}

    def told(path: str, _: str) -> None:
        fakes.asked.update(name for start, name in names.items() if path.startswith(start))

    return told


_REVISION = "0" * 40
_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "[CLS]", "[SEP]", "[MASK]")
_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
_hubs: dict[int, tuple[Fakes, Path]] = {}


OF_DIFFUSERS = "_class_name"
"""Says in a configuration which class of diffusers it is of."""
_DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"


def _folder_of(name: str, kind: str = "models") -> str:
    """Of a model, or of what else is there, in a cache of the hub."""
    return f"{kind}--{name.replace('/', '--')}"


def _hub(fakes: Fakes, note: NoteTaker) -> Path:
    """A cache of the hub with the models, and with what the user's own has; the same for all runs of a capture."""
    for name in fakes.weights:
        note(f"{name}: weights without values, of the shapes of its configuration, as --fake-weights asks")
    if id(fakes) in _hubs:
        return _hubs[id(fakes)][1]
    folder = Path(tempfile.mkdtemp(prefix="echograph-hub-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    own = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    for there in own.iterdir() if own.is_dir() else ():
        (folder / there.name).symlink_to(there)
    for name, config in fakes.weights.items():
        _model(config, _snapshot(folder, "models", name))
    _hubs[id(fakes)] = fakes, folder
    return folder


def _snapshot(hub: Path, kind: str, name: str) -> Path:
    """The folder that a cache of the hub has of a model or a data set: what is there is its newest."""
    at = hub / _folder_of(name, kind)
    if at.is_symlink():  # to the user's own
        at.unlink()
    snapshot = at / "snapshots" / _REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    (at / "refs").mkdir(exist_ok=True)
    (at / "refs" / "main").write_text(_REVISION)
    return snapshot


def _model(given: Mapping[str, Any], folder: Path) -> None:
    """Writes what the hub has of a model: configuration, tokenizer, names and shapes of weights."""
    if (name := given.get(OF_DIFFUSERS)) is not None:
        (folder / "config.json").write_text(json.dumps(dict(given)))
        with _disable_current_modes(), torch.device("meta"):
            _weights(getattr(_package("diffusers"), name).from_config(dict(given)), folder / _DIFFUSERS_FILE)
        return
    library = _package("transformers")
    kind = getattr(library, given["architectures"][0])
    config = kind.config_class.from_dict(dict(given))
    config.save_pretrained(folder)
    with _disable_current_modes(), torch.device("meta"):
        _weights(kind(config), folder / "model.safetensors")
    _tokenizer(folder, getattr(config, "vocab_size", None) or 32_000, "CausalLM" in kind.__name__)


def _weights(model: torch.nn.Module, path: Path) -> None:
    """Writes names and shapes of a model's weights, as files of safetensors have them."""
    # As files are: of weights that are tied there is one.
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    header, end = {}, 0
    for name, tensor in held.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # the rest takes no place on the disk


def _tokenizer(folder: Path, vocabulary: int, begins: bool) -> None:
    """A tokenizer of as many words as the model has, each of which is one token."""
    tokenizers = _package("tokenizers")
    names: Sequence[str] = [*_SPECIAL, *(f"w{number}" for number in range(vocabulary - len(_SPECIAL)))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(names)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    single, pair = ("<s> $A", "<s> $A $B:1") if begins else ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(word, number) for number, word in enumerate(_SPECIAL)]
    )
    made.save(str(folder / "tokenizer.json"))
    special = {"unk": 0, "bos": 1, "eos": 2, "pad": 3, "cls": 4, "sep": 5, "mask": 6}
    told: dict[str, Any] = {f"{name}_token": _SPECIAL[number] for name, number in special.items()}
    told |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20, "chat_template": _CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


_CHAT = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
