"""A model, of the zoo, of a user or in an ONNX file, to a step graph: captured without a GPU, and folded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from echograph.errors import UnknownNameError, UsageError
from echograph.ir.graph import StepGraph
from echograph.notes import tell
from echograph.options import given, option_name
from echograph.progress import Progress, silent

if TYPE_CHECKING:
    from torch.nn import Module

    from echograph.frontend.onnx.compile import Compiled
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.frontend.pytorch.step import Inputs, LossFunction
    from echograph.models import ModelEntry

    Built = tuple[Module, Inputs, LossFunction | None]


def compile(
    model: str | Path | Module | Callable[[], Built],
    spec: StepSpec | None = None,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
    inputs: Inputs | None = None,
    loss: LossFunction | None = None,
    producer: str = "recorder",
    progress: Progress = silent,
) -> StepGraph:
    """Captures one training step of a model, without a GPU and without weights, and folds its repeated blocks.

    Args:
        model: a name of the zoo; the folder or file of a Hugging Face configuration; `file.py:function`, or a
            function itself, that returns a module, its inputs, and a loss or None; a module, with `inputs`; or an
            ONNX file, whose forward pass is taken (`compile_onnx_file` makes a training step of one).
        spec: dtype, optimizer and the like; None: bf16 and AdamW, of an ONNX file its own type.
        batch_size: samples of one micro-batch; None: the model's own.
        seq_len: tokens of a sample, or pixels of an image's side; None: the model's own.
        attention: "sdpa", "fused", "eager", or "fused-softmax", as `build` has them; None: the model's own.
        inputs: inputs of a module: a tuple (positional) or a mapping (keyword).
        loss: loss of a module: output -> scalar tensor; None where the module returns the loss.
        producer: "recorder", or "aot" (export and AOTAutograd).
        progress: told what goes on.

    Returns:
        What one micro-batch and one optimizer step compute. Tensors have shapes and no data.

    Raises:
        UnknownNameError: no such model.
        InputError: a file cannot be read, or its function raises.
        UsageError: an option does not go with the model.
        CaptureError: the model cannot be captured; names the module, the file and the line.
    """
    from echograph.frontend.pytorch.spec import StepSpec

    sizes = {"batch_size": batch_size, "seq_len": seq_len, "attention": attention}
    if not isinstance(model, str | Path):
        return _compile_built(model, spec or StepSpec(), sizes, inputs, loss, producer, progress)
    if inputs is not None or loss is not None:
        raise UsageError(f"inputs and loss: are of a module, which {model} is not: its function says them itself")
    if str(model).endswith(".onnx"):
        if any(size is not None for size in sizes.values()):
            raise UsageError("batch_size, seq_len and attention: not for an ONNX file, whose inputs have shapes")
        step = {} if spec is None else {**given(spec), "dtype": spec.dtype}
        return compile_onnx_file(Path(model), step=step, progress=progress).graph
    from echograph.frontend.pytorch.capture import capture_mode

    spec = spec or StepSpec()
    with capture_mode():
        name, built = build_model(str(model), spec, progress=progress, **sizes)  # type: ignore[arg-type]
    return _compile(name, built, spec, producer, progress)


def _compile_built(
    model: Any, spec: StepSpec, sizes: dict[str, Any], inputs: Any, loss: Any, producer: str, progress: Progress
) -> StepGraph:
    """The step of a module, or of what a function builds."""
    from torch.nn import Module

    from echograph.frontend.pytorch.capture import capture_mode, without_memory

    if any(size is not None for size in sizes.values()):
        raise UsageError("batch_size, seq_len and attention: are of zoo models: give inputs of that size")
    _check_adapters(spec)
    _quiet_libraries()
    with capture_mode() as mode:
        if not isinstance(model, Module):
            return _compile(getattr(model, "__name__", "model"), model(), spec, producer, progress)
        if inputs is None:
            raise UsageError(f"{type(model).__name__}: a module is captured on inputs: give them, as inputs=(x,)")
        built = without_memory(model, mode), inputs, loss
    return _compile(type(model).__name__, built, spec, producer, progress)


def build_model(
    model: str,
    spec: StepSpec,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
    progress: Progress = silent,
) -> tuple[str, tuple[Any, Any, Any]]:
    """A model's name, and its module, inputs and loss: fake tensors under `capture_mode`, real ones elsewhere."""
    _quiet_libraries()
    progress(f"building {model}")
    if model.rpartition(":")[0].endswith(".py"):
        from echograph.frontend.pytorch.userfile import build_from_file

        if any(option is not None for option in (batch_size, seq_len, attention)):
            raise UsageError(
                "--batch-size, --seq-len and --attention belong to zoo models: set them in your function"
            )
        _check_adapters(spec)
        return model.rpartition(":")[2], build_from_file(model)
    from echograph.models import from_config, get_model

    is_config = model.endswith(".json") or os.path.isdir(model)  # noqa: PTH112 - a name may be no possible path
    entry = from_config(Path(model)) if is_config else get_model(model)
    return entry.name, _build_entry(entry, spec, batch_size=batch_size, seq_len=seq_len, attention=attention)


def compile_entry(
    entry: ModelEntry,
    spec: StepSpec,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
    producer: str = "recorder",
    progress: Progress = silent,
) -> StepGraph:
    """Captures and folds one training step of a model of the zoo."""
    from echograph.frontend.pytorch.capture import capture_mode

    progress(f"building {entry.name}")
    with capture_mode():
        built = _build_entry(entry, spec, batch_size=batch_size, seq_len=seq_len, attention=attention)
    return _compile(entry.name, built, spec, producer, progress)


def _build_entry(entry: ModelEntry, spec: StepSpec, **sizes: Any) -> tuple[Any, Any, Any]:
    import torch

    from echograph.models import build

    before = torch.get_default_dtype()
    # A module of fake tensors cannot be converted afterwards, so it is made in the step's type.
    torch.set_default_dtype(spec.torch_dtype)
    try:
        with _one_line_errors(entry.name):
            built = build(entry, **sizes)
            if entry.kind == "features":
                tell((f"{entry.architecture} has no loss: the mean square of its output stands for one",))
            if spec.lora_rank is not None:
                from echograph.models.lora import add_adapters

                missing = add_adapters(built.module, spec.lora_rank, spec.lora_targets.split(","))
                if missing and "lora_targets" in given(spec):
                    raise UsageError(f"--lora-targets {','.join(missing)[:60]}: no linear layer of that name")
            if spec.mtp_num_layers:
                from echograph.models.mtp import add_further_tokens

                add_further_tokens(built.module, spec.mtp_num_layers, spec.mtp_use_repeated_layer)
                if spec.mtp_num_layers == 1 and spec.mtp_use_repeated_layer:
                    tell(
                        ("--mtp-use-repeated-layer: has no effect here: one further token has one module anyway",)
                    )
            return built
    finally:
        torch.set_default_dtype(before)


def _check_adapters(spec: StepSpec) -> None:
    if spec.lora_rank is not None:
        raise UsageError("--lora-rank: adapters are put beside zoo models: give your module its own")
    if spec.mtp_num_layers:
        raise UsageError("--mtp-num-layers: further tokens are for zoo models: give your module its own")


def _compile(
    name: str, built: tuple[Any, Any, Any], spec: StepSpec, producer: str, progress: Progress
) -> StepGraph:
    from echograph.frontend.pytorch.capture import capture
    from echograph.frontend.pytorch.lower import lower
    from echograph.ir.passes.fold import Fold

    with _one_line_errors(name):
        progress(f"capturing one training step of {name}")
        captured = capture(*built, spec, producer=producer)
        progress("lowering")
        graph = lower(captured, spec, name=name)
    tell(_without_gradient(built[0], graph))
    progress("folding repeated blocks")
    return Fold()(graph)


def _without_gradient(module: Module, graph: StepGraph) -> Iterator[str]:
    """Says which parameters get no gradient: towers that no input reaches, heads without a loss."""
    trained = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    count, total = sum(trained.values()) - graph.workload.parameters, sum(trained.values())
    if count > 0:
        named = {graph.strings[name] for name in graph.tensors.name.tolist()}
        first = next((name for name in trained if f"{name}.grad" not in named), "")
        yield f"{count:,} of {total:,} parameters get no gradient, and are not counted: {first} is the first"


def _quiet_libraries() -> None:
    # What goes wrong is said once: these libraries log it before they raise it, one as set when it is imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """What no operator can hold is said in our words, whichever library notices it."""
    try:
        yield
    except OverflowError:
        raise UsageError(
            f"model {name}: sizes or FLOPs are beyond 64-bit integers: make the batch or the samples smaller"
        ) from None


_OF_TRAINING = ("optimizer", "clip_grad_norm", "master_weights", "kernels")
"""Fields of `StepSpec` that a forward pass has nothing of."""


def compile_onnx_file(
    path: Path,
    *,
    dims: Sequence[str] = (),
    train: bool = False,
    loss: str = "auto",
    step: Mapping[str, Any] = MappingProxyType({}),
    branch: str = "",
    progress: Progress = silent,
) -> Compiled:
    """The step graph of a model: its forward pass, or with `train` a whole training step.

    Args:
        path: the file.
        dims: sizes of dimensions without one, as "name=size" or "input.position=size".
        train: whether the step trains.
        loss: what it is trained on (`frontend.onnx.loss`).
        step: fields of `StepSpec`; dtype where it is left out is the file's, and the others count with `train`.
        branch: which branch an `If` takes where data decide: then or else; "" refuses.
        progress: is told what is going on.

    Raises:
        UsageError: an option does not fit the file.
        EchoError: what `frontend.onnx` raises.
    """
    if not train and (idle := [*(name for name in _OF_TRAINING if name in step), *["loss"] * (loss != "auto")]):
        raise UsageError(f"{', '.join(map(option_name, idle))}: of a training step: add --train")
    if step.get("recompute"):
        raise UsageError("--recompute: is the model's own way to run, and an ONNX file has none: leave it out")
    if branch not in ("", "then", "else"):
        raise UnknownNameError("branch", branch, ("then", "else"))
    from echograph.frontend.onnx.model import read
    from echograph.frontend.pytorch.spec import StepSpec

    _check_adapters(StepSpec(**step))
    sizes = dict(_size(text) for text in dims)
    progress(f"reading {path}")
    model = read(path, sizes)
    from echograph.frontend.onnx.call import step_type
    from echograph.frontend.onnx.compile import compile_onnx

    spec = StepSpec(**{"dtype": step_type(model), **step})
    progress(f"running {path} without data")
    return compile_onnx(model, spec, train=train, loss=loss, branch=branch)


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isascii() or not size.isdigit() or len(size) > 18:
        raise UsageError(f"--dim {text}: give a name and a size, as --dim batch=8")
    return name, int(size)
