"""Scripts of plain PyTorch: DDP, FSDP, DTensor, pipelines; and what other frameworks' adapters begin with.

torch.distributed.pipelining without the other stages. Before its first step a stage asks the one before it for the
shapes of its inputs and the one behind it for those of its outputs' gradients. The stages run one after the other
here, so what a stage says is kept for those that are run later. A gradient has the shape and type of the output
that it is of. The shapes that a stage with several chunks a rank asks for before any rank could say them are taken
to be those of the last output known; the stage that makes them says later whether that was so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, reduce, wraps
from inspect import getattr_static
from math import prod
from types import FunctionType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from echograph.errors import CaptureError, OtherFrameworkError
from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.capture import seen_by_a_compiler
from echograph.frontend.pytorch.known_values import given, real
from echograph.frontend.scripts import device, repeated
from echograph.frontend.scripts.adapter import Adapter, once_imported, patched, replaced
from echograph.frontend.scripts.checks import one_rank
from echograph.frontend.scripts.collectives import coalesced
from echograph.frontend.scripts.host_work import batched, compiled
from echograph.frontend.scripts.places import mark, put_there
from echograph.frontend.scripts.recorder import REGION, ScriptRecorder
from echograph.frontend.scripts.saved import Saved
from echograph.frontend.scripts.values import line_of_script
from echograph.frontend.scripts.world import World
from echograph.ir.passes.fuse import COMPILED, KernelRegion

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
    def run(stage: Any, /, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
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


_C10D: Any = torch._C._distributed_c10d


class TorchAdapter(Adapter):
    """PyTorch itself."""

    name: ClassVar[str] = "torch"
    stack: ClassVar[str] = "eager"
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch"}
    tested: ClassVar[Mapping[str, tuple[str, str]]] = {"torch": ("2.13", "2.14")}
    runs_alone: ClassVar[bool] = True

    def __init__(self) -> None:
        self._stages = Stages()
        self._meshes: list[tuple[tuple[str, ...], tuple[int, ...]]] = []

    @contextmanager
    def installed(self, world: World, recorder: ScriptRecorder) -> Iterator[None]:
        """A GPU, data loaders in this process, wrappers that take fake tensors; checkpoints are not written."""
        from torch.distributed import device_mesh
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, dataloader

        self._meshes.clear()
        recorder.stack, recorder.gpus = self.stack, world.gpus
        # Threads of its own find no GPU: Transformers is asked to load weights in this one.
        os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        logs = "WANDB_MODE" in os.environ
        # Weights & Biases would be asked for a key, and told of losses that nobody has.
        os.environ.setdefault("WANDB_MODE", "disabled")
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(nullcontext() if logs else once_imported("wandb", _unlogged))
            enter(device.present(world, recorder.note, recorder.counter, recorder.warn))
            enter(repeated.left_out(recorder))
            enter(coalesced())
            for owner in (torch.distributed, torch.distributed.distributed_c10d):
                enter(patched(owner, "batch_isend_irecv", batched))
            # It draws until all values are within bounds, which without values is for ever.
            enter(patched(torch.nn.init, "_no_grad_trunc_normal_", lambda _: lambda tensor, *_, **__: tensor))
            enter(Saved(recorder.note).installed())
            for name, hooks in _LATER.items():
                enter(once_imported(name, partial(hooks, world, recorder)))
            if self.name == TorchAdapter.name:
                for name, places in _OF_DEEPSPEED.items():
                    enter(once_imported(name, partial(_left_to_deepspeed, name, places)))
            enter(once_imported("torch.distributed.pipelining", partial(self._stages.installed, recorder)))
            enter(patched(torch, "compile", lambda _: compiling(recorder, self.compiles)))
            # Of graphs that are not made; what it imports first takes seconds.
            enter(replaced(torch.compiler, "cudagraph_mark_step_begin", lambda: None))
            enter(patched(torch.multiprocessing, "spawn", lambda _: _spawn(world)))
            enter(patched(DataLoader, "__init__", _in_this_process))
            enter(
                patched(dataloader._BaseDataLoaderIter, "__init__", lambda f: _of(_quietly(recorder, _really(f))))
            )
            enter(patched(dataloader._BaseDataLoaderIter, "__next__", lambda f: _loading(recorder, f)))
            enter(patched(dataloader._BaseDataLoaderIter, "_next_index", _really))
            enter(patched(device_mesh.DeviceMesh, "__init__", lambda f: self._mesh(world, f)))
            for name in _OF_MESHES:
                if hasattr(device_mesh.DeviceMesh, name):
                    static = isinstance(getattr_static(device_mesh.DeviceMesh, name), staticmethod)
                    enter(patched(device_mesh.DeviceMesh, name, _static if static else _with_values))
            ranks = property(_with_values(getattr_static(device_mesh.DeviceMesh, "mesh").fget))
            enter(replaced(device_mesh.DeviceMesh, "mesh", ranks))
            for owner in (device_mesh, torch.distributed):
                if hasattr(owner, "init_device_mesh"):
                    enter(patched(owner, "init_device_mesh", lambda f: _cpu_mesh(world, f)))
            enter(patched(DistributedDataParallel, "__init__", lambda f: _replicate(recorder, world, f)))
            enter(patched(DistributedDataParallel, "_sync_buffers", lambda f: _carrying(recorder, "other", f)))
            enter(patched(_C10D.Reducer, "_rebuild_buckets", lambda f: _quietly(recorder, _really(f))))
            norms = importlib.import_module("torch.nn.modules._functions")
            enter(patched(norms.SyncBatchNorm, "forward", _of_full_batches))
            yield

    def meshes(self, world: World) -> list[Mapping[str, int]]:
        """Those of all ranks whose dimensions have names, the last that the script made first."""
        if known := super().meshes(world):
            return known
        named = [(names, sizes) for names, sizes in reversed(self._meshes) if len(names) == len(sizes)]
        return [dict(zip(names, sizes, strict=True)) for names, sizes in named if prod(sizes) == world.size]

    def _mesh(self, world: World, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(mesh: Any, /, device_type: str, *args: Any, **kwargs: Any) -> None:
            with unset_fake_temporarily():
                args = tuple(map(real, args))
                kwargs = {name: real(given) for name, given in kwargs.items()}
                original(mesh, device.kind(world, device_type), *args, **kwargs)
            names = tuple(mesh.mesh_dim_names or ())
            self._meshes.append((names, tuple(mesh.mesh.shape)))

        return init


@contextmanager
def _loading_here(world: World, recorder: ScriptRecorder) -> Iterator[None]:
    """In the context, torchdata's loader, whose constructor is its own, starts no workers and pins nothing."""
    del world, recorder
    module = sys.modules["torchdata.stateful_dataloader.stateful_dataloader"]
    with patched(module.StatefulDataLoader, "__init__", _in_this_process):
        yield


@contextmanager
def _states_made(world: World, recorder: ScriptRecorder) -> Iterator[None]:
    del world
    states = importlib.import_module("torch.distributed.checkpoint.state_dict")
    with patched(states, "_init_optim_state", lambda f: _making_states(recorder, f)):
        yield


@contextmanager
def _divided(world: World, recorder: ScriptRecorder) -> Iterator[None]:
    """DTensors, of this run's meshes alone: those of a rank that was run before are equal, but are gone."""
    from torch.distributed.tensor import DTensor, _sharding_prop

    del world
    propagated: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    propagated.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute = importlib.import_module("torch.distributed.tensor._redistribute")
    redistribute._planner_cache.clear()
    redistribute._gen_transform_infos.cache_clear()
    with ExitStack() as stack:
        # A random operator of a DTensor would be one of a device's generator, which has no state here.
        for name in ("_random", "_dispatch"):
            owner = importlib.import_module(f"torch.distributed.tensor.{name}")
            stack.enter_context(replaced(owner, "is_rng_supported_mesh", lambda *_: False))
        propagator = _sharding_prop.ShardingPropagator
        quiet = patched(propagator, "_propagate_tensor_meta_non_cached", lambda f: _quietly(recorder, f))
        stack.enter_context(quiet)
        yield


@contextmanager
def _in_shares(world: World, recorder: ScriptRecorder) -> Iterator[None]:
    """Both of FSDP's kinds."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    flat = importlib.import_module("torch.distributed.fsdp._flat_param")
    runtime = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    group = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    with (
        patched(FullyShardedDataParallel, "__init__", lambda f: _fully_sharded(recorder, world, f)),
        patched(flat, "_same_storage", lambda _: _same_memory),
        patched(runtime, "_reduce_grad", lambda f: _carrying(recorder, "gradient", f)),
        patched(runtime, "_unshard", lambda f: _gathering(recorder, f)),
        patched(group, "foreach_all_gather", lambda f: _gathering(recorder, f)),
        patched(group, "foreach_reduce", lambda f: _carrying(recorder, "gradient", f)),
    ):
        yield


@contextmanager
def _pictured(_: World, __: ScriptRecorder) -> Iterator[None]:
    """A writer for TensorBoard would trace the model for a picture, with values."""
    from torch.utils.tensorboard import SummaryWriter

    with replaced(SummaryWriter, "add_graph", lambda *_, **__: None):
        yield


@contextmanager
def _unlogged() -> Iterator[None]:
    """Weights & Biases is off, whatever a script says of its mode, and asks nobody for a key."""
    wandb = sys.modules["wandb"]

    def off(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **kwargs | {"mode": "disabled"})

    with patched(wandb, "init", off), patched(wandb, "login", lambda _: lambda *_, **__: True):
        yield


_LATER: Mapping[str, Callable[[World, ScriptRecorder], AbstractContextManager[None]]] = {
    "torch.distributed.checkpoint.state_dict": _states_made,
    "torch.distributed.tensor": _divided,
    "torch.distributed.fsdp": _in_shares,
    "torchdata.stateful_dataloader.stateful_dataloader": _loading_here,
    "torch.utils.tensorboard": _pictured,
}
"""Hooks of what many scripts do not import."""

_OF_DEEPSPEED = {
    "deepspeed": ("initialize", "PipelineModule.__init__"),
    "deepspeed.ops.op_builder.builder": ("OpBuilder.load",),
    "deepspeed.runtime.zero.partition_parameters": ("Init.__init__",),
}
"""Module -> what a script begins with that trains by DeepSpeed's engine."""


@contextmanager
def _left_to_deepspeed(module: str, places: Sequence[str]) -> Iterator[None]:
    """In the context, a script that begins to train by DeepSpeed's engine ends, to be captured as one of its."""

    def ending(_: Any) -> Callable[..., NoReturn]:
        def end(*_: Any, **__: Any) -> NoReturn:
            error = OtherFrameworkError("the script trains with DeepSpeed: capture it by echoc capture deepspeed")
            error.framework = "deepspeed"
            raise error

        return end

    with ExitStack() as stack:
        for place in places:
            *owner, name = place.split(".")
            stack.enter_context(patched(reduce(getattr, owner, sys.modules[module]), name, ending))
        yield


# What a mesh asks of the numbers of its ranks.
_OF_MESHES = (
    "__getitem__", "_flatten", "_unflatten", "_get_mesh_tensor_from_full_mesh", "_compute_coordinates_from_mesh",
    "_get_all_submeshes", "_concatenate", "_create_sub_mesh", "_create_flatten_mesh", "_create_unflatten_mesh",
)  # fmt: skip


def _with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def _static(function: Callable[..., Any]) -> Any:
    return staticmethod(_with_values(function))


def _cpu_mesh(world: World, original: Callable[..., Any]) -> Callable[..., Any]:
    def make(device_type: str, *args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return original(device.kind(world, device_type), *args, **kwargs)

    return make


def compiling(recorder: ScriptRecorder, frameworks: tuple[str, ...] = ()) -> Callable[..., Any]:
    """`torch.compile` that compiles nothing: what it was given runs as it is, and is known to become kernels.

    A function of one of the `frameworks`' modules is one call for the host, too.
    """

    def compile(model: Any = None, *_: Any, **__: Any) -> Any:
        recorder.stack = "inductor" if recorder.stack in ("eager", "fsdp") else recorder.stack
        if model is None:
            return compile
        if isinstance(model, torch.nn.Module):
            model.forward = _region(recorder, model.forward)
            return model
        own = isinstance(model, FunctionType) and model.__module__.startswith(frameworks)
        return _region(recorder, compiled(model) if own else model)

    return compile


def _region(recorder: ScriptRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.in_region(COMPILED) as region, seen_by_a_compiler():
            made = function(*args, **kwargs)
        if region is not None and recorder.is_recording and torch.is_grad_enabled():
            for result in tree_leaves(made):
                if isinstance(result, Tensor) and result.requires_grad:
                    hook = partial(_whole_gradient, recorder.node_of(result), region)
                    result.register_hook(hook)  # type: ignore[no-untyped-call]
        return made

    return run


def _whole_gradient(made: Node, region: KernelRegion, gradient: Tensor) -> Tensor | None:
    """The gradient of what a compiled function returned, which its backward pass is given whole.

    A result that the script makes nothing of, as a model's logits beside its loss, has one of zeros, which are
    there and are added (`torch.autograd.Function.set_materialize_grads`, on in AOTAutograd; seen on an H200).
    """
    regions = [user.meta.get(REGION) for user in made.users]
    unused = all(its is not None and region.number in (its.number, its.of) for its in regions)
    return gradient + torch.zeros_like(gradient) if unused else None


def _spawn(world: World) -> Callable[..., None]:
    def spawn(fn: Callable[..., None], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
        fn(world.local_rank, *args)

    return spawn


def _in_this_process(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(loader: Any, /, *args: Any, **kwargs: Any) -> None:
        # Dataset, batch size, shuffle, sampler, batch sampler; then comes the number of workers.
        loader.has_workers = bool(args[5] if len(args) > 5 else kwargs.get("num_workers"))
        args = args[:5]
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "timeout"):
            kwargs.pop(name, None)
        original(loader, *args, **kwargs)

    return init


def _of(original: Callable[..., Any]) -> Callable[..., Any]:
    """An iterator of a loader knows whether the loader was to have worker processes."""

    def init(iterator: Any, /, loader: Any, *args: Any, **kwargs: Any) -> None:
        original(iterator, loader, *args, **kwargs)
        # A loader of another library may have a constructor of its own.
        iterator.has_workers = getattr(loader, "has_workers", loader.num_workers > 0)

    return init


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs with values: what shuffles needs them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _loading(recorder: ScriptRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a data set as it is, with values, and makes what it gives the inputs of a step."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = put_there()
        with recorder.pausing(), _disable_current_modes():
            batch = function(*args, **kwargs)
        tensors = [part for part in tree_leaves(batch) if isinstance(part, Tensor) and part.dim()]
        if args[0].has_workers:
            recorder.handed_over(len(tensors))
        if tensors:
            recorder.loaded = frozenset(int(tensor.shape[0]) for tensor in tensors), line_of_script()
        return tree_map(partial(_given, recorder, put_there() > before), batch)

    return run


def _given(recorder: ScriptRecorder, gpu: bool, part: Any) -> Any:
    """Of what a loader gives: a tensor without data, on the GPU if the data set puts its samples there."""
    made = given(recorder.fake, part)
    if made is not part and gpu:
        mark(made)
    return made


def converted_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply`, of `half`, `bfloat16` and `to`, for modules that are fake and whose parameters are kept.

    PyTorch would swap the fake parameters for new ones, which it refuses where anything refers to them, and
    frameworks keep hooks and attributes on them, or the parameters themselves elsewhere.
    """
    del original

    def apply(module: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        for part in module.modules() if recurse else (module,):
            for parameter in part._parameters.values():
                if parameter is not None:
                    parameter.data = function(parameter.data)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = function(buffer)
        return module

    return apply


def _quietly(recorder: ScriptRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs what is no work of the device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.pausing():
            return function(*args, **kwargs)

    return run


def _making_states(recorder: ScriptRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.making_states():
            return function(*args, **kwargs)

    return run


def _carrying(recorder: ScriptRecorder, payload: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.carrying(payload):
            return function(*args, **kwargs)

    return run


def _gathering(recorder: ScriptRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """As FSDP does: the script's stack is its, unless what it runs is compiled."""

    def run(*args: Any, **kwargs: Any) -> Any:
        recorder.stack = "fsdp" if recorder.stack == "eager" else recorder.stack
        with recorder.carrying("parameter"):
            return function(*args, **kwargs)

    return run


def _replicate(recorder: ScriptRecorder, world: World, original: Callable[..., Any]) -> Callable[..., Any]:
    """DDP on fake tensors.

    Ranks need not agree on what they have alike. Its C++ reducer cannot take a fake collective's future, so a hook
    in Python all-reduces each bucket when it is full, as the reducer does, or calls the script's own hook.
    """

    def init(ddp: Any, /, module: Any, *args: Any, **kwargs: Any) -> None:
        names = ("device_ids", "output_device", "dim", "broadcast_buffers", "init_sync")
        given = dict(zip(names, args, strict=False)) | kwargs
        given |= {"device_ids": None, "output_device": None, "init_sync": False}
        with unset_fake_temporarily(), _knowing_used(recorder):
            original(ddp, module, **given)
        recorder.warn(one_rank(type(ddp).__name__, ddp.process_group, world, line_of_script()))
        register = ddp.register_comm_hook
        hooks: list[tuple[Any, Any]] = []
        register(None, _bucket_hook(recorder, ddp.process_group, hooks))

        def registered(state: Any, hook: Any) -> None:
            ddp._check_comm_hook(hook)
            if hooks:
                raise RuntimeError("register_comm_hook can only be called once")
            hooks.append((state, hook))

        ddp.register_comm_hook = registered
        ddp._register_builtin_comm_hook = lambda kind: registered(None, _BUILT_IN[kind])

    return init


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds the integers of 32 bits that are made in its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.integers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.int32:
            self.integers.append(out)
        return out


@contextmanager
def _knowing_used(recorder: ScriptRecorder) -> Iterator[None]:
    """In the context a reducer is made, whose maps keep their values: which parameters were used.

    With `find_unused_parameters` it marks each that got a gradient in one on the host, all-reduces a copy on the
    GPU, and looks there for those that got none.
    """
    with _Made() as made:
        yield
    for tensor in made.integers:
        recorder.name(tensor, annotate.BUFFER, "used_parameters")  # which holds it
        recorder.kept.add(tensor.untyped_storage()._cdata)


def _fully_sharded(recorder: ScriptRecorder, world: World, original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP: ranks are taken to have the same parameters; it refuses a CPU that nobody asks for by name."""
    from torch.distributed.fsdp import ShardingStrategy

    def init(fsdp: Any, /, module: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["sync_module_states"] = False
        if not world.gpus:
            kwargs["device_id"] = torch.device("cpu")
        original(fsdp, module, *args, **kwargs)
        if fsdp.sharding_strategy is ShardingStrategy.NO_SHARD or not hasattr(fsdp, "_inter_node_pg"):
            recorder.warn(one_rank(type(fsdp).__name__, fsdp.process_group, world, line_of_script()))

    return init


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory, which FSDP asks by addresses: fake tensors have none."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _of_full_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Batch normalisation over ranks that all have samples: it looks for those without, but in a CUDA graph."""

    def forward(*args: Any) -> Any:
        with replaced(torch.cuda, "is_current_stream_capturing", lambda: True):
            return original(*args)

    return forward


class _Done:
    """The work of a collective, whose future has the tensors that it wrote: a fake one's has none."""

    def __init__(self, work: Any, written: list[Tensor]) -> None:
        self._work, self._written = work, written

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """It has ended."""
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result(self._written)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _with_future(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        written = (*args, *kwargs.values())[0]
        return work and _Done(work, written if isinstance(written, list) else [written])

    return call


_OF_HOOKS = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_BUILT_IN = {
    _C10D.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    _C10D.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


def _compresses_later(state: Any) -> str:
    """A line on a hook that reduces whole gradients in this step, and compresses them in later ones; else ""."""
    begin = getattr(state, "start_powerSGD_iter", 0)
    if getattr(state, "iter", begin) >= begin:
        return ""
    return (
        f"PowerSGD compresses gradients after {begin:,} steps, and the recorded step is before: "
        f"--step {begin + 2} records one that does, or give its state an earlier start_powerSGD_iter"
    )


def _bucket_hook(recorder: ScriptRecorder, group: Any, hooks: list[tuple[Any, Any]]) -> Callable[..., Any]:
    """What the reducer calls for each bucket that is full.

    Args:
        recorder: names the buckets.
        group: over whose ranks gradients are added.
        hooks: the script's own, and its state, if there is one.
    """
    import torch.distributed as dist

    def reduce(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        del state
        buffer = bucket.buffer()
        recorder.name(buffer, annotate.BUFFER, f"bucket.{bucket.index()}")
        if hooks:
            with recorder.carrying("gradient"), ExitStack() as stack:
                for name in _OF_HOOKS:
                    stack.enter_context(patched(dist, name, _with_future))
                own, hook = hooks[0]
                if recorder.is_recording:
                    recorder.warn(_compresses_later(own))
                made: torch.futures.Future[Tensor] = hook(own, bucket)
                return made
        recorder.untouched = buffer  # the reducer's buckets have memory, as much as all gradients
        buffer.div_(group.size())
        recorder.untouched = None
        with recorder.carrying("gradient"):
            dist.all_reduce(buffer, group=group, async_op=True)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    reduce.__annotations__ = {"bucket": _C10D.GradBucket, "return": torch.futures.Future[Tensor]}
    return reduce
