"""Where a tensor is: which tensors the script put on the GPU, so that all who ask are told the same.

Fake tensors are on the CPU, as PyTorch's own code sees them (`frontend.scripts.device`). A script, and a library
in Python, is told that a tensor is on the rank's GPU if it was made or moved there, or was computed from one
that is. A mark on the tensor says so. The recorder passes marks on from the operands of an operator to its
results, and answers the dispatcher and autograd, which ask below it (`below`), with the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from echograph.frontend.scripts.adapter import once_imported, patched, replaced

_GPU = "_echograph_gpu"
_CPU, _META = torch.device("cpu"), torch.device("meta")
_ALIAS = torch.ops.aten.alias.default
TO_HOST = torch.ops.aten.lift_fresh_copy.default
"""What brings a tensor from the GPU: no kernel, the same values, in memory that outlives the GPU's."""


class _Place:
    """What is the same for all tensors: the rank's GPU, whether PyTorch itself asks, how many have data there."""

    gpu = torch.device("cuda:0")
    below = 0
    with_data = 0


def is_gpu(device: Any) -> bool:
    """Whether a device, as PyTorch takes it, is a GPU."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def on_gpu(tensor: Tensor) -> bool:
    """Whether the script put a tensor on the GPU; of a DTensor and its like, what it is made of."""
    inner = getattr(tensor, "_local_tensor", tensor)
    return _GPU in inner.__dict__


def device_of(tensor: Tensor) -> torch.device:
    """The device that a tensor is on, as the script sees it."""
    if on_gpu(tensor):
        return _Place.gpu
    return Tensor.device.__get__(tensor) if not isinstance(tensor, FakeTensor) else tensor._fake_device


def mark(tensor: Any, gpu: bool = True) -> None:
    """Says of a tensor that it is on the GPU, or on the host."""
    inner = getattr(tensor, "_local_tensor", tensor)
    if gpu:
        inner.__dict__[_GPU] = True
        _Place.with_data += type(inner) is Tensor
    else:
        inner.__dict__.pop(_GPU, None)


def put_there() -> int:
    """How many tensors with data, as data sets have them, were put on the GPU so far: no mark follows these."""
    return _Place.with_data


def mark_module(module: nn.Module, gpu: bool = True) -> nn.Module:
    """The same of all that a module has; gives it back.

    A parameter of a class with a way of its own there (weights that are quantised as they go) takes it.
    """
    there = _Place.gpu if gpu else _CPU
    for part in module.modules():
        for name, held in list(part._parameters.items()):
            if held is not None and type(held).to is not Tensor.to:
                setattr(part, name, held.to(there))
    for parameter in module.parameters():
        mark(parameter, gpu)
        if parameter.grad is not None:
            mark(parameter.grad, gpu)
    for buffer in module.buffers():
        mark(buffer, gpu)
    return module


def moved(tensor: Tensor, made: Any, gpu: bool) -> Any:
    """A tensor that was moved: another one than before, unless it was there already.

    Args:
        tensor: before.
        made: what PyTorch made of it, on the CPU: the same one, perhaps.
        gpu: where it is now.
    """
    if made is tensor:
        if on_gpu(tensor) == gpu or tensor.device.type == "meta":
            return tensor
        handle = _ALIAS if gpu else TO_HOST
        made = handle(tensor) if type(tensor) is Tensor or isinstance(tensor, FakeTensor) else tensor.detach()
    mark(made, gpu)
    return made


def follow(args: tuple[Any, ...], out: Any) -> None:
    """The results of an operator are on the GPU if an operand is; what it wrote is where it was."""
    if not any(map(_has_mark, args)):
        return
    for tensor in out if type(out) in (tuple, list) else (out,):
        if isinstance(tensor, Tensor) and not any(tensor is given for given in args):
            tensor.__dict__[_GPU] = True


def _has_mark(value: Any) -> bool:
    if isinstance(value, Tensor):
        return _GPU in value.__dict__
    # Of several tensors, which are all in one place.
    return (
        type(value) in (list, tuple) and bool(value) and isinstance(value[0], Tensor) and _GPU in value[0].__dict__
    )


class _Below:
    """In the context PyTorch's own code asks: its fake tensors are on the CPU."""

    def __enter__(self) -> None:
        _Place.below += 1

    def __exit__(self, *_: object) -> None:
        _Place.below -= 1


below = _Below()


def _device(tensor: FakeTensor) -> torch.device:
    if tensor.fake_mode.in_kernel_invocation:
        return _META
    if _GPU in tensor.__dict__ and not _Place.below:
        return _Place.gpu
    return tensor._fake_device


@cache
def _fake_class(kind: type[Tensor]) -> type[FakeTensor]:
    """A class of tensors, parameters mostly, of fake ones."""
    return type(kind.__name__, (FakeTensor, kind), {"__module__": kind.__module__})


@dataclass(frozen=True, slots=True)
class _PartOfStorage:
    """Bytes of the memory of a fake tensor, which a script cut out of it to put other tensors there.

    Attributes:
        whole: memory of the fake tensor.
        start: its first byte there.
        stop: the one behind its last.
    """

    whole: torch.UntypedStorage
    start: int
    stop: int

    @property
    def device(self) -> torch.device:
        """Where scripts make such tensors."""
        return _Place.gpu

    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    __len__ = nbytes = size


def _told_apart(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """`data_ptr` of memory that is not there: a number by which libraries tell one tensor's from another's."""

    def address(storage: torch.UntypedStorage) -> int:
        try:
            return original(storage)
        except RuntimeError:
            return storage._cdata if storage.nbytes() else 0

    return address


def _put(plain: Any) -> Any:
    def put(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        part = kwargs.get("source", args[0] if args else None)
        if not isinstance(part, _PartOfStorage):
            return plain(tensor, *args, **kwargs)
        each = tensor.element_size()
        return plain(tensor, part.whole, part.start // each, (part.size() // each,), (1,))

    return put


def _cut(plain: Any) -> Any:
    def get(storage: torch.UntypedStorage, at: Any) -> Any:
        if isinstance(at, slice) and storage.device == _META:
            start, stop, _ = at.indices(storage.nbytes())
            return _PartOfStorage(storage, start, stop)
        return plain(storage, at)

    return get


class _Shadow(int):
    """A number that a script gave a tensor under a method's name (`bias.stride = 1`), which PyTorch still calls.

    What computes with real tensors asks below Python; shape rules are in Python, and would find the number.
    """

    method: Any
    of: Any

    def __call__(self, *args: Any) -> Any:
        return self.method(self.of(), *args)


def _shadowed(plain: Any) -> Any:
    def set_attribute(tensor: FakeTensor, name: str, value: Any) -> None:
        if type(value) is int and name in _ASKED_BY_SHAPE_RULES:
            value = _Shadow(value)
            value.method, value.of = getattr(Tensor, name), ref(tensor)
        plain(tensor, name, value)

    return set_attribute


_ASKED_BY_SHAPE_RULES = ("stride", "size", "dim", "numel")


def _as_their_parts() -> AbstractContextManager[None]:
    """Tensors that are divided over ranks are where the rank's part is."""
    from torch.distributed.tensor import DTensor

    return replaced(DTensor, "device", property(lambda tensor: tensor._local_tensor.device))


@contextmanager
def answered(index: int) -> Iterator[None]:
    """In the context, tensors say where they are.

    Args:
        index: of the rank's GPU on its machine.
    """
    _Place.gpu, _Place.below, _Place.with_data = torch.device("cuda", index), 0, 0
    plain = nn.Parameter.__new__

    def of_class(kind: Any, /, *args: Any, **kwargs: Any) -> Any:
        # PyTorch gives a parameter of a fake tensor that tensor's class, whichever class of parameters was asked.
        made = plain(kind, *args, **kwargs)
        if type(made) is FakeTensor and kind is not nn.Parameter:
            made.__class__ = _fake_class(kind)
        return made

    def of_subclass(original: Any) -> Any:
        def make(kind: Any, data: Tensor, require_grad: bool = False, **kwargs: Any) -> Any:
            if not isinstance(data, FakeTensor):
                return original(kind, data, require_grad, **kwargs)
            made: Any = data.detach().requires_grad_(require_grad)
            made.__class__ = _fake_class(kind)
            return made

        return staticmethod(make)

    new = FakeTensor.__new__

    def parameter(kind: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Libraries make a parameter by the class of another one, which is that of fake tensors here, and may give
        # it the attributes of that.
        if len(args) == 1 and isinstance(args[0], Tensor):
            made = nn.Parameter(args[0], kwargs.get("requires_grad", True))
            mark(made, on_gpu(args[0]))
            return made
        if kind is FakeTensor and not kwargs and not (args and isinstance(args[0], FakeTensorMode)):
            return Tensor(*args)  # of sizes, or of numbers, by the class of another tensor: `type(x)(2, 3)`
        return new(kind, *args, **kwargs)

    beside = FakeTensor.__torch_dispatch__

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Where no mode sees what is done with fake tensors: in a data set, whose own code runs with values.
        elsewhere = is_gpu((kwargs or {}).get("device"))
        with below:
            out = beside(func, types, args, kwargs | {"device": _CPU} if elsewhere else kwargs)
        if elsewhere:
            mark(out)
        else:
            follow(args, out)
        return out

    with (
        replaced(FakeTensor, "device", property(_device)),
        replaced(FakeTensor, "__torch_dispatch__", staticmethod(dispatch)),
        replaced(FakeTensor, "__new__", staticmethod(parameter)),
        patched(FakeTensor, "__setattr__", _shadowed),
        patched(torch.UntypedStorage, "__getitem__", _cut),
        patched(torch.UntypedStorage, "data_ptr", _told_apart),
        patched(Tensor, "set_", _put),
        once_imported("torch.distributed.tensor", _as_their_parts),
        replaced(nn.Parameter, "__new__", staticmethod(of_class)),
        patched(Tensor, "_make_subclass", of_subclass),
    ):
        yield


class _OldType(type):
    """A type of tensors by its old name, `torch.cuda.FloatTensor`: makes them of data or sizes, and knows them."""

    dtype: torch.dtype

    def __call__(cls, *given: Any) -> Tensor:
        if given and not isinstance(given[0], int):
            return torch.as_tensor(given[0]).to("cuda", cls.dtype)
        return torch.empty(given, dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, given: object) -> bool:
        return isinstance(given, Tensor) and given.dtype == cls.dtype and on_gpu(given)


OLD_TYPES = {
    f"{name}Tensor": _OldType(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"})
    for name, dtype in {
        "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}  # fmt: skip
"""Old names of types of `torch.cuda` -> what stands for each."""
