"""DeepSpeed to a capture: its engine tells phases and micro-batches, its optimizers what communications carry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from echograph.errors import CaptureError, InputError
from echograph.frontend.deepspeed import shims
from echograph.frontend.deepspeed.memory import gathering, is_offloaded, mark_copies, name_memory
from echograph.frontend.deepspeed.pipeline import Pipelines, axes
from echograph.frontend.deepspeed.slices import GATHER
from echograph.frontend.pytorch import annotate
from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.collectives import ranks_of
from echograph.frontend.scripts.recorder import ScriptRecorder
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

_ENGINE = ("runtime.engine", "DeepSpeedEngine")
_STAGE_1_AND_2 = ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
_STAGE_3 = ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
_GATHERS = ("_allgather_param", "_allgather_params_coalesced")
_CARRYING = (
    (*_ENGINE, "allreduce_gradients", "gradient"),
    (*_STAGE_1_AND_2, "average_tensor", "gradient"),
    ("runtime.zero.stage_1_and_2", "", "all_gather_dp_groups", "parameter"),
    (*_STAGE_3, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", "gradient"),
    ("runtime.zero.partition_parameters", "", "_dist_allgather_fn", "parameter"),
    *(("runtime.zero.partition_parameters", "Init", name, "parameter") for name in _GATHERS),
)
"""(module, class or "", function, what its communications carry)."""


_UNSUPPORTED = (
    (("zero_optimization", "offload_optimizer", "device"), ("nvme",)),
    (("zero_optimization", "offload_param", "device"), ("nvme",)),
    (("zero_optimization", "zenflow"), ()),
    (("zero_optimization", "zero_quantized_weights"), (True,)),
    (("zero_optimization", "zero_quantized_gradients"), (True,)),
    (("optimizer", "type"), ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")),
    (("compile", "deepcompile"), (True,)),
    (("hybrid_engine", "enabled"), (True,)),
    (("autotuning", "enabled"), (True,)),
)
"""(where in the configuration, values; none: any): these ask for what runs outside of PyTorch's operators."""


class DeepSpeedAdapter(TorchAdapter):
    """DeepSpeed 0.19: ZeRO, offload, gradient accumulation, fp16 and bf16, pipelines."""

    name: ClassVar[str] = "deepspeed"
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "deepspeed": "deepspeed"}
    tested: ClassVar[Mapping[str, tuple[str, str]]] = {"deepspeed": ("0.19", "0.20")}
    counts_optimizer_steps: ClassVar[bool] = False
    # ZeRO-3 learns in a first forward pass in which order parameters are used, and ranks compare that in a second.
    steady_step: ClassVar[int] = 3

    def __init__(self) -> None:
        super().__init__()
        self._config: Path | None = None
        self._engine: Any = None
        self._names: dict[int, str] = {}
        self._pipelines = Pipelines()

    def arguments(self, arguments: Sequence[str], config: Path | None) -> Sequence[str]:
        """The arguments as they are; the configuration stands for whichever the script gives DeepSpeed.

        Raises:
            InputError: there is no such file.
        """
        if config is not None and not config.is_file():
            raise InputError(f"{config}: no such file: give DeepSpeed's configuration in JSON")
        self._config = config
        return arguments

    @contextmanager
    def installed(self, world: World, recorder: ScriptRecorder) -> Iterator[None]:
        """DeepSpeed's shims, and its engine's hooks."""
        shims.load()
        self._engine = None
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(super().installed(world, recorder))
            enter(shims.installed(world))
            for hook in self._hooks(recorder):
                enter(hook)
            yield

    def axes(self, world: World) -> Mapping[str, int] | None:
        """A pipeline's own; else data parallelism, of whose ranks experts are divided over the innermost."""
        engine = self._engine
        if engine is not None and engine.pipeline_parallelism:
            return axes(engine)
        if engine is None or engine.seq_dp_world_size != world.size or engine.dp_world_size != world.size:
            return super().axes(world)
        experts = {ranks_of(group) for group in _expert_groups().values()} if engine.has_moe_layers else set()
        if not experts:
            return {"dp": world.size}
        ranks = experts.pop()
        neighbours = not experts and sorted(ranks) == list(range(min(ranks), min(ranks) + len(ranks)))
        return {"dp": world.size // len(ranks), "ep": len(ranks)} if neighbours else None

    def _hooks(self, recorder: ScriptRecorder) -> Iterator[AbstractContextManager[None]]:
        engine = shims.hook_point(*_ENGINE)
        yield patched(engine, "__init__", lambda f: self._made(f, recorder))
        yield patched(engine, "forward", lambda f: _in_micro_batch(f, recorder, annotate.FORWARD))
        yield patched(engine, "backward", lambda f: _in_micro_batch(f, recorder, annotate.BACKWARD))
        yield patched(engine, "step", lambda f: _stepping(f, recorder))
        yield from self._pipelines.hooks(recorder, lambda engine: _step_ends(engine, recorder))
        for module, owner, name, payload in _CARRYING:
            around = partial(_carrying, recorder=recorder, payload=payload)
            yield patched(shims.hook_point(module, owner), name, around)
        coordinator = shims.hook_point(
            "runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"
        )
        init = shims.hook_point("runtime.zero.partition_parameters", "Init")
        yield patched(coordinator, GATHER, lambda f: self._gathering(f, recorder))
        for owner, name in ((coordinator, GATHER), *((init, name) for name in _GATHERS)):
            yield patched(owner, name, lambda f: gathering(f, self._offloads_parameters))
        if self._config is not None:
            yield patched(shims.hook_point(""), "initialize", self._configured)

    def _configured(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(args: Any = None, *others: Any, **kwargs: Any) -> Any:
            if args is not None and getattr(args, "deepspeed_config", None) is not None:
                args.deepspeed_config = None
            return original(args, *others, **kwargs | {"config": str(self._config), "config_params": None})

        return initialize

    def _made(self, original: Callable[..., Any], recorder: ScriptRecorder) -> Callable[..., Any]:
        def init(engine: Any, *args: Any, **kwargs: Any) -> None:
            check(getattr(kwargs.get("config_class"), "_param_dict", {}))
            if type(engine).__name__ == "DualPipeVEngine":
                raise CaptureError("DeepSpeed's DualPipeV is not captured: give its layers to a PipelineModule")
            original(engine, *args, **kwargs)
            if is_offloaded(engine.zero_offload_optimizer()):
                recorder.note("offload: the optimizer's work on the host counts as the device's")
            self._engine = engine
            self._names = {id(p): name for name, p in engine.module.named_parameters()}

        return init

    def _offloads_parameters(self) -> bool:
        return bool(getattr(getattr(self._engine, "optimizer", None), "offload_param", False))

    def _gathering(self, original: Callable[..., Any], recorder: ScriptRecorder) -> Callable[..., Any]:
        """Parameters are gathered ahead, while other modules run: what they are for is their own module."""

        def gather(coordinator: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            with recorder.in_module(common_module(self._names.get(id(p), "") for p in params)):
                return original(coordinator, params, *args, **kwargs)

        return gather


def _expert_groups() -> Mapping[str, Any]:
    found: Mapping[str, Any] = shims.hook_point("utils.groups")._get_expert_parallel_group_dict()
    return found


def check(configuration: Mapping[str, Any]) -> None:
    """Refuses what a capture does not see.

    Raises:
        CaptureError: names the entry of the configuration.
    """
    for path, refused in _UNSUPPORTED:
        value: Any = configuration
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value in refused or (value and not refused):
            entry = f"{'.'.join(path)} = {json.dumps(value)}" if refused else ".".join(path)
            raise CaptureError(f"DeepSpeed's {entry} is not captured: leave it out of the configuration")


def common_module(parameters: Iterable[str]) -> str:
    """Path of the innermost module that has all of some parameters."""
    paths = [name.split(".")[:-1] for name in parameters]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def _in_micro_batch(original: Callable[..., Any], recorder: ScriptRecorder, phase: str) -> Callable[..., Any]:
    def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
        number = engine.micro_steps % engine.gradient_accumulation_steps()
        if recorder.sample is None and phase == annotate.FORWARD:
            recorder.sample = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if engine.pipeline_parallelism:
            return original(engine, *args, **kwargs)  # the schedule has told
        with recorder.in_micro_batch(number), recorder.in_phase(phase):
            return original(engine, *args, **kwargs)

    return run


def _stepping(original: Callable[..., Any], recorder: ScriptRecorder) -> Callable[..., Any]:
    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        with recorder.in_phase(annotate.OPTIMIZER), recorder.carrying("other"):
            made = original(engine, *args, **kwargs)
        if engine.global_steps != before:
            _step_ends(engine, recorder)
        return made

    return step


def _step_ends(engine: Any, recorder: ScriptRecorder) -> None:
    mark_copies(recorder.graph, name_memory(engine, recorder))
    recorder.step_ends()


def _carrying(original: Callable[..., Any], recorder: ScriptRecorder, payload: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.carrying(payload):
            return original(*args, **kwargs)

    return run
