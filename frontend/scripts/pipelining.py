"""torch.distributed.pipelining without the other stages.

Before its first step a stage asks the one before it for the shapes of its inputs and the one behind it for those
of its outputs' gradients. The stages run one after the other here, so what a stage says is kept for those that
are run later. A gradient has the shape and type of the output that it is of. The shapes that a stage with several
chunks a rank asks for before any rank could say them are taken to be those of the last output known; the stage
that makes them says later whether that was so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.recorder import ScriptRecorder

_STAGE = "torch.distributed.pipelining.stage"


class Stages:
    """What stages told of their outputs; serves the runs of all ranks."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}

    @contextmanager
    def installed(self, recorder: ScriptRecorder) -> Iterator[None]:
        """In the context, stages answer for each other, and tell which micro-batch and chunk they run."""
        from torch.distributed.pipelining import PipelineStage, schedules

        base = importlib.import_module(_STAGE)._PipelineStageBase
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(patched(schedules._PipelineSchedule, "_warmup_p2p", _agree))
            enter(patched(PipelineStage, "_send_meta", self._send))
            enter(patched(PipelineStage, "_recv_meta", self._receive))
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                enter(patched(base, name, lambda f: _told(recorder, f)))
            yield

    def _send(self, original: Callable[..., Any]) -> Callable[..., Any]:
        del original

        def send(one: Any, meta: Any, to: int) -> None:
            if to > one.stage_index:
                guess = self._taken.get(one.stage_index, meta)
                if not _alike(guess, meta):
                    raise CaptureError(
                        f"stage {one.stage_index} of the pipeline gives {_shapes(meta)}, where {_shapes(guess)} "
                        "was taken for it: give its PipelineStage input_args and output_args"
                    )
                self._outputs[one.stage_index] = meta

        return send

    def _receive(self, original: Callable[..., Any]) -> Callable[..., Any]:
        del original

        def receive(one: Any, source: int) -> Any:
            stage: Any = importlib.import_module(_STAGE)
            if source > one.stage_index:
                grads = stage._derive_grad_metas(one._stage_meta.outputs)
                return stage._StageBackwardMeta(backward_metas=grads)
            known = [number for number in self._outputs if number <= source]
            if not known:
                raise CaptureError(
                    f"stage {one.stage_index} of the pipeline needs the shapes that stage {source} gives: run the "
                    "ranks of the stages in order, or give its PipelineStage input_args"
                )
            meta = self._outputs[max(known)]
            if max(known) != source:
                self._taken[source] = meta
            return meta

        return receive


def _agree(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whether shapes are worked out: ranks are taken to want alike."""
    del original

    def warm_up(schedule: Any, stages: list[Any], has_backward: bool, *_: Any) -> None:
        del schedule
        modes = importlib.import_module(_STAGE).InferenceMode
        dynamic = any(modes.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        for stage in stages:
            stage._inference_mode = modes.DYNAMIC if dynamic else modes.STATIC

    return warm_up


def _told(recorder: ScriptRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(stage: Any, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        chunk = stage.stage_index // stage.group_size
        with recorder.in_micro_batch(micro_batch), recorder.in_chunk(chunk):
            return original(stage, micro_batch, *args, **kwargs)

    return run


def _metas(message: Any) -> list[Any]:
    return [(tuple(meta.shape), meta.dtype) for meta in message.forward_metas]


def _alike(one: Any, other: Any) -> bool:
    return _metas(one) == _metas(other)


def _shapes(message: Any) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in _metas(message))
