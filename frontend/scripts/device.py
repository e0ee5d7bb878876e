"""The device that a script finds: a GPU for each rank of a machine, on which the fake tensors are, or none.

Fake tensors are on the CPU (the one device whose fake backward works without a GPU), where
`frontend.pytorch.device_ops` makes composite operators choose as CUDA does. So "cuda", wherever a script says it,
is the CPU here, and what asks the device is told of one that is there (`answers`). In a world without GPUs a
script that wants one is refused at the line where it does.

What a script may ask of the GPU of a capture, what is answered, and what only a real one could do. To the
questions of `torch.cuda` and `torch.accelerator` that scripts ask it answers as an H100 of 80 GB. Where a script
finds none (`World.gpus` is false), each of them is refused, as are streams and devices. What compiles or launches
code of its own, and what asks the driver, needs a real GPU: it raises, and `remedy` says what to do.
"""

from __future__ import annotations

import copy
import re
import sys
import sysconfig
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn
from urllib.request import urlopen

import torch
from torch import Tensor, _meta_registrations
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx import Node
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _foreach_utils, checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from echograph.errors import CaptureError
from echograph.frontend.pytorch import known_values
from echograph.frontend.pytorch.userfile import reason
from echograph.frontend.scripts import packed, places, smi, sparse, streams, values
from echograph.frontend.scripts.adapter import once_imported, patched, replaced
from echograph.frontend.scripts.autocast import as_on_cuda
from echograph.frontend.scripts.counts import guessed_size
from echograph.frontend.scripts.fakes import option_for
from echograph.frontend.scripts.found import finding, finds
from echograph.frontend.scripts.installed import package_of
from echograph.frontend.scripts.places import OLD_TYPES, is_gpu, mark, mark_module, moved, on_gpu
from echograph.frontend.scripts.recorder import HostCounter
from echograph.frontend.scripts.requirements import asked, installed, python, unmet
from echograph.frontend.scripts.sparse import SparseTensor
from echograph.frontend.scripts.streams import CapturedEvent, CapturedStream
from echograph.frontend.scripts.values import QUESTIONS, NoteTaker, decided_size, deciding, keep_finite
from echograph.frontend.scripts.world import NO_GPU, World

MEMORY_BYTES = 80 * 2**30
_CUDA, _NCCL = "13.0", (2, 28, 9)
# What packages with kernels of their own take where they are imported; they launch none here.
_RAW_STREAM = "_cuda_getCurrentRawStream"
_CUSTOM = "custom operator with a fake implementation (torch.library.register_fake)"
_OPERATOR = (
    f"runs code of its own on a GPU, which a capture neither sees nor has: leave it out, or make it a {_CUSTOM}"
)
_DATA_PARALLEL = (
    "torch.nn.DataParallel divides batches over all GPUs of one process, and a rank of a capture has one: let the "
    "script run a process for each (DistributedDataParallel), or give --world-size 1"
)
_GRAPHS = "CUDA graphs are not captured: leave them out, the operators are those of the eager model"
_DRIVER = "this asks a real GPU, and a capture has only the answers of one: leave it out if you can"
_NOT_ANSWERED = "the GPU of a capture, where PyTorch has no CUDA, does not answer it: leave it out if you can"
_DOWNLOAD = (
    "it is downloaded, and is not here: have it downloaded before, to where the script looks for it (a cache "
    "counts, as HF_HOME's)"
)
_SHADOWED = "the script's own {} comes before the package {}, which another one asks for: take that package away"
_BEHIND = (
    "the package {0} comes before the script's own {1}/{0}.py, on real ranks as well: take it away, or put {1} "
    "into PYTHONPATH"
)
_NOT_THERE = "what it looks for is not there: give it where the script's README says that it comes from"
# What raises by itself where there is no GPU: text of the exception -> what to do.
_REMEDIES = (
    (
        r"[Dd]ownload|urlopen|[Cc]onnection|Max retries|resolve host|name resolution|service not known|"
        r"Network is unreachable|offline mode|couldn't connect|does not appear to have a file|"
        r"cached (files|path)|from the Hub",
        _DOWNLOAD,
    ),
    (
        r"CUDA_HOME|CUDA Toolkit|nvcc|CUDA_PATH|NVRTC|nvrtc",
        "it compiles kernels of its own for a GPU, into which a capture cannot look: the script is captured only "
        "where it takes PyTorch's own operators in their place",
    ),
    (r"active drivers|[Tt]riton", f"a Triton kernel {_OPERATOR}"),
    (r"lib(cuda|cudart|cublas|cudnn|nccl|nvrtc|nvidia-ml)\w*[.\d]*\.so|NVML|nvml|nvidia-ml|no NVIDIA", _DRIVER),
    (r"not compiled with CUDA|dummy base class|'_cuda_\w+'|No CUDA GPUs", _NOT_ANSWERED),
    (
        r"no rule registered for HigherOrderOperator",
        "it takes functions, into which a capture does not look (flex_attention's masks, say): let the script "
        "take another way, as scaled_dot_product_attention; where it has one for CPUs, --device cpu takes that",
    ),
    (
        r"Could not load this library|operator torch(vision|audio)::\w+ does not exist",
        "the package is built for another PyTorch: install its build for the one that is here, or take it away",
    ),
    (
        r"modified by an inplace operation",
        "as on real ranks of today's PyTorch: an optimizer stepped, or a tensor was written, between a forward "
        "pass and the backward pass that needs what was there; make that one before, or the forward pass anew",
    ),
    (
        r"Descriptors cannot be created directly",
        "a package of it is made for protobuf before 4: PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python in the "
        "environment lets it be read",
    ),
    (
        r"Weights only load failed",
        "PyTorch takes it for a file that may run code: where it is trusted, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 "
        "in the environment lets it be read",
    ),
    (
        r"Default process group has not been initialized",
        "ranks find RANK and WORLD_SIZE in the environment, as torchrun sets them, and the script made no group: "
        "give it behind -- what it takes from its launcher as well (--local_rank 0, say)",
    ),
    (
        r"Cannot view a tensor with shape|view size is not compatible",
        "as on real ranks: what it views does not lie in memory so, which today's PyTorch refuses: reshape copies",
    ),
    (
        r"only 0-dimensional arrays can be converted",
        'as on real ranks: NumPy of 2.4 takes no array of one number for a number any more: install "numpy<2.4"',
    ),
    (
        r"EOF when reading a line",
        "it asks for a line, which it reads from the capture's standard input: echo y | echoc capture ...",
    ),
    (r"the GPU of a capture has no", "decide on something else, or leave it out"),
)
_PYTHON = Path(sysconfig.get_paths()["stdlib"])
_FOR_GPUS = ("triton", "cupy", "flash_attn", "apex", "transformer_engine")
# What brings a package of another name.
_DISTRIBUTIONS = {
    "antlr4": "antlr4-python3-runtime",
    "attr": "attrs", "bs4": "beautifulsoup4", "cv2": "opencv-python-headless", "dateutil": "python-dateutil",
    "dotenv": "python-dotenv", "faiss": "faiss-cpu", "git": "gitpython", "google": "protobuf",
    "hydra": "hydra-core",
    "PIL": "pillow", "pkg_resources": '"setuptools<81"',
    "pynvml": "nvidia-ml-py", "skbase": "scikit-base", "skimage": "scikit-image", "sklearn": "scikit-learn",
    "umap": "umap-learn", "yaml": "pyyaml",
}  # fmt: skip
_NEEDS_GPU = f"its kernels need a GPU: choose PyTorch's own operators, or make it a {_CUSTOM}"
_SOURCES = ("*.pyx", "*.cpp", "*.cc", "*.cu", "setup.py")
_BUILT = "{} is compiled from the repository's folder {}: build it there first, as its README says"
_INSTALLED = (
    "{} is no file of the repository, whose {} may write it: install it as its README says (pip install -e .)"
)
_STOOD_IN = (
    "{} is not installed, and what stands in for it has no such name: let the script take PyTorch's own operators"
)
_OF_OTHER_VERSIONS = (KeyError, NameError, RuntimeError, TypeError, ValueError)
_OTHER_VERSION = (
    "which may be why: a script that raises on real ranks, too, is captured once it runs with what is here, or "
    "from an environment with what it asks for"
)


class Properties:
    """What `torch.cuda.get_device_properties` answers."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    total_memory = MEMORY_BYTES
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 48 * 2**10
    shared_memory_per_block_optin = 227 * 2**10
    shared_memory_per_multiprocessor = 228 * 2**10
    L2_cache_size = 50 * 2**20
    is_integrated = is_multi_gpu_board = 0

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the GPU of a capture has no property '{name}'")


class Chosen:
    """`torch.cuda.device`: a context with another current GPU; a class, since types are made of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whichever is chosen, it is the one that the rank has."""

    def __enter__(self) -> None:
        """It is the current one already."""

    def __exit__(self, *_: Any) -> None:
        """It stays so."""


def remedy(error: BaseException, script: Path) -> str:
    """What to do about an exception of a script: for what a GPU, a download or another version is missing.

    Args:
        error: what it raised.
        script: the file, whose repository may say which versions it is written for.

    Returns:
        A clause; "" where nothing is known.
    """
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename and (wanted := python(Path(error.filename))):
        return f"{wanted}: install echograph there"
    if isinstance(error, ImportError) and error.name:
        return _of_package(error, error.name, script)
    names_it = re.search(r"No module named|need to install", text)  # by an exception of its own
    if names_it or (isinstance(error, ImportError) and re.search(r"requires|install(?!ed)", text)):
        return "install what it names beside echograph"
    known = next((what for pattern, what in _REMEDIES if re.search(pattern, text)), "")
    if not known and isinstance(error, FileNotFoundError) and (made := option_for(error)):
        return f"give the file, or have it made of the shapes of the model that takes it: {made}"
    looks = isinstance(error, AssertionError) and re.search(r"\b(exists|is_?file|is_?dir)\(", reason(error))
    if not known and (looks or isinstance(error, FileNotFoundError)):
        return _NOT_THERE
    if known is _DOWNLOAD:
        known, made = known.replace("it", _url(error) or "it", 1), option_for(error)
        return f"{known}, or have it made of its shapes: {made}" if made else known
    called = isinstance(error, TypeError) and re.search(r"(positional|keyword) argument", text)
    # A file that is not there is in no version.
    other_version = called or isinstance(error, AttributeError | ImportError) or _raising(error)
    if not known and not other_version and isinstance(error, _OF_OTHER_VERSIONS) and not _meant(error):
        return f"{told}, {_OTHER_VERSION}" if (told := unmet(script)) else ""
    if known or not other_version or isinstance(error, OSError):
        return known
    if own := _own_behind(error):
        return own
    raising = _raising(error)
    packages = list(dict.fromkeys((*(_called(text) if called else _owner(error)), *raising)))
    other = next(filter(None, (unmet(script, package) for package in (*packages, "torch"))), "")
    if not other and raising[:1] not in ([], ["torch"]):
        other = unmet(script)  # of what that package may come with
    if not other and not isinstance(error, ImportError):
        other = next(filter(None, map(_here, packages if called or _owner(error) else raising[:1])), "")
    return f"{other}, {_OTHER_VERSION}" if other else ""


def _url(error: BaseException) -> str:
    """What Python's own `urlopen` was to fetch, which its errors do not say; "": they do, or it is another's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is urlopen.__code__]
    asked = frames[-1].f_locals["url"] if frames else ""
    return asked if isinstance(asked, str) else str(asked.full_url)


def _meant(error: BaseException) -> bool:
    """Whether a script raises what it raised by a statement of its own, whose text says why."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].line or "").lstrip().startswith("raise ")


def _owner(error: BaseException) -> list[str]:
    """The package of what lacks an attribute: a module, or an object of a class."""
    if not isinstance(error, AttributeError):
        return []
    lacking = error.obj
    if isinstance(lacking, type) and lacking.__module__.startswith("echograph."):
        return []
    name = lacking.__name__ if isinstance(lacking, ModuleType) else type(lacking).__module__
    return [name.partition(".")[0]]


def _own_behind(error: BaseException) -> str:
    """Where a module lacks a name since a package comes before the script's own of that name; "": it does not."""
    module = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    if not isinstance(module, ModuleType) or "." in module.__name__ or not package_of(module.__file__ or ""):
        return ""
    places = (Path(folder or ".", f"{module.__name__}.py") for folder in sys.path)
    own = next((place for place in places if place.is_file() and not package_of(str(place))), None)
    return "" if own is None else _BEHIND.format(module.__name__, own.parent.name)


def _here(package: str) -> str:
    """Which version of a package is installed; "" of PyTorch, which the script's own classes are mostly of."""
    here = "" if package == "torch" else installed(package)
    return f"{here} is here, and the script may be written for another version" if here else ""


def _raising(error: BaseException) -> list[str]:
    """Packages that were running where one of them raised, the innermost first; none where the script did."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    while frames and Path(frames[-1]).is_relative_to(_PYTHON) and not package_of(frames[-1]):
        frames.pop()  # Python's own modules raise for whoever calls them
    if not frames or not package_of(frames[-1]):
        return []
    within = [package for package in map(package_of, frames) if package]
    return list(dict.fromkeys(reversed(within)))


def _called(text: str) -> list[str]:
    """Packages that have what does not take its arguments: `mel() takes 0 positional arguments`, by its name."""
    named = re.match(r"(\w+)(\.\w+)*\(\)", text)
    if named is None:
        return []
    found = (getattr(module, "__dict__", {}).get(named[1]) for module in list(sys.modules.values()))
    owners = dict.fromkeys(str(getattr(one, "__module__", "")).partition(".")[0] for one in found)
    return [owner for owner in owners if owner not in ("", "torch", "echograph")]  # torch has copies of others


def _of_package(error: ImportError, name: str, script: Path) -> str:
    """What to do where a package is not there, or is another version than the script is written for."""
    package = name.partition(".")[0]
    try:
        found = find_spec(package)
    except ValueError:  # a stand-in
        found = None
    if found is not None and found.origin is not None:
        here = installed(package)
        if here and not package_of(found.origin) and not isinstance(error, PackageNotFoundError):
            return _SHADOWED.format(Path(found.origin).name, here)
        if here and package_of(found.origin):
            wanted = unmet(script, package) or asked(script, package)
            told = f" ({wanted})" if wanted else ""
            return f"{here} has no such name: install the version that the script is written for{told}"
        folder = Path(found.origin).parent
        built = isinstance(error, ModuleNotFoundError) and any(map(list, map(folder.glob, _SOURCES)))
        if built:
            return _BUILT.format(name, folder.name)
        builds = [file for file in ("setup.py", "pyproject.toml") if (folder.parent / file).is_file()]
        return _INSTALLED.format(name, builds[0]) if builds else ""
    if not isinstance(error, ModuleNotFoundError):
        return _STOOD_IN.format(name) if found is not None and found.loader is None else ""
    folders = [Path(one) for one in (found.submodule_search_locations or () if found is not None else ())]
    if own := [each for each in folders if not package_of(str(each)) and any(each.glob("*.py"))]:
        lacks = name.rpartition(".")[2]
        return f"its folder {own[0].name} has no {lacks}: the copy of the script's repository is not whole"
    # Of a package without a place of its own, several distributions have parts.
    part = _DISTRIBUTIONS.get(package, package) if found is None else name
    wanted = asked(script, part)
    told = f" ({wanted})" if wanted else ""
    return _NEEDS_GPU if package in _FOR_GPUS else f"install {part} beside echograph{told}"


def answers(world: World) -> Iterator[AbstractContextManager[None]]:
    """Functions and classes of `torch.cuda` and its like, as a GPU of the world has them, or refused without."""
    for owner, answered in _answers(world).items():
        for name, answer in answered.items():
            if hasattr(owner, name):
                yield replaced(owner, name, _apart(answer) if world.gpus else _without(name, answer))
    if world.gpus and min(world.local_size, world.size) > 1:
        yield replaced(torch.nn, "DataParallel", _refuse(_DATA_PARALLEL))
    elif world.gpus:
        yield replaced(torch.nn.DataParallel, "scatter", _one_part)
    for name in ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle"):
        yield replaced(torch.cuda, name, _refuse(_GRAPHS))
    yield once_imported("torch.utils.cpp_extension", _no_extensions)
    if world.gpus:
        for owner, name, answer in _OF_A_GPUS_BUILD:
            if not hasattr(owner, name):
                yield _with(owner, name, answer)


@contextmanager
def _with(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In the context, an owner has an attribute that it lacks."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


class ProcessGroupNCCL:
    """What scripts ask of it: its options, of a group that they make by its backend's name."""

    class Options(SimpleNamespace):
        """Of a group, which takes none of them here."""

        def __init__(self, *_: Any, is_high_priority_stream: bool = False, **__: Any) -> None:
            super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())

    def __init__(self, *_: Any, **__: Any) -> None:
        raise CaptureError(
            "ProcessGroupNCCL: a group made past torch.distributed is not captured: let init_process_group or "
            "new_group make it"
        )


def _one_part(_: Any, inputs: tuple[Any, ...], named: dict[str, Any], *__: Any) -> tuple[Any, Any]:
    """How `DataParallel` divides a batch over one GPU."""
    there = tree_map_only(Tensor, lambda tensor: tensor.cuda(), (inputs, named))
    return (there[0],), (there[1],)


def _apart(answer: Any) -> Any:
    """A function that is no other's: PyTorch's compiler looks functions up by what they are."""
    if not isinstance(answer, FunctionType):
        return answer
    own = FunctionType(
        answer.__code__, answer.__globals__, answer.__name__, answer.__defaults__, answer.__closure__
    )
    own.__kwdefaults__ = answer.__kwdefaults__
    return own


def _answers(world: World) -> dict[Any, dict[str, Any]]:
    shared = _of_every_device(world)
    of_cuda = shared | _of_cuda(world)
    marks = dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _nothing)
    return {
        torch.cuda: of_cuda,
        torch.cuda.random: of_cuda,  # whose names `torch.cuda` has, too, as of the next
        torch.cuda.memory: of_cuda | {"_record_memory_history": _nothing, "_dump_snapshot": _nothing},
        torch.accelerator: shared
        | {
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "current_device_index": lambda: world.local_rank,
            "current_device_idx": lambda: world.local_rank,
            "set_device_index": _nothing,
            "set_device_idx": _nothing,
            "device_index": Chosen,
            "get_memory_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
            "reset_accumulated_memory_stats": _nothing,
        },
        torch.cuda.nvtx: marks,
        torch.cuda.profiler: {"start": _nothing, "stop": _nothing},
        torch.cuda.nccl: {"version": lambda: _NCCL, "is_available": lambda *_: True},
        torch.version: {"cuda": _CUDA},
        torch.backends.cudnn: {"is_acceptable": lambda *_: False},  # recurrent layers would flatten their weights
        torch.distributed: {"is_nccl_available": lambda: True},
    }


def _of_every_device(world: World) -> dict[str, Any]:
    properties = Properties()
    return {
        "is_available": lambda: True,
        "device_count": lambda: min(world.local_size, world.size),
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "synchronize": streams.synchronize,
        "empty_cache": _nothing,
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_reserved": _zero,
        "memory_stats": lambda *_, **__: defaultdict(int),
        "reset_peak_memory_stats": _nothing,
        "set_stream": _set_stream,
        "current_stream": lambda *_, **__: CapturedStream.current,
    }


def _of_cuda(world: World) -> dict[str, Any]:
    properties = Properties()
    return {
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "current_device": lambda: world.local_rank,
        "set_device": _nothing,
        "device": Chosen,
        "device_of": Chosen,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: ["sm_90"],
        "can_device_access_peer": lambda *_: True,
        "ipc_collect": _nothing,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed": _nothing,
        "seed_all": _nothing,
        "get_rng_state": _random_state,
        "get_rng_state_all": lambda *_: [_random_state()],
        "set_rng_state": _nothing,
        "set_rng_state_all": _nothing,
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_summary": lambda *_, **__: "",
        "memory_snapshot": lambda *_, **__: [],
        "reset_max_memory_allocated": _nothing,
        "reset_accumulated_memory_stats": _nothing,
        "reset_max_memory_cached": _nothing,
        "reset_peak_host_memory_stats": _nothing,
        "reset_accumulated_host_memory_stats": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "get_per_process_memory_fraction": lambda *_: 1.0,
        "get_allocator_backend": lambda: "native",
        "set_sync_debug_mode": _nothing,
        "get_sync_debug_mode": _zero,
        "initial_seed": lambda: torch.random.initial_seed(),
        **dict.fromkeys(("device_memory_used", "memory_usage", "utilization"), _zero),  # nobody uses it
        **dict.fromkeys(("temperature", "power_draw", "clock_rate"), _zero),
        "is_current_stream_capturing": lambda: False,
        "Stream": CapturedStream,
        "Event": CapturedEvent,
        "stream": streams.on,
        **OLD_TYPES,
        "default_stream": lambda *_, **__: CapturedStream.default,
    }


# What asks whether there is a GPU, and is told that there is none.
_WITHOUT: dict[str, Any] = {
    "is_available": lambda *_: False,
    "is_nccl_available": lambda: False,
    "is_initialized": lambda: False,
    "is_bf16_supported": lambda *_, **__: False,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 0,
    "current_accelerator": lambda *_, **__: None,
    "cuda": None,
}
# What PyTorch itself calls on machines without GPUs too, and what does nothing on them.
_HARMLESS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "empty_cache", "ipc_collect", "get_arch_list",
             "mark", "memory_allocated", "max_memory_allocated", "memory_reserved",
             "max_memory_reserved", "memory_stats", "reset_peak_memory_stats")  # fmt: skip


def _without(name: str, answer: Any) -> Any:
    if name in _WITHOUT:
        return _WITHOUT[name]
    return answer if name in _HARMLESS else _refuse(f"'{name}' {NO_GPU}")


@contextmanager
def _no_extensions() -> Iterator[None]:
    from torch.utils import cpp_extension

    with (
        # Where the toolkit would be, which what is compiled asks for before it is compiled.
        replaced(cpp_extension, "_join_cuda_home", lambda *parts: str(Path("/usr/local/cuda", *parts))),
        replaced(cpp_extension, "load", _refuse(f"load {_OPERATOR}")),
        replaced(cpp_extension, "load_inline", _refuse(f"load_inline {_OPERATOR}")),
    ):
        yield


def _refuse(why: str) -> type[Any]:
    """What cannot be called, nor made; a class, since types are made of some."""

    class Refused:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise CaptureError(why)

    return Refused


def _set_stream(stream: CapturedStream) -> None:
    CapturedStream.current = stream


def _random_state(*_: Any, **__: Any) -> Tensor:
    """Seed and offset, as a GPU's generator has them."""
    return torch.zeros(16, dtype=torch.uint8)


def _zero(*_: Any, **__: Any) -> int:
    return 0


# What PyTorch has in builds for CUDA alone.
_OF_A_GPUS_BUILD = (
    (torch._C, _RAW_STREAM, _zero),
    (torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL),
    (torch.distributed.distributed_c10d, "ProcessGroupNCCL", ProcessGroupNCCL),
)


_CPU = torch.device("cpu")


class OnTheDevice(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and answers for values that there are none of.

    Args:
        note: is told which lines of the script read values.
        gpus: whether there are any to ask for.
        rested: gets the lines of the script that read integers which rest on ranks being alike.
        warn: is told which lines take what a mask chooses, of which all is taken; None: as `note`.

    Raises:
        CaptureError: there are none, and the script asks for one.
    """

    def __init__(
        self, note: NoteTaker, *, gpus: bool = True, rested: list[str] | None = None, warn: NoteTaker | None = None
    ) -> None:
        super().__init__()
        self._note, self._gpus, self._warn = note, gpus, warn or note
        self._rested = [] if rested is None else rested

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SparseTensor in types or func is torch.sparse_coo_tensor:
            return self._sparse(func, types, args, kwargs or {})
        if func in _LOOKS and not types and not kwargs:
            with torch._C.DisableTorchFunction():  # nobody below answers
                return func(*args)
        kwargs = kwargs or {}
        known = known_values.read(func, args, kwargs)
        if known is not None:
            self._tell_of_ranks(args)
            return known[0]
        if (size := guessed_size(func, args, kwargs)) is not None:
            self._warn(f"{values.line_of_script()} makes a size of a tensor's value: {size.told()}")
        answer = _ANSWERS.get(func)
        if answer is not None and (given := answer(self, func, args, kwargs)) is not NotImplemented:
            return given
        args, kwargs = _on_the_host(func, args, kwargs)
        default = _device.CURRENT_DEVICE
        if default is not None and kwargs.get("device") is None and func in _device._device_constructors():
            kwargs = kwargs | {"device": default}
        if "device" in kwargs and is_gpu(kwargs["device"]):
            kwargs = kwargs | {"device": _CPU}
            made = self._on_gpu(func, args, kwargs)
            known_values.follow_made(func, args, kwargs, made)
            return moved(args[0], made, True) if args and made is args[0] else _marked(made)
        return self._followed(func, args, kwargs)

    def _sparse(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What a function makes of sparse tensors; their sizes they say themselves."""
        if func in _LOOKS and func not in sparse.ASKED:
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)

        def ask(function: Any, *given: Any, **named: Any) -> Any:
            return self.__torch_function__(function, (), given, named)

        return sparse.answer(ask, func, args, kwargs)

    def _tell_of_ranks(self, args: Any) -> None:
        """Notes the line that reads what ranks told each other."""
        line = values.caller() if known_values.rest_on_ranks(args) else None
        if line is not None:
            self._note(f"{line} reads what ranks told each other: all are taken to have told what this one did")
            if not args[0].is_floating_point():
                self._rested.append(line)

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function makes, with what is known of its values."""
        try:
            out = self._run(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
            made = self._found(func, args, kwargs)
            self._spread(func, args, made)
            return _marked(made) if any(isinstance(a, Tensor) and on_gpu(a) for a in args) else made
        if not self._spread(func, args, out):
            first = known_values.first_of(func, args, kwargs)
            there = isinstance(first, Tensor) and on_gpu(first)
            (known_values.follow_on_gpu if there else known_values.follow)(func, args, kwargs, out)
        keep_finite(func, args, out)
        return out

    def _spread(self, func: Any, args: Any, out: Any) -> bool:
        """Whether it counts what nobody knows, which is noted."""
        counts = known_values.spread(func, args, out)
        if counts:
            self._note("how many tokens each expert takes is not known: they are taken to be spread evenly")
        return counts

    def _found(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function makes whose size values say: those that are known, or what the user said of the line."""
        try:
            return known_values.computed(func, args, kwargs)
        except DynamicOutputShapeException as error:
            if not finds(error.func):
                raise
            operator = str(error.func).split(".")[1]
            whole = func is torch.where or operator == "nms"  # chooses by what is no mask itself
            masks = list(args[:1]) if whole else _masks(args) if func in _CHOOSING else []
            count = decided_size(operator, masks, self._note, self._warn)
        with finding(count):
            return self._run(func, args, kwargs)

    def _moved(self, func: Any, args: Any, kwargs: Any, gpu: bool) -> Any:
        """What is brought to the GPU, or to the host, with the values that are known of it."""
        made = self._on_gpu(func, args, kwargs) if gpu else self._run(func, args, kwargs)
        out = moved(args[0], made, gpu)
        if out is not args[0]:
            known_values.keep(args[0], out)
            keep_finite(func, args, out)
        return out

    def _on_gpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._gpus:
            raise CaptureError(f"this {NO_GPU}")
        return self._run(func, args, kwargs)

    def _question(self, func: Any, args: Any, kwargs: Any) -> Any:
        asks = args and isinstance(args[0], FakeTensor)
        return QUESTIONS[func](self._note, *args, *kwargs.values()) if asks else NotImplemented

    def _masked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What takes a mask of bytes, as it did before there were booleans, takes one of as many truth values."""
        name, place = ("condition", int(func is Tensor.where)) if "where" in func.__name__ else ("mask", 1)
        mask = kwargs.get(name, args[place] if len(args) > place else None)
        if not isinstance(mask, Tensor) or mask.dtype != torch.uint8:
            return NotImplemented
        self._note(f"{func.__name__} takes no mask of bytes any more: it is read as one of booleans")
        mask = self.__torch_function__(Tensor.view, (), (mask, torch.bool))
        if name in kwargs:
            kwargs = kwargs | {name: mask}
        else:
            args = (*args[:place], mask, *args[place + 1 :])
        return self.__torch_function__(func, (), args, kwargs)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a comparison makes lies in order, as it did before PyTorch 1.7: scripts of accuracy go by that."""
        if args[0].dtype != torch.bool or args[0].is_contiguous():
            return NotImplemented
        try:
            return self._run(func, args, kwargs)
        except (RuntimeError, ValueError):
            line = values.caller() or "PyTorch"
            self._note(
                f"{line} views truth values that do not lie so, as PyTorch before 1.7 let it: a copy stands for it"
            )
            return self._run(Tensor.reshape, args, kwargs)

    def _device(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A number alone is a GPU's."""
        return torch.device("cuda", args[0]) if self._gpus and args and type(args[0]) is int else NotImplemented

    def _first(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The first of a tensor without dimensions is itself, as it was before PyTorch 0.5: `loss.data[0]`."""
        if type(args[1]) is not int or args[1] != 0 or args[0].dim():
            return NotImplemented
        line = values.caller() or "PyTorch"
        self._note(
            f"{line} takes the first of a tensor without dimensions, as PyTorch before 0.5 let it: it is that"
        )
        return args[0]

    def _type(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) > 1 and args[1] in OLD_TYPES.values():
            return self._moved(Tensor.to, (args[0], args[1].dtype), {}, True)
        if len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        made = self._followed(func, args, kwargs)
        return made.replace("torch.", "torch.cuda.") if isinstance(made, str) and on_gpu(args[0]) else made

    def _one_hot(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Of as many classes as the largest index says, where the script does not: PyTorch asks for it below."""
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        if type(classes) is not int or classes != -1 or not args[0].numel():
            return NotImplemented
        with self:
            return func(args[0], torch.max(args[0]).item() + 1)

    def _ctc(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Of sequences whose lengths are numbers, by which its shapes go: those that are known, else all steps."""
        names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
        given = dict(zip(names, args, strict=False)) | kwargs
        log_probs, targets = given["log_probs"], given["targets"]
        samples = log_probs.shape[1] if log_probs.dim() > 2 else 1
        most = targets.shape[-1] if targets.dim() > 1 else targets.shape[0] // samples
        for name, length in (("input_lengths", log_probs.shape[0]), ("target_lengths", most)):
            given[name] = self._lengths(name, given[name], [length] * samples)
        return self._run(known_values.ctc_loss, (), given)

    def _lengths(self, name: str, given: Any, most: list[int]) -> list[int]:
        """Lengths of samples as numbers: those that are known, else the most that they may be, with a warning."""
        known = known_values.told(given) if isinstance(given, Tensor) else given
        if known is None:
            self._warn(
                f"{values.line_of_script()} takes {name} of sequences, which values decide: all are {most[0]}"
            )
            return most
        return known.flatten().tolist() if isinstance(known, Tensor) else list(known)

    def _bincount(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Of as many bins as the script says, where nobody has the values: these are within."""
        bins = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        if not bins or known_values.is_known(args[0]):
            return NotImplemented
        with finding(bins):
            return self._followed(func, args, kwargs)

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._moved(lambda tensor: tensor, args[:1], {}, True)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
        if isinstance(target, Tensor):
            return self._moved(func, args, kwargs, on_gpu(target))
        if isinstance(target, str | int | torch.device) and not isinstance(target, bool):
            args, kwargs = _to_the_cpu(args, kwargs)
            return self._moved(func, args, kwargs, is_gpu(target))
        return NotImplemented

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Goes on with what was asked."""
        return func(*args, **kwargs)


class CountingDevice(OnTheDevice):
    """The same, telling a counter which calls are the script's.

    Args:
        note: as of `OnTheDevice`.
        counter: of the host's work.
        gpus: as of `OnTheDevice`.
        shown: further arguments of `OnTheDevice`.
    """

    def __init__(self, note: NoteTaker, counter: HostCounter, *, gpus: bool = True, **shown: Any) -> None:
        super().__init__(note, gpus=gpus, **shown)
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counter.enter()
        try:
            if func in QUESTIONS and isinstance(args[0], FakeTensor) and not known_values.is_known(args[0]):
                self._counter.reads(args[0])
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self._counter.leave()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._counter.leave()
        try:
            return func(*args, **kwargs)
        finally:
            self._counter.enter()


_CHOOSING = (
    Tensor.__getitem__, torch.masked_select, Tensor.masked_select, torch.where, Tensor.where, torch.nonzero,
    Tensor.nonzero, torch.argwhere, Tensor.argwhere,
)  # fmt: skip


def _masks(values: Any) -> list[Tensor]:
    """Of the arguments of a choice, the masks that it goes by, each with as many elements as it may choose."""
    if isinstance(values, Tensor):
        return [values] if values.dtype in (torch.bool, torch.uint8) else []
    return [mask for value in values for mask in _masks(value)] if isinstance(values, tuple | list) else []


def kind(world: World, name: str) -> str:
    """Of the device that a script names.

    Raises:
        CaptureError: it is a GPU, and there are none.
    """
    if is_gpu(name) and not world.gpus:
        raise CaptureError(f"'{name}' {NO_GPU}")
    return name


def _marked(made: Any) -> Any:
    for tensor in made if isinstance(made, tuple | list) else (made,):
        if isinstance(tensor, Tensor):
            mark(tensor)
    return made


def _to_the_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `Tensor.to` whose device is the CPU; "meta" stays."""
    if "device" in kwargs:
        return args, kwargs | {"device": _in_memory(kwargs["device"])}
    return (args[0], _in_memory(args[1]), *args[2:]), kwargs


def _in_memory(device: Any) -> torch.device:
    # The host has one memory, whichever number a library that was told of GPUs gives it.
    return _CPU if is_gpu(device) or torch.device(device).type == "cpu" else torch.device(device)


def _fetched(tensor: Tensor, *_: Any) -> Tensor:
    out: Tensor = moved(tensor, tensor, False)
    if out is not tensor:
        known_values.keep(tensor, out)
        keep_finite(Tensor.cpu, (tensor,), out)
    return out


def _set_data(tensor: Tensor, data: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(tensor, data)  # type: ignore[attr-defined]
    mark(tensor, on_gpu(data))


PLACES: dict[Any, Callable[..., Any]] = {
    Tensor.cpu: _fetched,
    Tensor.device.__get__: places.device_of,
    Tensor.is_cuda.__get__: on_gpu,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda tensor: places.device_of(tensor).type == "cpu",  # type: ignore[attr-defined]
    Tensor.get_device: lambda tensor: places.device_of(tensor).index if on_gpu(tensor) else -1,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
}
"""What asks where a tensor is, or changes it."""


def _on_the_host(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments as fake tensors in the host's one memory take them, which nothing pins."""
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    if func is Tensor.__setitem__ and isinstance(args[2], Tensor) and args[2].requires_grad:
        args = known_values.placed(args)
    if func is torch.tensor and args and isinstance(args[0], list | tuple):
        args = (known_values.plain(args[0]), *args[1:])
    if isinstance(kwargs.get("device"), str | torch.device) and str(kwargs["device"]).startswith("cpu:"):
        kwargs = kwargs | {"device": _CPU}
    return args, kwargs


def _address(tensor: FakeTensor) -> int:
    """A number that tells the memory of fake tensors apart, as FSDP does; 0 for memory that was given back."""
    storage = tensor.untyped_storage()
    offset = tensor.storage_offset() * tensor.element_size()
    return storage._cdata + offset if storage.nbytes() else 0


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` makes, which would look at memory: a parameter of a module that is copied, mostly."""
    if id(tensor) not in memo:
        made: Any = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made.detach(), tensor.requires_grad)
        memo[id(tensor)] = made
        if isinstance(tensor.grad, FakeTensor):  # below the mode, which would bring it here
            made.grad = _copied(tensor.grad, memo)
        for name in vars(tensor).keys() - vars(made).keys():
            held = vars(tensor)[name]
            if isinstance(held, Node):  # what was written down of the tensor is not of its copy
                continue
            with (
                _disable_current_modes() if type(held) is Tensor else nullcontext()
            ):  # what is known of its values
                setattr(made, name, copy.deepcopy(held, memo))
    return memo[id(tensor)]


def _recurrent(mode: OnTheDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """A recurrent layer that is no operator of a capture's own (`pytorch.cudnn`), as a GPU has one of it."""
    del kwargs
    weights, biases = args[3:5] if isinstance(args[3], list | tuple) else args[2:4]  # of packed sequences, or not
    if mode._gpus and len(weights) % (4 if biases else 2):
        mode._warn(
            f"{values.line_of_script()} runs '{func.__name__}' with projections step by step, where a GPU runs "
            "cuDNN's kernels from one call: what is predicted of it is too long"
        )
    return NotImplemented


def _unchecked(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.jit.trace`, which would run what it traced once more and compare values."""
    return lambda *args, **kwargs: original(*args, **kwargs | {"check_trace": False})


def _pack(mode: OnTheDevice, _: Any, args: Any, __: Any) -> Any:
    def unknown() -> None:
        mode._warn(f"{values.line_of_script()} packs sequences, whose lengths values decide: all steps are taken")

    with mode:
        return packed.pack(args[0], args[1], args[2], unknown)


def _pad(mode: OnTheDevice, _: Any, args: Any, __: Any) -> Any:
    with mode:
        return packed.pad(*args)


def _deepcopy(original: Callable[..., Any]) -> Callable[..., Any]:
    """`copy.deepcopy` of tensors, of those that others hold as well (a DTensor, a mesh): no mode sees these."""

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if isinstance(tensor, FakeTensor) and tensor.is_leaf:
            return _copied(tensor, memo)
        if type(tensor) is Tensor:
            with _disable_current_modes():  # one that was made beside the fake ones has its values
                return original(tensor, memo)
        return original(tensor, memo)

    return copied


_TAKING_MASKS = [
    getattr(owner, name)
    for name in ("masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select", "where")
    for owner in (torch, Tensor)
    if hasattr(owner, name)
]
_ANSWERS: dict[Any, Callable[[OnTheDevice, Any, Any, Any], Any]] = {
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    torch._pack_padded_sequence: _pack,
    torch._pad_packed_sequence: _pad,
    **dict.fromkeys(QUESTIONS, OnTheDevice._question),
    **dict.fromkeys(PLACES, lambda mode, func, args, kwargs: PLACES[func](*args)),
    Tensor.data_ptr: lambda mode, func, args, kwargs: (
        _address(args[0]) if isinstance(args[0], FakeTensor) else NotImplemented
    ),
    Tensor.pin_memory: lambda mode, func, args, kwargs: args[0],
    Tensor.share_memory_: lambda mode, func, args, kwargs: args[0],  # with processes that are left out
    Tensor.is_pinned: lambda mode, func, args, kwargs: False,
    torch.device: OnTheDevice._device,
    **dict.fromkeys(_TAKING_MASKS, OnTheDevice._masked),
    torch.nn.functional.one_hot: OnTheDevice._one_hot,
    torch.nn.functional.ctc_loss: OnTheDevice._ctc,
    **dict.fromkeys((torch.bincount, Tensor.bincount), OnTheDevice._bincount),
    Tensor.view: OnTheDevice._view,
    Tensor.__getitem__: OnTheDevice._first,
    Tensor.type: OnTheDevice._type,
    Tensor.cuda: OnTheDevice._cuda,
    Tensor.to: OnTheDevice._to,
}
"""What PyTorch is not asked, by the function that is called; NotImplemented: it is asked, of such arguments."""

_LOOKS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "grad", "grad_fn", "_base")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "is_sparse")),
        Tensor.dim, Tensor.numel, Tensor.size, Tensor.stride, Tensor.storage_offset,
        Tensor.is_floating_point, Tensor.is_complex,
    }
)  # fmt: skip
"""Half of what a script calls, and answered alike wherever a tensor is: it makes none, and reads no value."""


@contextmanager
def present(
    world: World,
    note: NoteTaker = lambda _: None,
    counter: HostCounter | None = None,
    warn: NoteTaker | None = None,
) -> Iterator[None]:
    """In the context there is a GPU of the kind that captures stand for, one for each rank, or none.

    Args:
        world: the ranks, whether they have GPUs, and which way the script goes where values decide.
        note: is told which lines of the script read values.
        counter: of the host's work, where it is asked for.
        warn: is told which lines take what a mask chooses; None: as `note`.
    """
    streams.start()
    shown: dict[str, Any] = {"gpus": world.gpus, "rested": world.rested, "warn": warn}
    make: Callable[[], OnTheDevice] = partial(OnTheDevice, note, **shown)
    if counter is not None:
        make = partial(CountingDevice, note, counter, **shown)
    with ExitStack() as stack:
        enter = stack.enter_context
        for answer in (*answers(world), *_moves(world), *_streams(), *values.installed(), *sparse.installed()):
            enter(answer)
        enter(patched(torch.amp.GradScaler, "_maybe_opt_step", _always_steps))
        for name in ("trace", "trace_module"):
            enter(patched(torch.jit, name, _unchecked))
        for owner in (_foreach_utils, optimizer):
            enter(replaced(owner, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"]))
        enter(_foreach_of_fakes())
        enter(replaced(_meta_registrations, "device_hint", lambda _: "cuda"))
        enter(_recomputed_alike())
        enter(patched(Tensor, "__deepcopy__", _deepcopy))
        for owner in (torch.autograd, torch.autograd.graph):
            enter(patched(owner, "_engine_run_backward", lambda f: _again(make, f)))
        enter(deciding(world.decided, note, world.asked, warn or note))
        enter(places.answered(world.local_rank))
        if world.gpus:
            enter(smi.answering(_of_smi(), min(world.local_size, world.size), note))
        with make():
            yield


def _of_smi() -> dict[str, str]:
    """What `nvidia-smi` says of a GPU that nobody uses."""
    total = f"{MEMORY_BYTES // 2**20} MiB"
    name, capability = Properties.name, f"{Properties.major}.{Properties.minor}"
    return {
        "index": "", "name": name, "gpu_name": name, "compute_cap": capability, "memory.total": total,
        "memory.free": total, "memory.used": "0 MiB", "utilization.gpu": "0 %", "utilization.memory": "0 %",
    }  # fmt: skip


def _streams() -> Iterator[AbstractContextManager[None]]:
    """Of the CPU, as libraries ask for those of the device that tensors are on."""
    yield replaced(torch.cpu, "Stream", CapturedStream)
    yield replaced(torch.cpu, "Event", CapturedEvent)
    yield replaced(torch.cpu, "stream", streams.on)
    yield replaced(torch.cpu, "current_stream", lambda *_, **__: CapturedStream.current)
    yield patched(Tensor, "record_stream", lambda _: _nothing)


def _moves(world: World) -> Iterator[AbstractContextManager[None]]:
    """What brings models to a GPU, and what is set up for one."""
    if world.gpus:
        yield replaced(torch.nn.Module, "cuda", lambda module, *_, **__: mark_module(module))
        yield replaced(torch.nn.Module, "cpu", lambda module: mark_module(module, False))
        yield patched(torch.nn.Module, "to", _to)
        yield as_on_cuda()
        yield patched(torch.amp.GradScaler, "__init__", _scaler)
        yield patched(torch, "set_default_tensor_type", _set_default_type)


def _set_default_type(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`torch.set_default_tensor_type`, where one of a GPU says the device as well."""

    def set_type(t: Any) -> None:
        module, _, name = (t if isinstance(t, str) else f"{t.__module__}.{t.__name__}").rpartition(".")
        on_the_gpu = module == "torch.cuda" and name in OLD_TYPES
        if on_the_gpu:
            torch.set_default_dtype(OLD_TYPES[name].dtype)
        else:
            original(t)
        if on_the_gpu or torch.get_default_device().type == "cuda":
            torch.set_default_device("cuda" if on_the_gpu else "cpu")

    return set_type


@contextmanager
def _recomputed_alike() -> Iterator[None]:
    """Holds what a checkpoint computes again against the forward pass by shape and type.

    Autograd may keep a tensor under a handle that nobody put anywhere, and tells no device of it.
    """
    ways = checkpoint._allowed_determinism_checks_to_fns
    before = ways["default"]
    ways["default"] = lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}
    try:
        yield
    finally:
        ways["default"] = before


@contextmanager
def _foreach_of_fakes() -> Iterator[None]:
    """Lets optimizers handle many fake tensors by one operator, as they do on a GPU unless told otherwise."""
    kinds = _foreach_utils._foreach_supported_types
    kinds.append(FakeTensor)
    try:
        yield
    finally:
        kinds.remove(FakeTensor)


def _again(make: Callable[[], OnTheDevice], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function called through the mode runs without it; the backward functions of a script need it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with make():
            return original(*args, **kwargs)

    return run


def _nothing(*_: Any, **__: Any) -> None:
    """The device needs no such care."""


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.to`, whose parameters stay the same objects where they go to another device alone."""

    def to(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("device", args[0] if args else None)
        if target is None or isinstance(target, torch.dtype | Tensor) or str(target) == "meta":
            return original(module, *args, **kwargs)
        others = args if "device" in kwargs else args[1:]
        named = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
        if others or named:
            original(module, *others, **named)
        return mark_module(module, is_gpu(target))

    return to


def _scaler(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, /, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if is_gpu(device) else device, *args, **kwargs)

    return init


def _always_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """No gradient is infinite: values are not known, and a step that is left out is none."""
    del original

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        del self, state
        return optimizer.step(*args, **kwargs)

    return step
