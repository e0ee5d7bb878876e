"""DeepSpeed to a capture: its engine tells phases and micro-batches, its optimizers what communications carry.

Its pipeline engine has a schedule, which tells phase and micro-batch: a list of instructions for one stage, each
of which the engine executes by a method. An instruction of a pass is there once for every micro-batch, in their
order, so counting tells which one it is for. Before the first message (before each one, with `dynamic_shape`) a
stage tells the next one the shapes of its output; the stages run one after the other here, so what a stage tells
is kept for those that are run later.

Its optimizers keep flat parameters or shares, masters, moments and gradients from step to step. Which copies of a
recorded step go between host and device is told from that: in a capture both are one memory, so what lies on the
host is known by name, as what an engine that offloads keeps from step to step, and what is made of that alone.
Parameters that lie there are moved to the device to be gathered. Within one memory such a move would be no work:
`FromHost` makes it a copy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from echograph.errors import CaptureError, InputError
from echograph.frontend.deepspeed import shims
from echograph.frontend.deepspeed.shims import GATHER
from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.call_nodes import is_in_place
from echograph.frontend.pytorch.recorder import ModelInput
from echograph.frontend.scripts.adapter import patched, replaced
from echograph.frontend.scripts.collectives import ranks_of
from echograph.frontend.scripts.launchers import DEEPSPEED
from echograph.frontend.scripts.recorder import COPY, ScriptRecorder
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.types import CopyDirection

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
    stack: ClassVar[str] = "deepspeed"
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "deepspeed": "deepspeed"}
    tested: ClassVar[Mapping[str, tuple[str, str]]] = {"deepspeed": ("0.19", "0.20")}
    counts_optimizer_steps: ClassVar[bool] = False
    runs_alone: ClassVar[bool] = False  # its initialization asks for what a launcher says
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

    def launched(self, script: Path, arguments: Sequence[str], world: World) -> Sequence[str]:
        """With `--local_rank`, as the launcher `deepspeed` gives it, where the script's file names that option."""
        asked = "local_rank" in script.read_text(encoding="utf-8", errors="replace")
        asked = asked and script.with_suffix("").parts[-3:] != tuple(DEEPSPEED.split("."))  # which says it itself
        given = any(argument.startswith(("--local_rank", "--local-rank")) for argument in arguments)
        return (f"--local_rank={world.local_rank}", *arguments) if asked and not given else arguments

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
        step_ends = _Pace(recorder)
        yield patched(engine, "step", lambda f: _stepping(f, recorder, step_ends))
        yield from self._pipelines.hooks(recorder, step_ends)
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
        def init(engine: Any, /, *args: Any, **kwargs: Any) -> None:
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

        def gather(coordinator: Any, /, params: Any, *args: Any, **kwargs: Any) -> Any:
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
    def run(engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        number = engine.micro_steps % engine.gradient_accumulation_steps()
        if recorder.sample is None and phase == annotate.FORWARD:
            given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            recorder.sample = None if given is None else ModelInput.of(given)
        if engine.pipeline_parallelism:
            return original(engine, *args, **kwargs)  # the schedule has told
        with recorder.in_micro_batch(number), recorder.in_phase(phase):
            return original(engine, *args, **kwargs)

    return run


def _stepping(
    original: Callable[..., Any], recorder: ScriptRecorder, step_ends: Callable[[Any], None]
) -> Callable[..., Any]:
    def step(engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        with recorder.in_phase(annotate.OPTIMIZER), recorder.carrying("other"):
            made = original(engine, *args, **kwargs)
        if engine.global_steps != before:
            step_ends(engine)
        return made

    return step


class _Pace:
    """Ends a training step where the first engine does that stepped: of several, a GAN's, each has a turn."""

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self._first: Any = None

    def __call__(self, engine: Any) -> None:
        if self._first is None:
            self._first = engine
        mark_copies(self._recorder.graph, name_memory(engine, self._recorder))
        if engine is self._first:
            self._recorder.step_ends()


def _carrying(original: Callable[..., Any], recorder: ScriptRecorder, payload: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.carrying(payload):
            return original(*args, **kwargs)

    return run


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

        def execute(engine: Any, /, *args: Any, **kwargs: Any) -> Any:
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
    def train_batch(engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        recorder.step_begins()
        # What is no instruction gathers the loss, after the optimizer.
        with recorder.in_phase(annotate.OPTIMIZER), recorder.carrying("other"):
            made = original(engine, *args, **kwargs)
        step_ends(engine)
        return made

    return train_batch


def _layout(tensor: Tensor) -> Layout:
    return list(tensor.shape), tensor.dtype


_TO_HOST, _TO_DEVICE = CopyDirection.DEVICE_TO_HOST, CopyDirection.HOST_TO_DEVICE


def is_offloaded(config: Any) -> bool:
    """Whether `offload_optimizer` or `offload_param` of a configuration asks for the host's memory."""
    return config is not None and config.device == "cpu"


class FromHost(TorchFunctionMode):
    """Copies what is moved to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        if func is not Tensor.to or not isinstance(target, str | torch.device):
            return func(*args, **kwargs)
        (moved,) = args[:1]
        return torch.empty(moved.shape, dtype=moved.dtype, device=target).copy_(moved)


def gathering(original: Callable[..., Any], offloads: Callable[[], bool]) -> Callable[..., Any]:
    """Around a function that gathers parameters.

    Args:
        original: the function.
        offloads: whether they lie on the host.
    """

    def gather(*args: Any, **kwargs: Any) -> Any:
        if not offloads():
            return original(*args, **kwargs)
        with FromHost():
            return original(*args, **kwargs)

    return gather


def mark_copies(graph: Graph, host: Container[str]) -> None:
    """Marks the copies between host and device.

    Args:
        graph: of a recorded step.
        host: names of the placeholders that lie on the host.
    """
    there: set[Node] = set()
    for node in graph.nodes:
        written = node.args[0] if node.op == "call_function" and is_in_place(node) else None
        if node.op == "placeholder":
            lies_there = node.meta[annotate.FQN] in host
        elif isinstance(written, Node):
            lies_there = written in there
            if node.target is torch.ops.aten.copy_.default and lies_there != (node.args[1] in there):
                node.meta[COPY] = _TO_HOST if lies_there else _TO_DEVICE
        else:
            lies_there = bool(node.all_input_nodes) and there.issuperset(node.all_input_nodes)
        if lies_there:
            there.add(node)


_PARAMETERS = (("bit16_groups_flat", "flat"), ("fp16_partitioned_groups_flat", "share"))
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
_HOST_BUFFERS = (
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "offload_gradient_dict",
)
"""Attributes of ZeRO's optimizers; of the last ones, what they keep where the optimizer is offloaded."""


def name_memory(engine: Any, recorder: ScriptRecorder) -> set[str]:
    """Tells a recorder what an engine's memory is, between two steps.

    ZeRO keeps the parameters of a group in one flat tensor, or this rank's share of it, and a model's parameters
    are parts of that, or (ZeRO-3) nothing until they are gathered.

    Returns:
        The names of what lies on the host.
    """
    zero = engine.optimizer
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    recorder.memory.trained = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    host: set[str] = set()
    stage, over = engine.zero_optimization_stage(), ranks_of(engine.seq_data_parallel_group)
    for tensor, name in _parameter_memory(zero, engine.module):
        recorder.memory.divide(tensor, [over] if stage == 3 else [])
        recorder.name(tensor, annotate.PARAMETER, name)
        host |= {name} if getattr(zero, "offload_param", False) else set()
    for tensor, role, name in _optimizer_memory(zero):
        if tensor.dim() and role != annotate.BUFFER:
            recorder.memory.divide(tensor, [over] if stage else [])
        recorder.name(tensor, role, name)
        host |= {name} if is_offloaded(engine.zero_offload_optimizer()) else set()
    gradients = getattr(zero, "grad_partitions_flat_buffer", None)
    if isinstance(gradients, Tensor):
        recorder.memory.divide(gradients, [over])
        recorder.name(gradients, annotate.GRADIENT, "share.grad")
    return host


def _parameter_memory(zero: Any, module: Any) -> Iterator[tuple[Tensor, str]]:
    """Flat parameters, shares of them, and shares that have memory of their own, with names."""
    for attribute, name in _PARAMETERS:
        for number, tensor in enumerate(_tensors(getattr(zero, attribute, ()))):
            yield tensor, f"{name}.{number}"
    for path, parameter in module.named_parameters():
        share = getattr(parameter, "ds_tensor", None)
        if isinstance(share, Tensor):
            yield share, f"{path}.share"


def _optimizer_memory(zero: Any) -> Iterator[tuple[Tensor, str, str]]:
    """Tensor, role and name of the masters, their gradients and moments, and of buffers for these."""
    state = getattr(getattr(zero, "optimizer", None), "state", {})
    masters = [tensor for attribute in _MASTERS for tensor in _tensors(getattr(zero, attribute, ()))]
    for number, master in enumerate(masters):
        yield master, annotate.OPTIMIZER_STATE, f"master.{number}"
        if master.grad is not None:
            yield master.grad, annotate.GRADIENT, f"master.{number}.grad"
        for slot, value in state[master].items() if master in state else ():
            if isinstance(value, Tensor):
                yield value, annotate.OPTIMIZER_STATE, f"master.{number}.{slot}"
    for attribute in _HOST_BUFFERS:
        for number, tensor in enumerate(_tensors(getattr(zero, attribute, ()))):
            yield tensor, annotate.BUFFER, f"{attribute}.{number}"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
