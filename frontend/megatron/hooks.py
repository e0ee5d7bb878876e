"""Where in a step megatron-core is: its schedules, pipeline messages, gradient and parameter buckets, optimizers.

A hook is one of its functions, wrapped so that it tells a `StepPlace` what it begins and ends. The recorder of a
capture is one (`frontend.scripts.recorder.ScriptRecorder`), and so can be what watches real ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any, Protocol

from echograph.frontend.megatron.patches import TESTED, Patch

_PHASES = {"recv_forward": "forward", "send_forward": "forward", "recv_backward": "backward",
           "send_backward": "backward", "send_forward_recv_backward": "forward",
           "send_backward_recv_forward": "backward", "send_forward_recv_forward": "forward",
           "send_backward_recv_backward": "backward",
           "send_forward_backward_recv_forward_backward": "forward"}  # fmt: skip
"""Functions that send and receive, and the phase that their messages count for: that of what is sent, if both."""

_SCHEDULE = "megatron.core.pipeline_parallel.schedules"
_BUCKETS = {"start_grad_sync": "gradient", "finish_grad_sync": "gradient", "start_param_sync": "parameter"}
_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_OPTIMIZERS = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")


class StepPlace(Protocol):
    """Told where in a step the script is."""

    def in_phase(self, phase: str) -> AbstractContextManager[None]:
        """What runs is of a phase: "forward", "backward", "optimizer"."""
        ...

    def in_micro_batch(self, number: int | None) -> AbstractContextManager[None]:
        """What runs is of a micro-batch; None: of the step."""
        ...

    def in_chunk(self, number: int) -> AbstractContextManager[None]:
        """What runs is of a chunk of this rank's layers."""
        ...

    def carrying(self, payload: str) -> AbstractContextManager[None]:
        """What communications carry: "gradient", "parameter", "activation"."""
        ...

    def step_ends(self) -> None:
        """A training step has ended."""
        ...


def hooks(place: StepPlace, short: Callable[[], bool] = lambda: False) -> tuple[Patch, ...]:
    """All hooks, telling one place.

    Args:
        place: is told.
        short: whether the step that begins is only there to come before another one: it is then run with as few
            micro-batches as its schedule takes.
    """
    passes = _Passes(place, short)
    telling = "which pass of which micro-batch and chunk runs"
    return (
        Patch(where=f"{_SCHEDULE}:forward_step", reason=telling, around=passes.forward),
        Patch(where=f"{_SCHEDULE}:backward_step", reason=telling, around=passes.backward),
        *(
            Patch(
                where=f"megatron.core.pipeline_parallel.{name}",
                reason="which of the two micro-batches that run together a part is of",
                around=around,
                since="0.14",
            )
            for name, around in (
                ("combined_1f1b:combined_forward_backward_step", passes.together),
                ("utils:ScheduleNode.__init__", passes.part),
                ("utils:ScheduleNode.forward", passes.part_forward),
                ("utils:ScheduleNode.backward", passes.part_backward),
            )
        ),
        *(
            Patch(
                where=f"{_SCHEDULE}:{name}",
                reason="what ends the passes, which a script gives the schedule, is of the step",
                around=passes.schedule,
            )
            for name in _SCHEDULES
        ),
        *(
            Patch(
                where=f"megatron.core.pipeline_parallel.p2p_communication:{owner}{name}",
                reason="messages between stages, and the pass that they are for",
                around=_message(place, phase),
                since=since,
                before=before,
            )
            for owner, since, before in (("", TESTED[0], "0.14"), ("P2PCommunicator.", "0.14", ""))
            for name, phase in _PHASES.items()
        ),
        *(
            Patch(
                where=f"megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.{name}",
                reason="buckets of gradients and of gathered parameters",
                around=_bucket(place, payload),
            )
            for name, payload in _BUCKETS.items()
        ),
        *(
            Patch(
                where=f"megatron.core.optimizer.optimizer:{name}.step",
                reason="the step ends with the outermost optimizer's",
                around=passes.optimizer,
            )
            for name in _OPTIMIZERS
        ),
    )


def optimizers(context: Callable[[], AbstractContextManager[None]]) -> tuple[Patch, ...]:
    """Runs the steps of megatron-core's optimizers in a context: those of PyTorch's that they have end no step."""
    return tuple(
        Patch(
            where=f"megatron.core.optimizer.optimizer:{name}.step",
            reason="a script may have an optimizer of PyTorch alone, and its steps end with that one's",
            around=_within(lambda: (context(),)),
        )
        for name in _OPTIMIZERS
    )


def _within(contexts: Callable[[], tuple[AbstractContextManager[None], ...]]) -> Callable[[Any], Any]:
    """Makes a function run in contexts."""

    def around(original: Any) -> Any:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for context in contexts():
                    stack.enter_context(context)
                return original(*args, **kwargs)

        return run

    return around


def _message(place: StepPlace, phase: str) -> Callable[[Any], Any]:
    return _within(lambda: (place.in_phase(phase), place.carrying("activation")))


def _bucket(place: StepPlace, payload: str) -> Callable[[Any], Any]:
    return _within(lambda: (place.carrying(payload),))


class _Passes:
    """Which micro-batch and chunk a pass is of: a backward pass is known by the output that it begins with."""

    def __init__(self, place: StepPlace, short: Callable[[], bool]) -> None:
        self._place, self._short = place, short
        self._outputs: dict[int, tuple[Any, int, int]] = {}
        self._models: list[Any] = []
        self._stepping = 0
        self._running = 0, 0

    def schedule(self, original: Any) -> Any:
        """Wraps a schedule: its micro-batches are counted from 0, and its end is of the step."""

        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            from megatron.core import parallel_state
            from megatron.core.utils import get_model_config

            model = kwargs["model"]
            self._models = list(model) if isinstance(model, list) else [model]
            self._outputs.clear()
            config = get_model_config(self._models[0])
            if self._short() and not config.defer_embedding_wgrad_compute:
                # Stages that are interleaved take as many at a time as there are stages, or as the script says.
                stages = parallel_state.get_pipeline_model_parallel_world_size()
                together = max(stages, config.microbatch_group_size_per_vp_stage or 0)
                fewest = together if len(self._models) > 1 else 1
                kwargs["num_microbatches"] = min(fewest, kwargs["num_microbatches"])
            finalize = config.finalize_model_grads_func
            if finalize is not None:
                ends = _within(lambda: (self._place.in_phase("optimizer"), self._place.carrying("gradient")))
                config.finalize_model_grads_func = ends(finalize)
            try:
                return original(*args, **kwargs)
            finally:
                config.finalize_model_grads_func = finalize

        return run

    def forward(self, original: Any) -> Any:
        """Wraps the forward pass of a micro-batch through a chunk."""

        @wraps(original)
        def run(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            number, chunk = int(kwargs.get("current_microbatch") or 0), self._chunk(model)
            with (
                self._place.in_phase("forward"),
                self._place.in_micro_batch(number),
                self._place.in_chunk(chunk),
                self._place.carrying("activation"),
            ):
                made = original(forward_step_func, data_iterator, model, *args, **kwargs)
            output = _first(made[0])
            self._outputs[id(output)] = output, number, chunk
            return made

        return run

    def backward(self, original: Any) -> Any:
        """Wraps the backward pass of a micro-batch through a chunk."""

        @wraps(original)
        def run(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            _, number, chunk = self._outputs.pop(id(_first(output_tensor)), (None, 0, 0))
            with (
                self._place.in_micro_batch(number),
                self._place.in_chunk(chunk),
                self._place.carrying("activation"),
            ):
                return original(input_tensor, output_tensor, *args, **kwargs)

        return run

    def together(self, original: Any) -> Any:
        """Wraps a forward pass of one micro-batch beside a backward pass of another."""

        @wraps(original)
        def run(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self._running = int(kwargs.get("current_microbatch") or 0), self._chunk(model)
            number, chunk = self._running
            with (
                self._place.in_micro_batch(number),
                self._place.in_chunk(chunk),
                self._place.carrying("activation"),
            ):
                return original(forward_step_func, data_iterator, model, *args, **kwargs)

        return run

    def part(self, original: Any) -> Any:
        """Wraps the making of a part of a pass, which is for the forward pass that runs."""

        @wraps(original)
        def make(node: Any, *args: Any, **kwargs: Any) -> None:
            original(node, *args, **kwargs)
            node.is_of = self._running

        return make

    def part_forward(self, original: Any) -> Any:
        """Wraps a part of a forward pass."""
        return self._part(original, "forward")

    def part_backward(self, original: Any) -> Any:
        """Wraps a part of a backward pass."""
        return self._part(original, "backward")

    def _part(self, original: Any, phase: str) -> Any:
        @wraps(original)
        def run(node: Any, *args: Any, **kwargs: Any) -> Any:
            number, chunk = node.is_of
            with self._place.in_phase(phase), self._place.in_micro_batch(number), self._place.in_chunk(chunk):
                return original(node, *args, **kwargs)

        return run

    def optimizer(self, original: Any) -> Any:
        """Wraps the step of an optimizer, which may be one of several of another one."""

        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._stepping += 1
            try:
                with self._place.in_phase("optimizer"):
                    made = original(*args, **kwargs)
            finally:
                self._stepping -= 1
            if not self._stepping:
                self._place.step_ends()
            return made

        return run

    def _chunk(self, model: Any) -> int:
        return next((i for i, chunk in enumerate(self._models) if chunk is model), 0)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
