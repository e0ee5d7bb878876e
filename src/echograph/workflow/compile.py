"""A model to a step graph: captured without a GPU, and folded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import UsageError
from echograph.ir.graph import StepGraph
from echograph.progress import Progress, silent

if TYPE_CHECKING:
    from echograph.frontend.pytorch.step import StepSpec
    from echograph.models import ModelEntry


def compile_model(
    model: str,
    spec: StepSpec,
    *,
    batch_size: int | None,
    seq_len: int | None,
    attention: str | None,
    producer: str = "recorder",
    say: Progress = silent,
) -> StepGraph:
    """Captures and folds one training step of a zoo model, a Hugging Face configuration or `file.py:function`."""
    from echograph.frontend.pytorch.capture import capture_mode

    with capture_mode():
        name, built = build_model(
            model, spec, batch_size=batch_size, seq_len=seq_len, attention=attention, say=say
        )
    return _compile(name, built, spec, producer, say)


def build_model(
    model: str,
    spec: StepSpec,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
    say: Progress = silent,
) -> tuple[str, tuple[Any, Any, Any]]:
    """A model's name, and its module, inputs and loss: fake tensors under `capture_mode`, real ones elsewhere."""
    _quiet_libraries()
    say(f"building {model}")
    if model.rpartition(":")[0].endswith(".py"):
        from echograph.frontend.pytorch.userfile import build_from_file

        if any(option is not None for option in (batch_size, seq_len, attention)):
            raise UsageError(
                "--batch-size, --seq-len and --attention belong to zoo models: set them in your function"
            )
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
    say: Progress = silent,
) -> StepGraph:
    """Captures and folds one training step of a model of the zoo."""
    from echograph.frontend.pytorch.capture import capture_mode

    say(f"building {entry.name}")
    with capture_mode():
        built = _build_entry(entry, spec, batch_size=batch_size, seq_len=seq_len, attention=attention)
    return _compile(entry.name, built, spec, producer, say)


def _build_entry(entry: ModelEntry, spec: StepSpec, **sizes: Any) -> tuple[Any, Any, Any]:
    import torch

    from echograph.models import build

    before = torch.get_default_dtype()
    # A module of fake tensors cannot be converted afterwards, so it is made in the step's type.
    torch.set_default_dtype(spec.torch_dtype)
    try:
        with _one_line_errors(entry.name):
            return build(entry, **sizes)
    finally:
        torch.set_default_dtype(before)


def _compile(name: str, built: tuple[Any, Any, Any], spec: StepSpec, producer: str, say: Progress) -> StepGraph:
    from echograph.frontend.pytorch.capture import capture
    from echograph.frontend.pytorch.lower import lower
    from echograph.ir.passes.fold import Fold

    with _one_line_errors(name):
        say(f"capturing one training step of {name}")
        captured = capture(*built, spec, producer=producer)
        say("lowering")
        graph = lower(captured, spec, name=name)
    say("folding repeated blocks")
    return Fold()(graph)


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
