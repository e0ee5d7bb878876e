"""The GPU that a script finds: as many as a machine has, each the device on which the capture's fake tensors are.

Fake tensors are on the CPU (the one device whose fake backward works without a GPU), where
`frontend.pytorch.device_ops` makes composite operators choose as CUDA does. So "cuda", wherever a script says it,
is the CPU here, and what asks the device is told of one that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

from echograph.frontend.scripts import streams
from echograph.frontend.scripts.adapter import patched, replaced
from echograph.frontend.scripts.streams import Event, Stream
from echograph.frontend.scripts.values import QUESTIONS, Note
from echograph.frontend.scripts.world import World

MEMORY_BYTES = 80 * 2**30
_CPU = torch.device("cpu")
# Their second argument may be a device.
_MOVES = (Tensor.to, Tensor.cuda)


class OnTheDevice(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and answers for values that there are none of.

    Args:
        note: is told which lines of the script read values.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        question = QUESTIONS.get(func)
        if question is not None and isinstance(args[0], FakeTensor):
            return question(self._note, *args)
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return _address(args[0])
        if func is Tensor.cuda or func is Tensor.cpu:
            return args[0]
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.is_pinned:
            return False
        if "device" in kwargs and is_gpu(kwargs["device"]):
            kwargs = kwargs | {"device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if func is Tensor.to and len(args) > 1 and is_gpu(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is Tensor.type:
            return _type_of(func, args, kwargs)
        return func(*args, **kwargs)


def is_gpu(device: Any) -> bool:
    """Whether a device, as PyTorch takes it, is a GPU."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _address(tensor: FakeTensor) -> int:
    """A number that tells the memory of fake tensors apart, as FSDP does; 0 for memory that was given back."""
    storage = tensor.untyped_storage()
    offset = tensor.storage_offset() * tensor.element_size()
    return storage._cdata + offset if storage.nbytes() else 0


def _type_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Types of tensors by their old names, `torch.cuda.FloatTensor`: frameworks compare them."""
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
    made = func(*args, **kwargs)
    return made.replace("torch.", "torch.cuda.") if isinstance(made, str) else made


@contextmanager
def present(world: World, note: Note = lambda _: None) -> Iterator[None]:
    """In the context there is a GPU of the kind that captures stand for, one for each rank of the machine.

    Args:
        world: the ranks.
        note: is told which lines of the script read values.
    """
    streams.start()
    answers = _answers(world)
    with ExitStack() as stack:
        for name in answers:
            if hasattr(torch.cuda, name):
                stack.enter_context(replaced(torch.cuda, name, answers[name]))
        for name in ("Stream", "Event", "stream", "current_stream"):
            stack.enter_context(replaced(torch.cpu, name, answers[name]))
        stack.enter_context(patched(torch.nn.Module, "to", _to))
        stack.enter_context(replaced(torch.nn.Module, "cuda", lambda module, *_, **__: module))
        stack.enter_context(patched(Tensor, "record_stream", lambda _: _nothing))
        stack.enter_context(patched(torch.autocast, "__init__", _of_cpu))
        stack.enter_context(patched(torch.amp.GradScaler, "__init__", _scaler))
        stack.enter_context(patched(torch.amp.GradScaler, "_maybe_opt_step", _always_steps))
        stack.enter_context(replaced(torch.accelerator, "is_available", lambda: True))
        stack.enter_context(replaced(torch.accelerator, "current_accelerator", lambda *_, **__: _CPU))
        for owner in (_foreach_utils, optimizer):
            stack.enter_context(replaced(owner, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]))
        stack.enter_context(_foreach_of_fakes())
        for owner in (torch.autograd, torch.autograd.graph):
            stack.enter_context(patched(owner, "_engine_run_backward", lambda f: _again(note, f)))
        with OnTheDevice(note):
            yield


@contextmanager
def _foreach_of_fakes() -> Iterator[None]:
    """Lets optimizers handle many fake tensors by one operator, as they do on a GPU unless told otherwise."""
    kinds = _foreach_utils._foreach_supported_types
    kinds.append(FakeTensor)
    try:
        yield
    finally:
        kinds.remove(FakeTensor)


def _answers(world: World) -> dict[str, Any]:
    properties = SimpleNamespace(
        name="captured device", major=9, minor=0, total_memory=MEMORY_BYTES, multi_processor_count=132,
        warp_size=32, is_integrated=False,
    )  # fmt: skip
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "device_count": lambda: min(world.local_size, world.size),
        "current_device": lambda: world.local_rank,
        "set_device": _nothing,
        "device": lambda *_: streams.on(None),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_properties": lambda *_: properties,
        "synchronize": lambda *_: None,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": _nothing,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": _nothing,
        "reset_max_memory_allocated": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "Stream": Stream,
        "Event": Event,
        "stream": streams.on,
        "current_stream": lambda *_, **__: Stream.current,
        "default_stream": lambda *_, **__: Stream.default,
        "set_stream": _set_stream,
    }


def _again(note: Note, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function called through the mode runs without it; the backward functions of a script need it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with OnTheDevice(note):
            return original(*args, **kwargs)

    return run


def _set_stream(stream: Stream) -> None:
    Stream.current = stream


def _nothing(*_: Any, **__: Any) -> None:
    """The device needs no such care."""


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_gpu(args[0]):
            args = (_CPU, *args[1:])
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(module, *args, **kwargs)

    return to


def _of_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and is_gpu(args[0]):
            args = ("cpu", *args[1:])
        for name in ("device", "device_type"):
            if is_gpu(kwargs.get(name)):
                kwargs[name] = "cpu"
        original(self, *args, **kwargs)

    return init


def _scaler(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if is_gpu(device) else device, *args, **kwargs)

    return init


def _always_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """No gradient is infinite: values are not known, and a step that is left out is none."""
    del original

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        del self, state
        return optimizer.step(*args, **kwargs)

    return step
