"""Writes down one training step of a script: operators, collectives, messages, and what waits for what.

The recorder is on top of the fake tensors for as long as the script runs, and writes down nothing but the step
asked for. A step is what lies between the ends of two optimizer steps (of the optimizer that steps first; an
outermost `step` counts). The graph is that of `frontend.pytorch.annotate`; its nodes hold besides, in `meta`:

    STREAM         name of the stream that a call is issued to
    AFTER          call nodes that must have ended before it, because its stream waited for them
    COMMUNICATION  `collectives.Communication`, on collectives and messages
    MICRO_BATCH    number of the micro-batch; None or absent: of the step
    CHUNK          number of the pipeline's chunk, PAYLOAD what a communication carries, where an adapter said so
    REGION         `ir.passes.fuse.KernelRegion` of calls that are one kernel of the script, or a compiler's

Adapters tell it where the step is, by contexts that nest:

    with recorder.in_phase("forward"):     # or backward, recompute, optimizer: what runs is of that phase
    with recorder.in_micro_batch(3):       # or None: of the step
    with recorder.in_chunk(1):             # of a pipeline with several chunks a rank
    with recorder.in_module("layers.0"):   # what runs is done for it
    with recorder.carrying("gradient"):    # parameter, gradient, activation, optimizer_state
    with recorder.in_region(COMPILED):     # what runs, and its backward pass, is one kernel or a compiler's
    with recorder.pausing():               # what runs is no work of the step (shapes are worked out, say)
    recorder.step_begins()                 # only where a step begins before its first module runs
    recorder.step_ends()                   # the step has ended; the next begins here
    recorder.name(tensor, role, "layers.0.weight")    # a tensor that lives through steps
    recorder.note("...")                   # a line for the user

Where nobody says the micro-batch, a new one begins with a forward pass that follows a backward pass; where forward
passes wait for theirs, as in pipelines, it is told from what each backward pass is of (`micro_batches`). Where
nobody says the phase: what runs in an optimizer's step is the optimizer; in autograd's backward pass it is
backward, or recomputation where modules run; after a backward pass, outside modules and without gradients
(clipping) it is the optimizer's too; all else is forward.

Tensors are known by the memory that they lie in (`MemoryRecorder`): scripts hold tensors that were there before
the step, give tensors other memory (`parameter.data = ...`), and give memory back and take it again under the same
tensors, as FSDP does with what it gathers.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.nn.modules import module as modules
from torch.optim import Optimizer, optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from echograph.errors import CaptureError
from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.annotate import BACKWARD, FORWARD, MODULE, OPTIMIZER, PHASE, RECOMPUTE
from echograph.frontend.pytorch.call_nodes import is_allocation, is_in_place
from echograph.frontend.pytorch.known_values import apart, exchanged, lifted
from echograph.frontend.pytorch.linking import link_recomputed, link_sums
from echograph.frontend.pytorch.recorder import HANDLES, ModelInput, OperatorRecorder
from echograph.frontend.pytorch.shapes import Results, Shapes
from echograph.frontend.scripts import places
from echograph.frontend.scripts.collectives import NAMESPACES, WAIT, communication_of
from echograph.frontend.scripts.found import found
from echograph.frontend.scripts.held import memory_roots, write_releases
from echograph.frontend.scripts.memory import LivingTensors
from echograph.frontend.scripts.micro_batches import BACKWARD_PASS, micro_batches
from echograph.frontend.scripts.samples import samples_read
from echograph.frontend.scripts.streams import AFTER, COMPUTE, STREAM, CapturedStream, forget_issued
from echograph.frontend.scripts.values import answer, line_of_script
from echograph.frontend.scripts.world import NO_GPU
from echograph.ir.graph import BETWEEN_STEPS
from echograph.ir.passes.fuse import KernelRegion
from echograph.ir.types import CollectiveKind

SHARES = "shares"
"""Of placeholders: global ranks of each group over whose ranks the elements are divided."""

_ATEN = torch.ops.aten


class MemoryRecorder(OperatorRecorder):  # type: ignore[no-untyped-call]
    """Finds the node that stands for a tensor by its memory, where no operator of the step made the tensor.

    Attributes:
        memory: what lives through steps.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(mode)
        self.memory = LivingTensors()
        self._recording = False
        self._paused = 0

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """What runs is no work of the step."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def resizing(self, original: Any) -> Any:
        """Wraps what gives memory back (a size of 0) and takes it."""

        def resize(storage: Any, size: int) -> Any:
            # FSDP gives memory back and takes it again under the same tensors: what stood for it stands no more.
            if self._recording and size and not storage.nbytes():
                self.memory.renew(storage, next(iter(reversed(self.graph.nodes)), None))
            return original(storage, size)

        return resize

    def of_micro_batch(self) -> dict[str, Any]:
        """Annotations that say whose micro-batch runs."""
        return {}

    def stands_for(self, node: Node, tensor: Tensor) -> None:
        """A tensor is the value of a node, and its memory is known by it."""
        super().stands_for(node, tensor)
        self.memory.made(tensor, node)

    def node_of(self, tensor: Tensor) -> Node:
        """The node that stands for a tensor, unless it was given other memory since, or its own anew."""
        node = super().node_of(tensor)
        if self.memory.stands(node, tensor):
            return node
        self.forget(tensor)
        return self.unknown(tensor)

    def unknown(self, tensor: Tensor) -> Node:
        """A node for a tensor that was there before the step, or a part of the memory of one that is known."""
        base = self.memory.node_at(tensor)
        if base is None and self.memory.is_renewed(tensor):
            base = self._taken(tensor)
        if base is None:
            role, name, shares = self.memory.describe(tensor)
            whole = self.memory.whole(tensor)
            if whole is not None:
                with self.pausing(), self._mode:
                    flat = whole()
                base = super().add_placeholder(flat, role, name)
                base.meta[SHARES] = shares
                self.memory.made(flat, base, of=tensor)
            else:
                node = super().add_placeholder(tensor, role, name)
                node.meta[SHARES] = shares
                self.memory.made(tensor, node)
                return node
        return self._view(tensor, base)

    def _taken(self, tensor: Tensor) -> Node:
        """Memory that was taken anew: an allocation, with nothing in it yet."""
        whole = self.memory.whole(tensor)
        with self.pausing(), self._mode:
            flat = tensor.new_empty(tensor.shape) if whole is None else whole()
        meta = {PHASE: FORWARD, MODULE: "", STREAM: CapturedStream.current.name, AFTER: frozenset()}
        meta |= self.of_micro_batch()
        node = self.add_call(_ATEN.empty.memory_format, (list(flat.shape),), {}, self._snapshot(flat), meta)
        self.memory.made(tensor, node)
        return node

    def _view(self, tensor: Tensor, base: Node) -> Node:
        value, here = base.meta[annotate.VAL], self._snapshot(tensor)
        if _same_layout(value, here):
            super().bind(tensor, base)
            return base
        meta = {key: base.meta[key] for key in (PHASE, MODULE) if key in base.meta} or {PHASE: FORWARD, MODULE: ""}
        meta |= {STREAM: CapturedStream.current.name, AFTER: frozenset()} | self.of_micro_batch()
        if value.dtype != here.dtype:
            base = self.add_call(_ATEN.view.dtype, (base, here.dtype), {}, here, dict(meta))
        layout = (tuple(here.shape), tuple(here.stride()), here.storage_offset())
        node = self.add_call(_ATEN.as_strided.default, (base, *layout), {}, here, dict(meta))
        super().bind(tensor, node)
        self.memory.made(tensor, node)
        return node


def _block_at_barriers(node: Node) -> None:
    """ProcessGroupNCCL blocks the host at a barrier, and at no other communication."""
    if node.meta[COMMUNICATION].kind is CollectiveKind.BARRIER:
        CapturedStream.host_waits(frozenset((node,)))


def _same_layout(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride(), one.storage_offset()) == (
        other.dtype, other.shape, other.stride(), other.storage_offset(),
    )  # fmt: skip


COMMUNICATION = "communication"
MICRO_BATCH = "micro_batch"
CHUNK = "chunk"
PAYLOAD = "payload"
COPY = "copy"
REGION = "region"
GRAPH = "graph"
_CONTEXT = (MICRO_BATCH, CHUNK, PAYLOAD, MODULE, REGION)
SILENT_NAMESPACES = ("prim", "profiler")
_EQUAL = torch.ops.aten.equal.default
_ITEM = _ATEN._local_scalar_dense.default
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten._to_copy.default, torch.ops.aten.alias.default)
"""By which a constructor below PyTorch's functions makes a tensor of what it is given: `torch.Tensor(array)`."""
_COPY = _ATEN.copy_.default
_DEVICE = torch.ops.prim.device.default
_CPU, _META = torch.device("cpu"), torch.device("meta")
_is_wrapper = cache(is_traceable_wrapper_subclass_type)


_HANDLES = 2  # cuBLAS has one in the thread of the script and one in autograd's


def workspace_bytes(chosen: str) -> int:
    """What CUBLAS_WORKSPACE_CONFIG asks for a handle: ":4096:2:16:8" is two buffers of 4,096 KiB and eight of 16.

    Raises:
        CaptureError: it is not written so, as cuBLAS's documentation has it.
    """
    numbers = re.fullmatch(r"(?::\d+:\d+)+", chosen) and [int(n) for n in chosen[1:].split(":")]
    if not numbers:
        raise CaptureError(f"CUBLAS_WORKSPACE_CONFIG={chosen}: write :SIZE:COUNT, sizes in KiB, as :4096:8")
    return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True)) * 1024


class HostCounter(Protocol):
    """Counts the host's work (`frontend.scripts.host_work`): told when the capture is entered and left."""

    def enter(self) -> None:
        """The capture is entered."""

    def leave(self) -> None:
        """The capture is left, or calls the script's own code."""

    @property
    def reads(self) -> Callable[[Tensor], None]:
        """Is told which tensor of the device the script reads a value of."""

    @property
    def entered_once(self) -> bool:
        """Whether the script itself called."""


class StepRecorded(BaseException):
    """The step that was asked for is recorded: the script need not go on."""


# Scripts replace these while a model is made (nanotron, to have it on the GPU), and PyTorch's own rules call them.
_FACTORIES = {name: getattr(torch, name) for name in ("empty", "zeros", "ones", "full", "arange", "tensor")}


@contextmanager
def _own_factories() -> Iterator[None]:
    """In the context, PyTorch's functions that make tensors are its own, whatever a script put in their place."""
    theirs = {name: getattr(torch, name) for name in _FACTORIES}
    vars(torch).update(_FACTORIES)
    try:
        yield
    finally:
        vars(torch).update(theirs)


class ScriptRecorder(MemoryRecorder):  # type: ignore[no-untyped-call]
    """Records a step of a script.

    Args:
        mode: of the fake tensors.
        step: which training step, counted from 1.
        moves: whether the next one is recorded where that step evaluates or samples first, as none before it, or
            where one of several optimizers makes its state.
        whole: let the script go on after it.
        counts_optimizer_steps: whether steps end where optimizers' do, or where `step_ends` is called.
        results: of operators, as other runs learnt them (`frontend.pytorch.shapes`); those to come are added.

    Attributes:
        memory: what lives through steps.
        notes: for the user, each once.
        warnings: of what is unlikely to be meant, each once (`checks`).
        loaded: sizes of the first dimension of what loaders gave last, and the line of the script that asked.
        sampled: the same, as it was when the first input of the recorded step came.
        stepped_at: the line of the script in which the optimizer stepped.
        ungraded: names of parameters that the optimizer has and no backward pass reached.
        steps: training steps that have ended.
        recorded: whether the step is recorded.
        held: bytes that no tensor of the step stands for, by what holds them (`ir.graph.Program`).
        sample: shape and type of the first tensor that the model was given in the step, to learn from if it does.
        samples: how many of it (its first dimension) the step reads; 0 where it was given none.
        stack: software that runs, a word of `models.stacks`; "" where nobody said it.
        attention: kernel that runs fused attention, as costs name it; "" where the stack chooses it.
        deterministic: whether attention's gradients are added up in one order.
        fills: whether PyTorch writes all memory that it is asked for before use, as it does with deterministic
            algorithms.
        counter: of the host's own work, where that is asked for.
        gpus: whether there are GPUs to make tensors on.
        untouched: a tensor that has memory, and is not written where the script writes it: nobody asks for values.
        kept: memory, as `UntypedStorage._cdata` has it, whose values are kept: PyTorch itself asks for them.
    """

    counter: HostCounter | None = None
    gpus = True
    untouched: Tensor | None = None

    def __init__(
        self,
        mode: FakeTensorMode,
        *,
        step: int = 2,
        moves: bool = False,
        whole: bool = False,
        counts_optimizer_steps: bool = True,
        results: Results | None = None,
    ) -> None:
        super().__init__(mode)
        self._shapes = Shapes(mode, results)
        self.notes: dict[str, None] = {}
        self.warnings: dict[str, None] = {}
        self.loaded: tuple[frozenset[int], str] | None = None
        self.sampled: tuple[frozenset[int], str] | None = None
        self.stepped_at, self.ungraded = "", list[str]()
        self.steps = 0
        self.recorded = False
        self.held: dict[str, int] = {}
        self.sample: ModelInput | None = None
        self.samples = 0
        self.stack, self.attention, self.deterministic, self.fills = "", "", False, False
        self._regions = 0
        self._backward_of: dict[KernelRegion, KernelRegion] = {}
        self._forward_of: dict[KernelRegion | None, KernelRegion] = {}
        self._seen: set[KernelRegion | None] = set()
        self._step, self._whole, self._counts = step, whole, counts_optimizer_steps
        self._forced: str | None = None
        self._context: dict[str, Any] = {}
        self._pace: Optimizer | None = None
        self._optimizing = self._framework_steps = 0
        self._trains = self._learns = False
        self._after_backward = False
        self._pass = self._backward_pass = 0
        self._waiting_passes = self._told_micro_batches = False
        self._aside: set[int] = set()
        self._works: dict[int, tuple[Any, Node]] = {}
        self._graph_of: Callable[[str], str] | None = None
        self._layouts: dict[tuple[Any, ...], Tensor] = {}
        self.kept: set[int] = set()
        self._without_gradients: list[str] = []
        self._living: list[tuple[Node, list[Node]]] = []
        self._moves, self._learnt = moves, False
        self._moves_by_states, self._stateless = moves, False

    # -- what adapters say -----------------------------------------------------------------------------------

    def handed_over(self, tensors: int) -> None:
        """Worker processes of a loader have handed over a batch of so many tensors."""

    def hashed(self, nbytes: int) -> None:
        """The host has hashed so many bytes (SHA-1)."""

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """What runs is of a phase: "forward", "backward", "recompute", "optimizer"."""
        before, self._forced = self._forced, phase
        try:
            yield
        finally:
            self._forced = before

    @contextmanager
    def _with(self, key: str, value: Any) -> Iterator[None]:
        before, self._context = self._context, self._context | {key: value}
        try:
            yield
        finally:
            self._context = before

    def in_micro_batch(self, number: int | None) -> Any:
        """What runs is of a micro-batch, counted from 0 in each step; None: of the step."""
        self._told_micro_batches = True
        return self._with(MICRO_BATCH, number)

    def in_chunk(self, number: int) -> Any:
        """What runs is of a chunk of this rank's layers, counted from 0."""
        return self._with(CHUNK, number)

    def in_module(self, path: str) -> Any:
        """What runs is done for a module, whichever is running."""
        return self._with(MODULE, path)

    @contextmanager
    def in_region(self, maker: str) -> Iterator[KernelRegion | None]:
        """What runs is one kernel that is written by hand (`FUSED`), or compiled; an inner region is of the outer.

        Its backward pass is one, too, unless autograd does not see it: functions with a backward pass of their own
        (`torch.autograd.Function`) say what that runs. Gives the region; None: it is part of another.
        """
        if REGION in self._context:
            yield None
            return
        region = self._region(maker)
        if torch.is_grad_enabled():
            self._seen.add(region)
        with self._with(REGION, region):
            yield region

    def _region(self, maker: str, of: int = 0) -> KernelRegion:
        self._regions += 1
        return KernelRegion(maker, self._regions, of)

    def _backward_region(self, of: KernelRegion) -> KernelRegion:
        if of not in self._backward_of:
            self._backward_of[of] = made = self._region(of.maker, of.number)
            self._forward_of[made] = of
        return self._backward_of[of]

    def carrying(self, payload: str) -> Any:
        """What communications carry: "parameter", "gradient", "activation", "optimizer_state" or "other"."""
        return self._with(PAYLOAD, payload)

    def graphs(self, graph_of: Callable[[str], str]) -> None:
        """Of which CUDA graph the operations of a module are, by its path; "" of none.

        An optimizer's are of none.
        """
        self._graph_of = graph_of

    def step_begins(self) -> None:
        """A training step begins here; without a call, with the first module that runs, or the last step's end."""
        if not (self._recording or self.recorded) and self.steps == self._step - 1:
            self._recording = True
            self.memory.take_stock()

    def _take_held(self) -> None:
        """What is there that no tensor of the step stands for."""
        if kept := self.memory.kept_bytes():
            self.held[BETWEEN_STEPS] = kept
        if chosen := os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
            self.held["cublas"] = _HANDLES * workspace_bytes(chosen)

    @property
    def is_early(self) -> bool:
        """Whether what runs is of a step before the one that is recorded."""
        return self.steps < self._step - 1

    @property
    def place(self) -> tuple[int, int | None]:
        """Where in training the script is: how many steps have ended, and the micro-batch, if that is said."""
        return self.steps, self._context.get(MICRO_BATCH)

    @property
    def is_recording(self) -> bool:
        """Whether what runs is of the step that is recorded."""
        return self._recording and not self._paused

    def step_ends(self) -> None:
        """A training step has ended.

        Raises:
            StepRecorded: it was the one.
        """
        self.steps += 1
        self._after_backward, self._pass, self._backward_pass, self._learnt = False, 0, 0, False
        self._aside.clear()
        if self._recording:
            self._finish()
            if not self._whole:
                raise StepRecorded
        elif self.steps == self._step - 1:
            self.step_begins()

    def name(self, tensor: Tensor, role: str, name: str) -> None:
        """Says what a tensor is that lives through steps; the role is one of `annotate.ROLES`."""
        self.memory.name(tensor, role, name)

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor for one that has data."""
        with self.pausing(), self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def note(self, line: str) -> None:
        """A line for the user."""
        self.notes[line] = None

    def warn(self, line: str) -> None:
        """A line for the user on what is unlikely to be meant; "" says nothing."""
        if line:
            self.warnings[line] = None

    # -- hooks -----------------------------------------------------------------------------------------------

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """In the context, modules, optimizers, autograd and works of PyTorch tell when they run."""
        handles = [
            modules.register_module_forward_pre_hook(self._module_begins),
            modules.register_module_forward_hook(self._module_ends, always_call=True),
            optimizer.register_optimizer_step_pre_hook(self._optimizer_begins),
            optimizer.register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        try:
            with ExitStack() as stack:
                for wait in self._patches():
                    stack.enter_context(wait)
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _patches(self) -> Iterator[Any]:
        from echograph.frontend.scripts.adapter import patched

        works = (torch.distributed.Work, *torch.distributed.Work.__subclasses__())
        for owner in works:
            if "wait" in vars(owner):
                yield patched(owner, "wait", self._waiting)
        yield patched(torch.autograd.graph, "_engine_run_backward", self._backward)
        yield patched(torch.autograd, "_engine_run_backward", self._backward)
        yield patched(torch.UntypedStorage, "resize_", self.resizing)
        yield patched(Optimizer, "__init__", self._making_optimizer)

    def _making_optimizer(self, original: Any) -> Any:
        def init(made: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            self.memory.made_optimizers.append(made)

        return init

    def _waiting(self, original: Any) -> Any:
        def wait(work: Any, /, *args: Any, **kwargs: Any) -> Any:
            _, node = self._works.get(id(work), (None, None))
            if node is not None:
                CapturedStream.current.after(frozenset((node,)))
                _block_at_barriers(node)
            return original(work, *args, **kwargs)

        return wait

    def _backward(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, BACKWARD
            stack, self._stack = self._stack, []
            # Whether what it computes is differentiated in turn: of the outputs, their gradients and two flags.
            created, self.creates_graph = self.creates_graph, bool(args[3])
            learns = self._learns_by(args[4] if len(args) > 4 else (), kwargs)
            if before != BACKWARD:
                self._backward_pass += 1
                self._waiting_passes |= self._recording and self._after_backward and learns
                self._aside |= set() if learns else {self._backward_pass}
            try:
                return original(*args, **kwargs)
            finally:
                self.phase, self._stack, self.creates_graph = before, stack, created
                self._after_backward |= learns
                if self._recording and before != BACKWARD:
                    with self.pausing():
                        self._mark_gradients()
                    self._take_living()

        return backward

    def _learns_by(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a backward pass is one of a micro-batch: not where it is asked for gradients of other tensors.

        Such are forces, penalties, attacks, steps of an inner loop: parts of the forward pass.
        """
        if not inputs or kwargs.get("accumulate_grad"):
            return True
        groups = (group for made in self.memory.made_optimizers for group in made.param_groups)
        learnt = {id(parameter) for group in groups for parameter in group["params"]}
        leaves = [one for one in inputs if getattr(one, "is_leaf", True)]
        return any(isinstance(one, torch.nn.Parameter) or id(one) in learnt for one in leaves)

    def _evaluates(self) -> None:
        """A module with parameters runs without gradients, or set to evaluate: in each step, or now and then.

        Where it runs so before a step has learnt anything, and did not in any step before, it is an evaluation, or
        draws samples; a teacher runs so in the first step, too, and what acts before it learns.
        """
        if not self._moves or self._learnt:
            return
        if self._recording:
            self._put_off(
                "runs modules without gradients, or set to evaluate, as none before (samples, an evaluation)"
            )
        self._moves = False

    def _put_off(self, why: str) -> None:
        """The next step is recorded, and nothing of this one is."""
        self.note(
            f"{line_of_script()}: step {self._step} {why}: step {self._step + 1} is recorded; --step {self._step} "
            "records this one"
        )
        self._recording, self._step = False, self._step + 1
        self.graph, self._first_call = Graph(), None
        self.memory.forget_step()
        forget_issued()
        self._living.clear()
        of_regions = self._backward_of, self._forward_of, self._seen
        for known in (self._handles, self._works, self._by_sequence, *of_regions):
            known.clear()

    def _module_begins(self, module: Any, args: Any) -> None:
        if not self._stack:
            self.memory.add_root(module)
            self._trains = any(True for _ in module.parameters()) and not self._paused
            if self.phase == FORWARD and self._trains:
                if torch.is_grad_enabled() and module.training:
                    self._learnt = True
                else:
                    self._evaluates()
                self._pass += self._after_backward
                self._after_backward = False
                self.step_begins()
        # A module without parameters outside of all others prepares data.
        if self._recording and self._trains and not self._learns:
            self._take_sample(args)
        if self._recording and self._trains and not self._stack and not torch.is_grad_enabled():
            self._without_gradients.append(line_of_script())
        self._stack.append(self.memory.path_of(module))

    def _take_sample(self, args: Any) -> None:
        """Takes what a module is given for the sample of the step: the first with gradients, if any has them.

        What runs before without them acts, evaluates, or makes targets.
        """
        learns = torch.is_grad_enabled()
        given = next((a for a in args if isinstance(a, Tensor)), None)
        if given is not None and (learns or self.sample is None):
            self.sample, self.sampled, self._learns = ModelInput.of(given), self.loaded, learns

    def _module_ends(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _optimizer_begins(self, stepping: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer steps; what it calls to have the loss worked out (its closure) is no part of that."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self.memory.add_optimizer(stepping)
        if closure is None and self._recording and not self._optimizing:
            self._check_gradients(stepping)
        if not self._optimizing:
            self._stateless = not stepping.state
        self._optimizing += 1
        if not callable(closure):
            return None

        def evaluated() -> Any:
            optimizing, self._optimizing = self._optimizing, 0
            try:
                loss = closure()
            finally:
                self._optimizing = optimizing
            if self._recording and optimizing == 1:
                self._check_gradients(stepping)
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _optimizer_ends(self, stepping: Optimizer, *_: Any) -> None:
        self._optimizing -= 1
        if self._optimizing or self._framework_steps:
            return  # one that another one is made of
        if self._pace is None:
            self._pace = stepping
        if self._counts and stepping is self._pace:
            self.step_ends()
        elif self._counts and self._moves_by_states and self._recording and self._stateless and stepping.state:
            # As of a GAN, whose generator's first step comes behind the discriminator's.
            self._moves_by_states = False
            self._put_off("is the first of an optimizer, which makes its state")

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """An optimizer of a framework steps, which says itself where that ends; it may be made of PyTorch's."""
        self._framework_steps += 1
        try:
            yield
        finally:
            self._framework_steps -= 1

    @contextmanager
    def making_states(self) -> Iterator[None]:
        """Optimizers step for their states alone, as where a checkpoint is loaded: no training step ends."""
        self._optimizing += 1
        try:
            yield
        finally:
            self._optimizing -= 1

    def _check_gradients(self, stepping: Optimizer) -> None:
        self.stepped_at = self.stepped_at or line_of_script()
        held = [p for group in stepping.param_groups for p in group["params"] if p.requires_grad]
        without = {id(p) for p in held if p.grad is None}
        # An optimizer all of whose parameters have none is one that works on copies, or in the backward pass.
        if len(without) < len(held):
            self.ungraded += [name for p, name in self.memory.parameters() if id(p) in without and p.numel()]

    def _take_living(self) -> None:
        """What the step made and somebody still holds, a backward pass over."""
        last = next(iter(reversed(self.graph.nodes)), None)
        if last is not None and last.op == "call_function":
            self._living.append((last, self.memory.living()))

    def _write_releases(self) -> None:
        """Of what micro-batches made and hold, their backward pass over; communications hold what is theirs."""
        given = {read for n in self.graph.nodes if COMMUNICATION in n.meta for read in (n, *n.all_input_nodes)}
        roots = memory_roots(self.graph, COMMUNICATION)
        apart = {roots[node] for node in given}
        held = []
        for last, living in self._living:
            number = last.meta.get(MICRO_BATCH)
            held.append((last, [n for n in living if self._is_held(n, number) and roots[n] not in apart]))
        write_releases(self.graph, held, roots, (PHASE, MODULE, MICRO_BATCH, CHUNK))

    @staticmethod
    def _is_held(node: Node, micro_batch: int | None) -> bool:
        made = node.op == "call_function" and annotate.GRADIENT_OF not in node.meta
        return made and node.meta.get(STREAM) == COMPUTE and node.meta.get(MICRO_BATCH) == micro_batch is not None

    def _mark_gradients(self) -> None:
        for parameter, name in self.memory.parameters():
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            if isinstance(gradient, FakeTensor):
                node = self.node_of(gradient)
                while node.op == "call_function" and is_in_place(node) and isinstance(node.args[0], Node):
                    node = node.args[0]
                if node.op == "call_function":
                    node.meta.setdefault(annotate.GRADIENT_OF, name)

    def _finish(self) -> None:
        self._recording, self.recorded = False, True
        link_recomputed(self.graph)
        if self._waiting_passes and not self._told_micro_batches:
            # Sums of gradients of several passes are of the last one's, and are not linked yet.
            for node, number in micro_batches(self.graph, self._aside).items():
                node.meta[MICRO_BATCH] = number
        link_sums(self.graph)
        self._write_releases()
        self._take_held()
        self._count_samples()
        if passes := self._without_gradients:
            self.note(
                f"{passes[0]}: the step runs modules {len(passes):,} times without gradients (samples, an "
                "evaluation, targets): where not every step does, record one that does not (--step)"
            )
        self.graph.output(None)
        self._works.clear()
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.fills = self.deterministic and bool(
            torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        )

    def _count_samples(self) -> None:
        if self.sample is not None and self.sample.shape:
            node, given = self.known(self.sample), self.sample.shape[0]
            self.samples = given if node is None else samples_read(node)
            if self.samples < given:
                where = self.sampled[1] if self.sampled else ""
                self.note(
                    f"{where or 'the script'} gives the model {given} samples, of which the step of a rank reads "
                    f"{self.samples}: these are counted"
                )

    # -- operators -------------------------------------------------------------------------------------------

    def _snapshot(self, tensor: Tensor) -> Tensor:
        """One handle for all tensors of a layout, since nothing else is asked of recorded values."""
        with places.below:
            layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.device)
            found = self._layouts.get(layout)
            if found is None:
                found = self._layouts[layout] = super()._snapshot(tensor)
                with torch._C._DisableTorchDispatch():
                    # Of memory of its own: a layout is known longer than its first tensor lives.
                    memory: Any = torch.UntypedStorage
                    apart = memory(found.untyped_storage().nbytes(), device="meta")
                    found.set_(apart, found.storage_offset(), found.shape, found.stride())
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            # Asked more often than all else, and no operator; who asks here is the dispatcher, or autograd.
            return _META if args[0].fake_mode.in_kernel_invocation else args[0]._fake_device
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # DTensor and its like call the operators of their local tensors
        # In a backward pass, the modes that answer a script's own calls would see each look at a tensor here.
        with torch._C.DisableTorchFunction(), places.below:
            if torch.empty is _FACTORIES["empty"]:
                return self._called(func, args, kwargs or {})
            with _own_factories():
                return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _ITEM and isinstance(args[0], FakeTensor):
            return answer(args[0], self.note)
        if func is _EQUAL and isinstance(args[0], FakeTensor):
            return args[0] is args[1]  # TorchScript asks whether constants may be one
        if args and self._keeps(args[0]):
            with apart():
                out = func(*args, **kwargs)
            if func is not _COPY:
                return out  # the host's own work, which is none of the GPU's
        else:
            out = self._placed(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            exchanged(func, args, out)
        if self._recording and not self._paused and func.namespace not in SILENT_NAMESPACES:
            self._write_down(func, args, kwargs, out)
        return out

    def _write_down(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if func in HANDLES or func is places.TO_HOST:
            if isinstance(out, FakeTensor):
                self.stands_for(self.node_of(args[0] if isinstance(args[0], FakeTensor) else out), out)
        elif func.namespace in NAMESPACES:
            self._communicate(func, args, kwargs, out)
        else:
            self._record(func, args, kwargs, out)

    def _keeps(self, given: Any) -> bool:
        return bool(self.kept) and type(given) is Tensor and given.untyped_storage()._cdata in self.kept

    def _placed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator makes, on the device that it makes it on."""
        device = kwargs.get("device")
        elsewhere = device is not None and device.type == "cuda"
        if elsewhere and not self.gpus:
            raise CaptureError(f"this {NO_GPU}")
        if self.untouched is not None and args and args[0] is self.untouched:
            return self.untouched
        out = found(func, args, kwargs)
        if out is None:
            out = self._shapes.call(func, args, kwargs | {"device": _CPU} if elsewhere else kwargs)
        if func in _LIFTS:
            lifted(args[0], out)
        if elsewhere:
            places.mark(out)
        else:
            places.follow(args, out)
        return out

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if func._schema.name.endswith(WAIT):
            node = self.node_of(args[0])
            CapturedStream.current.after(frozenset((node.args[0] if node.target is operator.getitem else node,)))
            self.stands_for(node, out)
            return
        call = communication_of(func, args, kwargs, out)
        if call is None:
            return
        read = [self.node_of(t) for t in call.inputs]
        functional = func.namespace == "_c10d_functional" and call.outputs is not call.inputs
        written = [] if functional else [self.node_of(t) for t in call.outputs]
        values = tuple(self._snapshot(t) for t in call.outputs) if functional else None
        node = self.add_call(func, (read, written), {}, values, {})
        before = CapturedStream.current.reached
        node.meta |= self._annotations(node) | {COMMUNICATION: call, STREAM: "", AFTER: before}
        if any(map(self._keeps, call.outputs)):
            node.meta[PAYLOAD] = "other"
        if values is not None:
            for i, tensor in enumerate(call.outputs):
                self.stands_for(self.add_call(operator.getitem, (node, i), {}, values[i], node.meta), tensor)
        elif not call.asynchronous:
            CapturedStream.current.after(frozenset((node,)))
            _block_at_barriers(node)
        else:
            self._hold(out, node)

    def _hold(self, out: Any, node: Node) -> None:
        """Keeps the Work, so that PyTorch gives the caller this very object and its wait is known."""
        made = out[-1] if isinstance(out, tuple | list) else out
        work = torch.distributed.Work.unbox(made)
        self._works[id(work)] = work, node

    def _annotations(self, node: Node) -> dict[str, Any]:
        made = self._phase_and_module(node)
        if made[PHASE] != OPTIMIZER:
            made[MICRO_BATCH] = self._pass
            if self.phase == BACKWARD:
                made[BACKWARD_PASS] = self._backward_pass
        made |= {key: value for key, value in self._context.items() if key in _CONTEXT}
        # A checkpoint within a region runs again when its backward pass does, and is compiled with that.
        of_backward = REGION not in made and made[PHASE] in (BACKWARD, RECOMPUTE)
        if of_backward and (of := self._differentiated(node)) is not None:
            made[REGION] = self._backward_region(of)
        if self._graph_of is not None and made[PHASE] != OPTIMIZER:
            made[GRAPH] = self._graph_of(made[MODULE])
        # Reserving memory is no work: what its stream waits for, the next work waits for.
        if node.target.namespace not in NAMESPACES and not is_allocation(node):  # type: ignore[union-attr]
            made |= {STREAM: CapturedStream.current.name, AFTER: CapturedStream.current.issue(node)}
        return made

    def _differentiated(self, node: Node) -> KernelRegion | None:
        """The region that an operation of the backward pass is the gradient of."""
        current = torch._C._current_autograd_node()
        if current is not None:
            forward = self._by_sequence.get(current._sequence_nr())
            region = None if forward is None else forward.meta.get(REGION)
            return region if region in self._seen else None
        # Autograd adds up itself: within a region where that made all that it adds.
        makers = {read.meta.get(REGION) for read in node.all_input_nodes}
        return self._forward_of.get(makers.pop()) if len(makers) == 1 else None

    def of_micro_batch(self) -> dict[str, Any]:
        """The micro-batch of what runs, as annotations have it."""
        if self._optimizing or self._forced == OPTIMIZER:
            return {}
        return {MICRO_BATCH: self._context.get(MICRO_BATCH, self._pass)}

    def _phase_and_module(self, node: Node) -> dict[str, Any]:
        module = self._stack[-1] if self._stack else ""
        if self._optimizing or self._forced == OPTIMIZER:
            return {PHASE: OPTIMIZER, MODULE: module}
        if self.phase == BACKWARD:
            made = self._backward_annotations(node)
            # Who says that a backward pass runs does not say that nothing is recomputed in it.
            return made if self._forced in (None, BACKWARD) else made | {PHASE: self._forced}
        if self._forced == BACKWARD:
            return {PHASE: BACKWARD, MODULE: module}
        if self._forced is None and self._after_backward and not self._stack and not torch.is_grad_enabled():
            return {PHASE: OPTIMIZER, MODULE: ""}
        self._number(node)
        return {PHASE: self._forced or FORWARD, MODULE: module}


class PassingRecorder(ScriptRecorder):  # type: ignore[no-untyped-call]
    """Goes through the step that another run recorded, and writes nothing down: of what a rank tells others."""

    def _write_down(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        pass

    def _mark_gradients(self) -> None:
        pass

    def _finish(self) -> None:
        self._recording, self.recorded = False, True


class BriefRecorder(PassingRecorder):  # type: ignore[no-untyped-call]
    """Likewise, and all steps are as short as those that only come before another one."""

    is_early = True
