"""What newer releases took away, for scripts that were written before: names, modules, arguments.

Only what is known to be as it was: another name for the same, an argument that chose what is printed, a default.
Where it is asked for, a note says so: with the same packages, real ranks would stop there.
"""

from __future__ import annotations

import argparse
import collections.abc
import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler
from torch.utils.data import Sampler

from echograph.frontend.scripts import older_calls, older_transformers
from echograph.frontend.scripts.adapter import once_imported, patched
from echograph.frontend.scripts.older_transformers import LEFT_OUT, SAID_OTHERWISE, derived, said_otherwise
from echograph.frontend.scripts.values import NoteTaker, caller

# Module: its name of what is gone -> where the same is, as module:name; a module alone is the whole of it.
_NAMES: dict[str, dict[str, str]] = {
    "PIL.Image": {name: f"PIL.Image:{now}" for name, now in (
        ("ANTIALIAS", "LANCZOS"), ("LINEAR", "BILINEAR"), ("CUBIC", "BICUBIC"),
    )},
    "collections": {name: f"collections.abc:{name}" for name in collections.abc.__all__},
    "fractions": {"gcd": "math:gcd"},
    "inspect": {"getargspec": "echograph.frontend.scripts.older_calls:argspec"},
    "matplotlib.cm": {"get_cmap": "matplotlib.pyplot:get_cmap"},
    "networkx": {f"from_{kind}_matrix": f"networkx:from_{kind}_array" for kind in ("numpy", "scipy_sparse")},
    "numpy": {
        **{name: f"builtins:{name}" for name in ("bool", "complex", "float", "int", "object", "str")},
        "unicode": "builtins:str", "long": "builtins:int",
        **{name: f"numpy:{now}" for name, now in (
            ("Inf", "inf"), ("Infinity", "inf"), ("NAN", "nan"), ("NaN", "nan"), ("alltrue", "all"),
            ("cfloat", "complex128"), ("complex_", "complex128"), ("cumproduct", "cumprod"), ("float_", "float64"),
            ("in1d", "isin"), ("infty", "inf"), ("mat", "asmatrix"), ("product", "prod"), ("round_", "round"),
            ("row_stack", "vstack"), ("sometrue", "any"), ("string_", "bytes_"), ("trapz", "trapezoid"),
            ("unicode_", "str_"), ("PINF", "inf"), ("bool8", "bool_"), ("int0", "intp"), ("uint0", "uintp"),
        )},
        **{name: f"numpy.exceptions:{name}" for name in (
            "AxisError", "ComplexWarning", "DTypePromotionError", "ModuleDeprecationWarning", "RankWarning",
            "TooHardError", "VisibleDeprecationWarning",
        )},
        "sctypes": f"{__name__}:SCALARS",
    },
    "peft": {"prepare_model_for_int8_training": "peft:prepare_model_for_kbit_training"},
    "pytorch_lightning.utilities.types": dict.fromkeys(("EPOCH_OUTPUT", "LRSchedulerType"), "typing:Any"),
    "pytorch_lightning.utilities.seed": {"seed_everything": "pytorch_lightning:seed_everything"},
    **older_transformers.NAMES,
    "scipy.misc": {name: f"scipy.special:{name}" for name in ("comb", "factorial", "logsumexp")},
    "skimage.measure": {
        "compare_mse": "skimage.metrics:mean_squared_error",
        "compare_psnr": "skimage.metrics:peak_signal_noise_ratio",
        "compare_ssim": "skimage.metrics:structural_similarity",
    },
    "sklearn.externals": {"joblib": "joblib", "six": "six"},
    "time": {"clock": "time:perf_counter"},
    "torch._utils": {"_accumulate": "itertools:accumulate"},
    "torch.nn.modules.linear": {"_LinearWithBias": "torch.nn.modules.linear:NonDynamicallyQuantizableLinear"},
    **{f"torchvision.transforms{of}": {
        "RandomSizedCrop": "torchvision.transforms:RandomResizedCrop", "Scale": "torchvision.transforms:Resize",
    } for of in ("", ".transforms")},
}  # fmt: skip
# Modules that are gone as a whole.
_MODULES: dict[str, dict[str, str]] = {
    **older_transformers.MODULES,
    "pytorch_lightning.callbacks.base": {"Callback": "pytorch_lightning:Callback"},
    "pytorch_lightning.core.lightning": {"LightningModule": "pytorch_lightning:LightningModule"},
    "pytorch_lightning.loggers.base": {
        "LightningLoggerBase": "pytorch_lightning.loggers.logger:Logger",
        "rank_zero_experiment": "pytorch_lightning.loggers.logger:rank_zero_experiment",
    },
    "pytorch_lightning.utilities.distributed": {"": "pytorch_lightning.utilities.rank_zero"},
    "ruamel_yaml": {"": "yaml"},
    "sklearn.cross_validation": {"": "sklearn.model_selection"},
    "torch._six": {
        "container_abcs": "collections.abc", "inf": "math:inf", "int_classes": "builtins:int", "nan": "math:nan",
        "string_classes": "builtins:str",
    },
    "torchvision.models.utils": {"load_state_dict_from_url": "torch.hub:load_state_dict_from_url"},
    "torchvision.transforms.functional_tensor": {"": "torchvision.transforms._functional_tensor"},
}  # fmt: skip
# Functions whose arguments have to be named now, in the order in which they stood.
_NAMED = {
    "librosa.core.audio": ("load", "resample"), "librosa.core.spectrum": ("stft",),
    "librosa.feature.spectral": ("melspectrogram", "mfcc"), "librosa.filters": ("mel",),
    "librosa.util.utils": ("pad_center",),
}  # fmt: skip
# Arguments that have another name now: place of a class or function -> its old name -> the one it has.
_RENAMED = {
    "torchvision.transforms.functional:affine": {"resample": "interpolation", "fillcolor": "fill"},
    "torchvision.transforms.functional:rotate": {"resample": "interpolation"},
    "torchvision.transforms.transforms:RandomAffine": {"resample": "interpolation", "fillcolor": "fill"},
    "torchvision.transforms.transforms:RandomRotation": {"resample": "interpolation"},
    "torchvision.utils:make_grid": {"range": "value_range"},
    "timm.scheduler.cosine_lr:CosineLRScheduler": {"t_mul": "cycle_mul", "decay_rate": "cycle_decay"},
    **older_transformers.RENAMED,
}  # fmt: skip
SCALARS = {
    "int": [np.int8, np.int16, np.int32, np.int64], "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
    "float": [np.float16, np.float32, np.float64, np.longdouble],
    "complex": [np.complex64, np.complex128, np.clongdouble], "others": [bool, object, bytes, str, np.void],
}  # fmt: skip
"""`numpy.sctypes`."""


@contextmanager
def installed(note: NoteTaker) -> Iterator[None]:
    """In the context, scripts find what there was.

    Args:
        note: is told what they asked for.
    """
    with ExitStack() as stack:
        for name, names in _NAMES.items():
            stack.enter_context(once_imported(name, partial(_having, name, names, note)))
        for name, functions in _NAMED.items():
            stack.enter_context(once_imported(name, partial(_by_place, name, functions, note)))
        for place, names in _RENAMED.items():
            module, _, owner = place.partition(":")
            stack.enter_context(once_imported(module, partial(_by_new_name, module, owner, names, note)))
        stack.enter_context(once_imported("transformers.hf_argparser", partial(_older_options, note)))
        stack.enter_context(once_imported("timm.models._factory", _without_nothing))
        stack.enter_context(once_imported(_OBSERVING, partial(_of_the_same_space, note)))
        for kept in (
            *_arguments(note),
            *older_calls.installed(note),
            *older_transformers.contexts(note),
            _modules(note),
        ):
            stack.enter_context(kept)
        yield


def _of(place: str) -> Any:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _answering(module: str, names: Mapping[str, str], note: NoteTaker) -> Callable[[str], Any]:
    """`__getattr__` of a module that has names no more."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        line = caller()
        if line is not None:
            note(
                f"{line} asks for {module}.{name}, which is no more: {names[name].replace(':', '.')} stands for it"
            )
        return _of(names[name])

    return get


@contextmanager
def _having(module: str, names: Mapping[str, str], note: NoteTaker) -> Iterator[None]:
    """In the context, a module has names that it has no more."""
    kind, old = type(sys.modules[module]), _answering(module, names, note)
    if kind is not ModuleType:  # Transformers makes its own, and may make it once more
        with patched(kind, "__getattr__", partial(_lazily, module, names, old)):
            yield
        return
    contents = vars(sys.modules[module])
    before = contents.get("__getattr__")
    contents["__getattr__"] = lambda name: old(name) if before is None or name in names else before(name)
    try:
        yield
    finally:
        if before is None:
            del contents["__getattr__"]
        else:
            contents["__getattr__"] = before


def _lazily(
    module: str, names: Mapping[str, str], old: Callable[[str], Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """`__getattr__` of a class of modules, one of which has names no more."""

    def get(self: ModuleType, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if self.__name__ != module or name not in names:
                raise
            return old(name)

    return get


@contextmanager
def _modules(note: NoteTaker) -> Iterator[None]:
    """In the context, modules are found that are no more."""
    finder = _Gone(note)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            parent, _, child = name.rpartition(".")
            if isinstance(getattr(sys.modules.pop(name, None), "__loader__", None), _Gone):
                delattr(sys.modules[parent], child)


def _gone(name: str) -> dict[str, str]:
    return _MODULES.get(name) or older_transformers.moved(name)


class _Gone(Loader, MetaPathFinder):
    """Finds modules that are no more, where their packages are."""

    def __init__(self, note: NoteTaker) -> None:
        self._note = note
        self.made: list[str] = []

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """One for each of them; asked last, so for what is not there."""
        return ModuleSpec(name, self) if _gone(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module of the names that are known."""
        module = ModuleType(spec.name)
        names = _gone(spec.name)
        self.made.append(spec.name)
        whole = names.get("")
        if whole is not None:
            self._note(f"the module {spec.name} is no more: {whole} stands for it")
            vars(module).update(vars(_of(whole)), __getattr__=partial(getattr, _of(whole)))
        else:
            vars(module)["__getattr__"] = _answering(spec.name, names, self._note)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It is complete."""


@contextmanager
def _by_place(module: str, functions: tuple[str, ...], note: NoteTaker) -> Iterator[None]:
    """In the context, functions of a module take by place what today has to be named."""

    def taking(original: Callable[..., Any]) -> Callable[..., Any]:
        asked = inspect.signature(original).parameters.values()
        names = [one.name for one in asked if one.kind is not one.VAR_KEYWORD]
        places = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in asked)

        def take(*args: Any, **kwargs: Any) -> Any:
            if len(args) > places:
                note(
                    f"{module}.{original.__name__} takes arguments by name alone by now: those by place are named"
                )
            return original(*args[:places], **dict(zip(names[places:], args[places:], strict=False)), **kwargs)

        return take

    with ExitStack() as stack:
        for name in functions:
            if hasattr(sys.modules[module], name):
                stack.enter_context(patched(sys.modules[module], name, taking))
        yield


@contextmanager
def _without_nothing() -> Iterator[None]:
    """In the context, timm hands models of a script no arguments that are None, as before it had its own."""

    def entering(original: Callable[..., Any]) -> Callable[..., Any]:
        def entrypoint(*args: Any, **kwargs: Any) -> Any:
            make = original(*args, **kwargs)
            if make.__module__.partition(".")[0] == "timm":
                return make
            return lambda **given: make(**{name: value for name, value in given.items() if value is not None})

        return entrypoint

    with patched(sys.modules["timm.models._factory"], "model_entrypoint", entering):
        yield


_OBSERVING = "gymnasium.wrappers.transform_observation"


@contextmanager
def _of_the_same_space(note: NoteTaker) -> Iterator[None]:
    """In the context, what changes observations need not be told their space: it is the environment's."""

    def taking(original: Callable[..., None]) -> Callable[..., None]:
        def init(wrapper: Any, /, env: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) + len(kwargs) == 1:
                note("gymnasium's TransformObservation asks for a space of observations: it is the environment's")
                kwargs["observation_space"] = env.observation_space
            original(wrapper, env, *args, **kwargs)

        return init

    with patched(sys.modules[_OBSERVING].TransformObservation, "__init__", taking):
        yield


@contextmanager
def _by_new_name(module: str, owner: str, names: Mapping[str, str], note: NoteTaker) -> Iterator[None]:
    """In the context, a class or a function takes arguments by the names that they had, and those left out."""
    said = f"{module}.{owner}"

    def taking(original: Callable[..., Any]) -> Callable[..., Any]:
        asked = inspect.signature(original).parameters

        def take(*args: Any, **kwargs: Any) -> Any:
            for old in [old for old in names if old in kwargs and old not in asked]:
                note(_SAME.format(said, old, names[old]))
                kwargs[names[old]] = kwargs.pop(old)
            for old in [
                old for old in LEFT_OUT.get(f"{module}:{owner}", ()) if old in kwargs and old not in asked
            ]:
                note(_NO_MORE.format(said, old))
                del kwargs[old]
            if owner == "TrainingArguments":
                said_otherwise(kwargs, asked, note)
            return original(*args, **kwargs)

        return take

    found = getattr(sys.modules[module], owner)
    place, name = (found, "__init__") if isinstance(found, type) else (sys.modules[module], owner)
    with patched(place, name, taking), derived(taking) if owner == "TrainingArguments" else nullcontext():
        yield


_SAME = "{} has no argument {} any more: {} is the same"
_NO_MORE = "{} has no argument {} any more: it is left out, and decided nothing of a step"


@contextmanager
def _older_options(note: NoteTaker) -> Iterator[None]:
    """In the context, a parser of the fields of such a class takes them on the command line as well."""

    class Ignored(argparse.Action):
        def __call__(self, *_: Any, **__: Any) -> None:
            note(_NO_MORE.format("transformers' TrainingArguments", self.dest))

    class Otherwise(argparse.Action):
        def __call__(self, _: Any, namespace: Any, value: Any, *__: Any) -> None:
            given = {self.dest: value, "fsdp_config": getattr(namespace, "fsdp_config", None)}
            said_otherwise(given, {}, note)
            vars(namespace).update(given)

    def adding(original: Callable[..., None]) -> Callable[..., None]:
        def add(parser: Any, kind: Any) -> None:
            original(parser, kind)
            options, place = parser._option_string_actions, "transformers.training_args:TrainingArguments"
            if not any(base.__name__ == "TrainingArguments" for base in kind.__mro__):
                return
            for option in parser._actions:  # on where nothing follows, as of release 4
                if option.type is by_word and option.nargs is None:
                    option.nargs, option.const = "?", True
            renamed = _RENAMED[place] | (
                _RENAMED["trl.trainer.sft_config:SFTConfig"] if kind.__name__ == "SFTConfig" else {}
            )
            for old, now in renamed.items():
                if f"--{old}" not in options and f"--{now}" in options:
                    options[f"--{old}"] = options[f"--{now}"]
            for action, names in ((Ignored, LEFT_OUT[place]), (Otherwise, SAID_OTHERWISE)):
                for old in names:
                    if f"--{old}" not in options:
                        parser.add_argument(f"--{old}", action=action, nargs="?", default=argparse.SUPPRESS)

        return add

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        def parse(parser: Any, args: dict[str, Any], *given: Any, **named: Any) -> Any:
            for kind in parser.dataclass_types:
                if any(base.__name__ == "TrainingArguments" for base in kind.__mro__):
                    args = _by_what_there_is(dict(args), kind.__dataclass_fields__, note)
            return original(parser, args, *given, **named)

        return parse

    parsing = sys.modules["transformers.hf_argparser"]
    kind, by_word = parsing.HfArgumentParser, parsing.string_to_bool
    with patched(kind, "_add_dataclass_arguments", adding), patched(kind, "parse_dict", reading):
        yield


def _by_what_there_is(given: dict[str, Any], asked: Mapping[str, Any], note: NoteTaker) -> dict[str, Any]:
    """Arguments of the trainer, of a file, by the names that they have; those that decide nothing are left out."""
    place = "transformers.training_args:TrainingArguments"
    for old, now in _RENAMED[place].items():
        if old in given and old not in asked:
            note(_SAME.format("transformers' TrainingArguments", old, now))
            given[now] = given.pop(old)
    for old in LEFT_OUT[place]:
        if old in given and old not in asked:
            note(_NO_MORE.format("transformers' TrainingArguments", old))
            del given[old]
    said_otherwise(given, asked, note)
    return given


def _arguments(note: NoteTaker) -> Iterator[AbstractContextManager[None]]:
    """In the contexts, PyTorch takes what it took: `verbose` of schedulers, data of samplers, `stft` as it was."""
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "__init__" in vars(kind):
            yield patched(kind, "__init__", partial(_quiet, note))
    if "__init__" not in vars(Sampler):
        yield patched(Sampler, "__init__", lambda _: lambda sampler, data_source=None: None)
    yield patched(torch, "stft", _real)
    yield patched(random, "seed", partial(_by_any_integer, note))


def _by_any_integer(note: NoteTaker, original: Callable[..., None]) -> Callable[..., None]:
    """`random.seed`, which took integers of NumPy before Python 3.11."""

    def seed(a: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(a, np.integer):
            note("random.seed takes no integers of NumPy any more: the same one of Python seeds")
            a = int(a)
        original(a, *args, **kwargs)

    return seed


def _quiet(note: NoteTaker, original: Callable[..., None]) -> Callable[..., None]:
    asked = inspect.signature(original).parameters

    def init(*args: Any, **kwargs: Any) -> None:
        if "verbose" not in asked and ("verbose" in kwargs or len(args) == len(asked) + 1):
            note("schedulers take no `verbose` any more, by which they printed the learning rate: it is left out")
            kwargs.pop("verbose", None)
            args = args[: len(asked)]
        original(*args, **kwargs)

    return init


def _real(original: Callable[..., Any]) -> Callable[..., Any]:
    """`stft`, which made two real numbers of each complex one where nobody said which."""

    def stft(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        said = len(args) > 8 or kwargs.get("return_complex") is not None or input.is_complex()
        return original(input, *args, **kwargs if said else kwargs | {"return_complex": False})

    return stft
