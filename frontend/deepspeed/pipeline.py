"""DeepSpeed's pipeline engine: its schedule tells phase and micro-batch, and stages answer for each other.

A schedule is a list of instructions for one stage, each of which the engine executes by a method. An instruction
of a pass is there once for every micro-batch, in their order, so counting tells which one it is for. Before the
first message (before each one, with `dynamic_shape`) a stage tells the next one the shapes of its output; the
stages run one after the other here, so what a stage tells is kept for those that are run later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.deepspeed import shims
from echograph.frontend.pytorch import annotate
from echograph.frontend.scripts.adapter import patched, replaced
from echograph.frontend.scripts.recorder import ScriptRecorder

_MODULE = "runtime.pipe.engine"
_PASSES = {
    "LoadMicroBatch": annotate.FORWARD,
    "RecvActivation": annotate.FORWARD,
    "ForwardPass": annotate.FORWARD,
    "SendActivation": annotate.FORWARD,
    "RecvGrad": annotate.BACKWARD,
    "BackwardPass": annotate.BACKWARD,
    "SendGrad": annotate.BACKWARD,
}
"""Instructions that are one micro-batch's; the others end the step."""
_REDUCTIONS = ("ReduceGrads", "ReduceTiedGrads")
_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}

Layout = tuple[list[int], torch.dtype]


class Pipelines:
    """What pipelines tell a recorder, and stages each other; serves the runs of all ranks."""

    def __init__(self) -> None:
        self._outputs: dict[int, list[list[Layout] | Layout]] = {}
        self._done: Counter[Any] = Counter()

    def hooks(
        self, recorder: ScriptRecorder, step_ends: Callable[[Any], None]
    ) -> Iterator[AbstractContextManager[None]]:
        """The engine's hooks, to be put in place.

        Args:
            recorder: is told.
            step_ends: called with the engine where a step has ended.
        """
        engine = shims.hook_point(_MODULE, "PipelineEngine")
        executing = getattr(engine, "_INSTRUCTION_MAP", {})
        told = {kind: self._executing(kind.__name__, run, recorder) for kind, run in executing.items()}
        yield replaced(engine, "_INSTRUCTION_MAP", told)
        yield patched(engine, "_exec_schedule", self._counting)
        yield patched(engine, "train_batch", lambda f: _training(f, recorder, step_ends))
        yield patched(engine, "_send_tensor_meta", lambda f: self._telling(f, recorder))
        yield patched(engine, "_recv_tensor_meta", lambda _: self._asking(recorder))

    def _executing(self, name: str, original: Callable[..., Any], recorder: ScriptRecorder) -> Callable[..., Any]:
        phase = _PASSES.get(name, annotate.OPTIMIZER)
        payload = "gradient" if name in _REDUCTIONS else "activation" if name in _PASSES else "other"

        def execute(engine: Any, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(recorder.in_phase(phase))
                stack.enter_context(recorder.carrying(payload))
                if name in _PASSES:
                    stack.enter_context(recorder.in_micro_batch(self._done[name]))
                made = original(engine, *args, **kwargs)
            self._done[name] += 1
            return made

        return execute

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(engine: Any, schedule: Any) -> Any:
            self._done.clear()
            return original(engine, schedule)

        return execute

    def _telling(self, original: Callable[..., Any], recorder: ScriptRecorder) -> Callable[..., Any]:
        def send(engine: Any, buffer: Any, stage: int) -> Any:
            told: list[Layout] | Layout
            told = _layout(buffer) if isinstance(buffer, Tensor) else [_layout(tensor) for tensor in buffer]
            self._outputs.setdefault(engine.stage_id, []).append(told)
            with recorder.carrying("other"):
                return original(engine, buffer, stage)

        return send

    def _asking(self, recorder: ScriptRecorder) -> Callable[..., Any]:
        """Receives the message, whose numbers are not there; the shapes are those that the stage before told."""
        asked: Counter[int] = Counter()

        def receive(engine: Any, stage: int) -> Any:
            known = self._outputs.get(stage, [])
            if asked[stage] >= len(known):
                raise CaptureError(
                    f"stage {engine.stage_id} of the pipeline needs the shapes that stage {stage} gives: give one "
                    "rank of each stage to --ranks, in order, or leave it out"
                )
            told = known[asked[stage]]
            asked[stage] += 1
            size = shims.hook_point(_MODULE).TENSOR_META_SIZE
            with recorder.carrying("other"):
                shims.hook_point("runtime.pipe.p2p").recv(
                    torch.empty(size, dtype=torch.int32, device=engine.device), stage
                )
            if isinstance(told, tuple):
                return engine._allocate_or_extend_buffers(0, *told)
            return tuple(engine._allocate_or_extend_buffers(i, *layout) for i, layout in enumerate(told))

        return receive


def axes(engine: Any) -> dict[str, int]:
    """The mesh of a pipeline engine, outermost axis first: the topology that its module was given."""
    topology = engine.grid.topology()
    return {_AXES.get(name, name): topology.get_dim(name) for name in topology.get_axis_names()}


def _training(
    original: Callable[..., Any], recorder: ScriptRecorder, step_ends: Callable[[Any], None]
) -> Callable[..., Any]:
    def train_batch(engine: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.step_begins()
        # What is no instruction gathers the loss, after the optimizer.
        with recorder.in_phase(annotate.OPTIMIZER), recorder.carrying("other"):
            made = original(engine, *args, **kwargs)
        step_ends(engine)
        return made

    return train_batch


def _layout(tensor: Tensor) -> Layout:
    return list(tensor.shape), tensor.dtype
