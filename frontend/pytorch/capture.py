"""Captures one training step of a PyTorch model as an annotated graph, without a GPU and without weights.

with capture_mode():
    module, inputs, loss = build()
graph = capture(module, inputs, loss, StepSpec(dtype="bf16"))
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from echograph.errors import CaptureError, EchoError
from echograph.frontend.pytorch.annotate import check_annotations
from echograph.frontend.pytorch.compiler import left_out
from echograph.frontend.pytorch.device_ops import cpu_operators, cuda_operators
from echograph.frontend.pytorch.known_values import is_known, knowing_values
from echograph.frontend.pytorch.recorder import OperatorRecorder
from echograph.frontend.pytorch.spec import StepSpec
from echograph.frontend.pytorch.step import Inputs, LossFunction, TrainingStep
from echograph.frontend.pytorch.userfile import reason, user_line
from echograph.registry import Table

PRODUCERS = Table(
    "capture producer",
    {
        "recorder": "echograph.frontend.pytorch.recorder:record_step",
        "aot": "echograph.frontend.pytorch.aot:trace_step",
    },
)
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)


@contextmanager
def capture_mode() -> Iterator[FakeTensorMode]:
    """Builds modules and inputs without memory: tensors made in the context have a shape and no data.

    Small ones that are made of settings alone have values, which are followed.
    """
    with fake_mode() as mode, knowing_values():
        yield mode


@contextmanager
def fake_mode(
    importing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[FakeTensorMode]:
    """In the context, tensors have a shape and no data.

    Args:
        importing: as `compiler.left_out` has it.
    """
    with left_out(importing):
        # A fallback kernel would run an operator without a shape rule on real memory, terabytes perhaps.
        mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        with mode, torch.device("cpu"), _converting_modules():
            yield mode


def capture(
    module: Module, inputs: Inputs, loss: LossFunction | None, spec: StepSpec, *, producer: str = "recorder"
) -> Graph:
    """Captures one training step: forward, loss, backward, optimizer.

    Args:
        module: built under `capture_mode`; converted to the step's dtype in place.
        inputs: its arguments, a tuple (positional) or a mapping (keyword).
        loss: model output -> scalar tensor; None where the module returns the loss, or an object with `.loss`.
        spec: dtype, optimizer, clipping, recomputation.
        producer: "recorder" (dispatch mode; the default) or "aot" (torch.export and AOTAutograd).

    Returns:
        A graph that fulfils the contract of `annotate`.

    Raises:
        CaptureError: the model cannot be captured; names the module, and the file and line.
        UnknownNameError: there is no such producer.
    """
    produce = PRODUCERS[producer]
    mode = _mode_of(module)
    recorder = OperatorRecorder(mode)
    operators = cuda_operators() if spec.kernels == "cuda" else cpu_operators()
    masks, kept = plain_attention_masks(), _nothing_remembered(module)
    with _one_line_errors(module, recorder), quiet_fakes(), operators, masks, kept, knowing_values():
        with mode:
            fake_inputs = tree_map_only(torch.Tensor, lambda t: _fake(t, mode), inputs)
            step = TrainingStep(module, fake_inputs, loss, spec)
        graph: Graph = produce(step, recorder)
    check_annotations(graph)
    return graph


def without_memory(module: Module, mode: FakeTensorMode) -> Module:
    """A copy of a module whose parameters and buffers have shapes and no data; the module stays as it is."""
    tensors = (*module.parameters(), *module.buffers())
    known = {id(tensor): mode.from_tensor(tensor) for tensor in tensors if not isinstance(tensor, FakeTensor)}
    # What stands in `known` is taken for copied already.
    return copy.deepcopy(module, known) if known else module


def _mode_of(module: Module) -> FakeTensorMode:
    name = type(module).__name__
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if not tensors:
        raise CaptureError(f"{name} has no trainable parameter: capture a module that has some")
    for path, tensor in tensors:
        if not isinstance(tensor, FakeTensor):
            raise CaptureError(f"{name}: '{path}' holds real memory: build the module within capture_mode()")
        if tensor.device.type != "cpu":
            raise CaptureError(
                f"{name}: '{path}' is on '{tensor.device}': leave the module on the CPU, "
                "the captured operators stand for the GPU's"
            )
    mode: FakeTensorMode = tensors[0][1].fake_mode  # type: ignore[attr-defined]
    return mode


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    fake = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
    if fake.device.type != "cpu":
        raise CaptureError(f"an input is on '{fake.device}': leave inputs on the CPU")
    return fake


@contextmanager
def _one_line_errors(module: Module, recorder: OperatorRecorder) -> Iterator[None]:
    """Turns whatever user code raises into one line that says where."""
    try:
        yield
    except EchoError:
        raise
    except Exception as error:
        where = _where(module, recorder, error)
        if isinstance(error, _DATA_DEPENDENT):
            cause = str(error.args[0]).strip().splitlines()[0]
            raise CaptureError(
                f"{where}: '{cause}' makes the control flow or a shape depend on the values of a tensor, "
                "which a capture without data does not have: decide on shapes or configuration instead"
            ) from error
        if isinstance(error, _UNSUPPORTED):
            raise CaptureError(
                f"{where}: {reason(error)}: PyTorch has no shape rule for it, so register a fake implementation "
                "(torch.library.register_fake)"
            ) from error
        raise CaptureError(
            f"{where}: {reason(error)}: check that the model runs on these inputs, and sees no tensor's values"
        ) from error


@contextmanager
def _nothing_remembered(module: Module) -> Iterator[None]:
    """In the context, what a model's files remember (`functools.lru_cache`) has no tensors of before, nor later.

    One that has data would be a constant of the step, and one that has none would be given to steps that run.
    """
    remembering = _remembering(module)
    for function in remembering:
        function.cache_clear()
    try:
        yield
    finally:
        for function in remembering:
            function.cache_clear()


def _remembering(module: Module) -> list[Any]:
    """Functions and methods with a memory, of the files of a module's parts; wrappers have it in a closure."""
    kinds = {type(part) for part in module.modules()}
    files = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
    there = [vars(owner) for owner in (*kinds, *files.values()) if owner is not None]
    found: list[Any] = []
    for value in (value for names in there for value in names.values()):
        cells = (value.__closure__ or ()) if isinstance(value, FunctionType) else ()
        within = [cell.cell_contents for cell in cells if cell != _EMPTY]
        found += [each for each in (value, *within) if isinstance(each, _Remembering)]
    return found


_Remembering = type(functools.lru_cache(int))
_EMPTY = CellType()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps PyTorch from logging the traceback of a shape rule that refuses; the error itself is raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _where(module: Module, recorder: OperatorRecorder, error: Exception) -> str:
    path = recorder.failed_path(error)
    if path is None:
        where = f"{type(module).__name__}, outside of its forward pass (loss, backward or optimizer)"
    else:
        where = f"module '{path or '(root)'}' ({type(module.get_submodule(path)).__name__})"
    line = user_line(error)
    return f"{where} at {line}" if line else where


@contextmanager
def plain_attention_masks() -> Iterator[None]:
    """Lets Hugging Face models drop attention masks that say nothing, as they do in training.

    Where they see fake tensors or an export, they assume packed sequences and masks that vary, because they
    cannot look at the values; the mask they build then keeps causal attention off the flash kernel. A mask whose
    values are known is looked at.
    """
    originals: dict[str, Any] = {}

    def packed(*given: Any) -> Any:
        return originals["find_packed_sequence_indices"](*given) if _compiler_looks.get() else None

    def traced(given: Any = None) -> Any:
        return (_compiler_looks.get() or not _has_values(given)) and originals["is_tracing"](given)

    replaced: dict[str, Any] = {
        "find_packed_sequence_indices": packed, "is_torchdynamo_exporting": lambda: False, "is_tracing": traced,
    }  # fmt: skip

    def replace_in(masking: ModuleType) -> None:
        originals.update({name: getattr(masking, name) for name in replaced if hasattr(masking, name)})
        for name in originals:
            setattr(masking, name, replaced[name])

    later = _WhenImported(_MASKING, replace_in)
    if (masking := sys.modules.get(_MASKING)) is not None:
        replace_in(masking)
    else:
        sys.meta_path.insert(0, later)
    try:
        yield
    finally:
        if later in sys.meta_path:
            sys.meta_path.remove(later)
        if (masking := sys.modules.get(_MASKING)) is not None:
            for name, original in originals.items():
                setattr(masking, name, original)


@contextmanager
def seen_by_a_compiler() -> Iterator[None]:
    """In the context, masks are those that Hugging Face models make where torch.compile sees them: built whole.

    Values cannot be looked at there, and sequences may be packed. Attention then knows no causality, and takes
    three times as long (kernels of a compiled Llama on an H200).
    """
    token = _compiler_looks.set(True)
    try:
        yield
    finally:
        _compiler_looks.reset(token)


_compiler_looks: ContextVar[bool] = ContextVar("compiler_looks", default=False)


def _has_values(given: Any) -> bool:
    return isinstance(given, FakeTensor) and is_known(given)


_MASKING = "transformers.masking_utils"


class _WhenImported(MetaPathFinder):
    """Changes a module once it is imported: scripts import what they use when they run."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def changed(module: ModuleType) -> None:
                execute(module)
                self.change(module)

            spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


@contextmanager
def _converting_modules() -> Iterator[None]:
    """Lets `module.to(dtype)` and the like work on fake parameters, which PyTorch refuses to swap in place."""
    original = Module._apply

    def apply(self: Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Module:
        converted: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        for owner in self.modules() if recurse else [self]:
            for name, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in converted:
                    made = fn(parameter.detach())
                    new = parameter if _kept(parameter, made, fn) else _converted(parameter, made)
                    converted[id(parameter)] = parameter, new
                owner._parameters[name] = converted[id(parameter)][1]
            for name, buffer in owner._buffers.items():
                owner._buffers[name] = None if buffer is None else fn(buffer)
        return self

    Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module._apply = original  # type: ignore[method-assign]


def _kept(parameter: torch.nn.Parameter, data: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Gives a parameter other data, as PyTorch does where it stays on a device: who has the parameter has the new.

    What is brought from "meta", and what has tensors of its own within (DTensor), is another parameter.
    """
    if (
        not isinstance(parameter, FakeTensor)
        or not isinstance(data, FakeTensor)
        or parameter.device != data.device
    ):
        return False
    if (data.dtype, data.shape) == (parameter.dtype, parameter.shape):
        return True
    gradient, parameter.grad = parameter.grad, None
    parameter.data = data
    parameter.grad = None if gradient is None else fn(gradient)
    return True


def _converted(parameter: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with other data: itself where nothing but the data, which there is none of, would differ."""
    if (data.dtype, data.device, data.shape) == (parameter.dtype, parameter.device, parameter.shape):
        return parameter
    made = torch.nn.Parameter(data, parameter.requires_grad)
    # What a framework wrote on it (which axis it is divided over, say) stays.
    kept = (key for key in vars(parameter) if key not in vars(made) and not key.startswith("_echograph_"))
    vars(made).update({key: vars(parameter)[key] for key in kept})
    return made
