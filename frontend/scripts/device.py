"""The device that a script finds: a GPU for each rank of a machine, on which the fake tensors are, or none.

Fake tensors are on the CPU (the one device whose fake backward works without a GPU), where
`frontend.pytorch.device_ops` makes composite operators choose as CUDA does. So "cuda", wherever a script says it,
is the CPU here, and what asks the device is told of one that is there (`gpu`). In a world without GPUs a script
that wants one is refused at the line where it does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

from echograph.errors import CaptureError
from echograph.frontend.scripts import host, streams
from echograph.frontend.scripts.adapter import patched, replaced
from echograph.frontend.scripts.gpu import answers, is_gpu
from echograph.frontend.scripts.streams import Event, Stream
from echograph.frontend.scripts.values import QUESTIONS, Note, deciding, keep_finite
from echograph.frontend.scripts.world import NO_GPU, World

_CPU = torch.device("cpu")


class OnTheDevice(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and answers for values that there are none of.

    Args:
        note: is told which lines of the script read values.
        gpus: whether there are any to ask for.

    Raises:
        CaptureError: there are none, and the script asks for one.
    """

    def __init__(self, note: Note, *, gpus: bool = True) -> None:
        super().__init__()
        self._note, self._gpus = note, gpus

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = host.read(func, args, kwargs)
        if known is not None:
            return known[0]
        question = QUESTIONS.get(func)
        if question is not None and isinstance(args[0], FakeTensor):
            return question(self._note, *args)
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return _address(args[0])
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor) and args[0].is_leaf:
            return _copied(*args)
        if func is Tensor.cpu or func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.is_pinned:
            return False
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if func is Tensor.type:
            return _type_of(func, args, kwargs)
        if "device" in kwargs and is_gpu(kwargs["device"]):
            return self._on_gpu(func, args, kwargs | {"device": _CPU})
        if func is Tensor.cuda:
            return self._on_gpu(lambda tensor: tensor, args[:1], {})
        if func is Tensor.to and len(args) > 1 and is_gpu(args[1]):
            return self._on_gpu(func, (args[0], _CPU, *args[2:]), kwargs)
        out = func(*args, **kwargs)
        host.follow(func, args, kwargs, out)
        keep_finite(func, args, out)
        return out

    def _on_gpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._gpus:
            raise CaptureError(f"this {NO_GPU}")
        return func(*args, **kwargs)


def kind(world: World, name: str) -> str:
    """Of the device that stands for one that a script names.

    Raises:
        CaptureError: it is a GPU, and there are none.
    """
    if is_gpu(name) and not world.gpus:
        raise CaptureError(f"'{name}' {NO_GPU}")
    return "cpu" if is_gpu(name) else name


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
        made.grad = copy.deepcopy(tensor.grad, memo)
        for name in vars(tensor).keys() - vars(made).keys():
            setattr(made, name, copy.deepcopy(vars(tensor)[name], memo))
    return memo[id(tensor)]


def _type_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Types of tensors by their old names, `torch.cuda.FloatTensor`: frameworks compare them."""
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
    made = func(*args, **kwargs)
    return made.replace("torch.", "torch.cuda.") if isinstance(made, str) else made


@contextmanager
def present(world: World, note: Note = lambda _: None) -> Iterator[None]:
    """In the context there is a GPU of the kind that captures stand for, one for each rank, or none.

    Args:
        world: the ranks, whether they have GPUs, and which way the script goes where values decide.
        note: is told which lines of the script read values.
    """
    streams.start()
    make = partial(OnTheDevice, note, gpus=world.gpus)
    with ExitStack() as stack:
        enter = stack.enter_context
        for answer in (*answers(world), *_moves(world), *_streams(), *host.installed()):
            enter(answer)
        enter(patched(torch.amp.GradScaler, "_maybe_opt_step", _always_steps))
        for owner in (_foreach_utils, optimizer):
            enter(replaced(owner, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]))
        enter(_foreach_of_fakes())
        for owner in (torch.autograd, torch.autograd.graph):
            enter(patched(owner, "_engine_run_backward", lambda f: _again(make, f)))
        enter(deciding(world.decided))
        with make():
            yield


def _streams() -> Iterator[AbstractContextManager[None]]:
    """Of the CPU, as libraries ask for those of the device that tensors are on."""
    yield replaced(torch.cpu, "Stream", Stream)
    yield replaced(torch.cpu, "Event", Event)
    yield replaced(torch.cpu, "stream", streams.on)
    yield replaced(torch.cpu, "current_stream", lambda *_, **__: Stream.current)
    yield patched(Tensor, "record_stream", lambda _: _nothing)


def _moves(world: World) -> Iterator[AbstractContextManager[None]]:
    """What brings models to a GPU, and what is set up for one."""
    if world.gpus:
        yield replaced(torch.nn.Module, "cuda", lambda module, *_, **__: module)
        yield patched(torch.nn.Module, "to", _to)
        yield patched(torch.autocast, "__init__", _of_cpu)
        yield patched(torch.amp.GradScaler, "__init__", _scaler)


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
    def to(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_gpu(args[0]):
            args = (_CPU, *args[1:])
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(module, *args, **kwargs)

    return to


def _of_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_gpu(args[0] if args else kwargs.get("device_type")):
            args, kwargs = ("cpu", *args[1:]), {k: v for k, v in kwargs.items() if k != "device_type"}
            if len(args) < 2 and kwargs.get("dtype") is None:  # those of CPUs and GPUs differ
                kwargs["dtype"] = torch.get_autocast_dtype("cuda")
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
