"""Calls of other packages as they were: methods and arguments that newer releases took away.

Each does what the release before it did, and is there for as long as a script runs.
"""

from __future__ import annotations

import argparse
import collections
import enum
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from echograph.frontend.scripts.adapter import once_imported, patched
from echograph.frontend.scripts.values import NoteTaker

ArgSpec = collections.namedtuple("ArgSpec", ("args", "varargs", "keywords", "defaults"))


def argspec(func: Callable[..., Any]) -> ArgSpec:
    """`inspect.getargspec`."""
    return ArgSpec(*inspect.getfullargspec(func)[:4])


# Module:class -> its method that is no more -> what it did.
_METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "PIL.ImageDraw:ImageDraw": {
        "textsize": lambda draw, text, font=None, *_, **__: tuple(draw.textbbox((0, 0), text, font)[2:]),
    },
    "PIL.ImageFont:FreeTypeFont": {"getsize": lambda font, text, *_, **__: tuple(font.getbbox(text)[2:])},
    "matplotlib.backends.backend_agg:FigureCanvasAgg": {
        "tostring_rgb": lambda canvas: np.asarray(canvas.buffer_rgba())[..., :3].tobytes(),
    },
    "torch.utils.data.dataloader:_BaseDataLoaderIter": {"next": lambda loading: next(loading)},
}
_WITH_WEIGHTS = ("densenet", "mobilenetv2", "resnet", "shufflenetv2", "squeezenet", "vgg")


def installed(note: NoteTaker) -> Iterator[AbstractContextManager[None]]:
    """In the contexts, scripts call what there was.

    Args:
        note: is told what they called.
    """
    for place, methods in _METHODS.items():
        module, _, owner = place.partition(":")
        yield once_imported(module, partial(_having, module, owner, methods, note))
    for name in _WITH_WEIGHTS:
        yield once_imported(f"torchvision.models.{name}", partial(_addresses, f"torchvision.models.{name}"))
    yield once_imported("torchvision.transforms.transforms", partial(_jittering, note))
    yield once_imported("skimage.metrics", partial(_of_channels, note))
    yield once_imported("yaml", partial(_loading, note))
    yield patched(np, "fromstring", partial(_of_bytes, note))
    yield patched(argparse.ArgumentParser, "parse_known_args", partial(_by_either_name, note))


@contextmanager
def _of_channels(note: NoteTaker) -> Iterator[None]:
    """In the context, the similarity of images takes `multichannel`, which it passes over without a word now."""

    def comparing(original: Callable[..., Any]) -> Callable[..., Any]:
        def compare(*args: Any, multichannel: bool | None = None, **kwargs: Any) -> Any:
            if multichannel is not None:
                note("skimage's structural_similarity takes no multichannel any more: channel_axis is the last")
                kwargs.setdefault("channel_axis", -1 if multichannel else None)
            return original(*args, **kwargs)

        return compare

    with patched(sys.modules["skimage.metrics"], "structural_similarity", comparing):
        yield


@contextmanager
def _having(module: str, owner: str, methods: dict[str, Callable[..., Any]], note: NoteTaker) -> Iterator[None]:
    """In the context, a class has methods that it has no more."""
    kind = getattr(sys.modules[module], owner)

    def telling(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(f"{module}.{owner} has no {name} any more: the same is made of what it has")
            return method(*args, **kwargs)

        return call

    added = [name for name in methods if not hasattr(kind, name)]
    for name in added:
        setattr(kind, name, telling(name, methods[name]))
    try:
        yield
    finally:
        for name in added:
            delattr(kind, name)


@contextmanager
def _addresses(module: str) -> Iterator[None]:
    """In the context, a module of torchvision's models has where their weights lie, by the names of the models."""
    contents = vars(sys.modules[module])
    kinds = [
        kind for name, kind in contents.items() if name.endswith("_Weights") and isinstance(kind, enum.EnumMeta)
    ]
    first: dict[str, list[Any]] = {
        kind.__name__.removesuffix("_Weights").lower(): list(kind)[:1] for kind in kinds
    }
    made = "model_urls" not in contents
    if made:
        contents["model_urls"] = {name: one.value.url for name, ones in first.items() for one in ones}
    try:
        yield
    finally:
        if made:
            del contents["model_urls"]


@contextmanager
def _jittering(note: NoteTaker) -> Iterator[None]:
    """In the context, what `ColorJitter.get_params` chooses can be called with a picture, as it could be."""
    transforms = sys.modules["torchvision.transforms.transforms"]
    adjust = [getattr(transforms.F, f"adjust_{what}") for what in ("brightness", "contrast", "saturation", "hue")]

    class Chosen(tuple[Any, ...]):
        def __call__(self, picture: Any) -> Any:
            note("what ColorJitter.get_params gives is no function any more: what it says is applied in turn")
            for at in self[0]:
                picture = picture if self[1 + at] is None else adjust[at](picture, self[1 + at])
            return picture

    def choosing(original: Callable[..., Any]) -> Any:
        return staticmethod(lambda *args, **kwargs: Chosen(original(*args, **kwargs)))

    with patched(transforms.ColorJitter, "get_params", choosing):
        yield


@contextmanager
def _loading(note: NoteTaker) -> Iterator[None]:
    """In the context, `yaml.load` need not be told what it may make: plain values, as its release 5 did."""
    yaml = sys.modules["yaml"]

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(stream: Any, Loader: Any = None) -> Any:
            if Loader is None:
                note("yaml.load asks for a Loader by now: it is FullLoader, which it was where none was given")
            return original(stream, yaml.FullLoader if Loader is None else Loader)

        return load

    with ExitStack() as stack:
        for name in ("load", "load_all"):
            stack.enter_context(patched(yaml, name, around))
        yield


def _of_bytes(note: NoteTaker, original: Callable[..., Any]) -> Callable[..., Any]:
    """`numpy.fromstring`, which took bytes as they are."""

    def fromstring(string: Any, dtype: Any = float, count: int = -1, *, sep: str = "", **kwargs: Any) -> Any:
        if sep:
            return original(string, dtype, count, sep=sep, **kwargs)
        note("numpy.fromstring takes no bytes any more: numpy.frombuffer does")
        return np.frombuffer(string.encode("latin1") if isinstance(string, str) else string, dtype, count).copy()

    return fromstring


def _by_either_name(note: NoteTaker, original: Callable[..., Any]) -> Callable[..., Any]:
    """Scripts that know `--local_rank`, as `torch.distributed.launch` said it, know `--local-rank`, as it does."""

    def parse(parser: argparse.ArgumentParser, args: Any = None, *more: Any, **named: Any) -> Any:
        options = parser._option_string_actions
        given = sys.argv[1:] if args is None else args
        said = any(str(argument).startswith("--local-rank") for argument in given)
        if said and "--local-rank" not in options and "--local_rank" in options:
            note("torch.distributed.launch says --local-rank by now: it is the script's --local_rank")
            options["--local-rank"] = options["--local_rank"]
        return original(parser, args, *more, **named)

    return parse
