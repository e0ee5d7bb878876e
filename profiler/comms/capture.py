"""Where PyTorch calls the tracer: kernels in its dispatcher, for all tracers of the process at once.

Every collective of torch.distributed, called from Python or from C++, is an operator `c10d::...` whose kernel for
a device hands it to the backend. While a trace runs, kernels of ours stand before those: they note the call, and
pass it down with the same arguments. What comes back, the Work among it, is passed up as it is. Three things are
not operators, and are methods that are wrapped as well: `Work.wait`, the two ends of a coalesced block, and the
making of groups. Removing the last tracer puts everything back.

When a call starts and ends: on the host, it can start as soon as it is issued, and its Work's future says when it
has ended: at completion, not when somebody waits. gloo's send and receive have no future; their end is where
waiting for them returns. On CUDA, events tell: one on the caller's stream when the call is issued, one in the
future's callback, which PyTorch runs on a stream that follows the collective.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from echograph.ir.comms.bandwidth import message_bytes
from echograph.ir.comms.operations import OPERATIONS, Operation, OperatorArguments
from echograph.ir.comms.record import UNKNOWN
from echograph.profiler.comms.call import CallKind, CallSite, CallSites, Listener, Phases, TracedCall
from echograph.profiler.comms.groups import TracedGroup, TracedGroups

REANCHOR_MS = 1000.0


class HostClock:
    """Calls whose completion the host sees."""

    device = "cpu"

    def __init__(self, finished: Callable[[TracedCall], None]) -> None:
        self._finished = finished

    def issue(self, call: TracedCall) -> None:
        """Before the call."""
        call.start = call.queued

    def watch(self, call: TracedCall, work: Any) -> bool:
        """After the call; false where only waiting tells its end."""
        try:
            future = work.get_future()
        except RuntimeError:
            return False
        if future.done():
            # What would call back at once costs as much as all else here.
            call.end = time.perf_counter_ns()
            self._finished(call)
            return True
        # A future that nobody holds would never call back.
        call.work = work
        future.add_done_callback(partial(self._ended, call))
        return True

    def _ended(self, call: TracedCall, _: Any) -> None:
        call.end = time.perf_counter_ns()
        self._finished(call)

    def waits(self, call: TracedCall, *, at_once: bool = False) -> None:
        """The caller starts to wait, now or as soon as the call was issued."""
        call.wait = call.queued if at_once else time.perf_counter_ns()


class EventClock:
    """Calls on a device, timed by events that are read when they have passed.

    Events are asked only from the threads that call collectives: asking from another one could break the capture
    of a CUDA graph.

    Args:
        finished: told of each call whose times are known.
        module: of the device (torch.cuda).
    """

    device = "cuda"

    def __init__(self, finished: Callable[[TracedCall], None], module: Any) -> None:
        self._finished = finished
        self._module = module
        self._running: deque[TracedCall] = deque()
        self._anchors: dict[Any, tuple[Any, int]] = {}
        self._free: dict[str, int] = {}

    def issue(self, call: TracedCall) -> None:
        """Before the call."""
        self.read()
        if not self._module.is_current_stream_capturing():
            call.timer = [self._record(), None, None]

    def watch(self, call: TracedCall, work: Any) -> bool:
        """After the call; one that goes into a CUDA graph has no times."""
        timer = call.timer
        if timer is None:
            self._finished(call)
            return True

        def behind(_: Any) -> None:
            timer[1] = self._record()
            self._running.append(call)

        work.get_future().add_done_callback(behind)
        return True

    def waits(self, call: TracedCall, *, at_once: bool = False) -> None:
        """The caller's stream starts to wait, now or as soon as the call was issued."""
        if call.end != UNKNOWN:
            # The host comes to wait after it saw the end.
            call.wait = call.end
        elif call.timer is not None and not self._module.is_current_stream_capturing():
            call.timer[2] = call.timer[0] if at_once else self._record()

    def read(self) -> None:
        """Finishes the calls whose events have passed, in the order in which they were issued."""
        while self._running and self._running[0].timer[1].query():
            call = self._running.popleft()
            issued, ended, waited = call.timer
            call.start = max(self._time(issued), self._free.get(call.kind.channel, 0))
            call.end = self._free[call.kind.channel] = max(call.start, self._time(ended))
            if waited is not None and waited.query():
                call.wait = self._time(waited)
            call.timer = None
            self._finished(call)

    def _record(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def _time(self, event: Any) -> int:
        """An event in nanoseconds of `perf_counter`.

        Events tell time only against each other, in float32 milliseconds: against an old one the digits run out,
        so the event that is compared with moves along.
        """
        device = event.device
        if device not in self._anchors:
            event.synchronize()
            base = self._record()
            base.synchronize()
            self._anchors[device] = (base, time.perf_counter_ns())
        base, at = self._anchors[device]
        after_ms = base.elapsed_time(event)
        moment: int = at + round(after_ms * 1e6)
        if after_ms > REANCHOR_MS:
            self._anchors[device] = (event, moment)
        return moment


SHOWN_SHAPES = 8
MAX_KINDS = 1 << 16
CallPlace: TypeAlias = tuple[CallSite, str, str]
_ASYNCHRONOUS_APIS = {"isend", "irecv", "batch_isend_irecv"}


class CallKinds:
    """Finds the kind of a call; a training step makes the same calls again and again, so that most are known."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], CallKind] = {}

    def of(
        self,
        operation: Operation,
        arguments: OperatorArguments,
        group: TracedGroup,
        coalesced: bool,
        device: str,
        sparse: bool,
        place: CallPlace,
    ) -> CallKind:
        """What a call has in common with others like it.

        Args:
            operation: the operator.
            arguments: of the operator.
            group: its group.
            coalesced: whether it stands in a coalesced block.
            device: type of the device.
            sparse: whether tensors are, whose shapes do not tell their bytes.
            place: call site, phase and module.
        """
        root = operation.root >= 0 and arguments[operation.root] == group.rank
        inputs = operation.inputs(arguments, root)
        outputs = inputs if operation.in_place else operation.outputs(arguments, root)
        first = inputs[0] if inputs else outputs[0] if outputs else None
        # The default of the operators, and so what is not passed on, is asynchronous.
        position = operation.asynchronous
        asynchronous = position >= 0 and (bool(arguments[position]) if len(arguments) > position else True)
        peer = arguments[operation.peer] if operation.peer >= 0 else -1
        tag = arguments[operation.tag] if operation.tag >= 0 else -1
        stream = _stream(first) if device == "cuda" and first is not None else 0
        given = tuple([tensor.shape for tensor in inputs])
        got = given if outputs is inputs else tuple([tensor.shape for tensor in outputs])
        dtype = None if first is None else first.dtype
        signature = (
            operation, group, given, got, dtype, asynchronous, peer, tag, coalesced, device, stream, place,
        )  # fmt: skip
        kind = self._known.get(signature)
        if kind is None or sparse:
            kind = _make(
                operation, group, inputs, outputs, (peer, tag), asynchronous, coalesced, device, stream, place
            )
            if len(self._known) >= MAX_KINDS:
                self._known.clear()
            self._known[signature] = kind
        return kind


def _make(
    operation: Operation,
    group: TracedGroup,
    inputs: Any,
    outputs: Any,
    other: tuple[int, int],
    asynchronous: bool,
    coalesced: bool,
    device: str,
    stream: int,
    place: CallPlace,
) -> CallKind:
    # What each rank holds alike: the root of a scatter alone has the parts of all.
    tensors = outputs if operation.name == "scatter" else inputs or outputs
    given, got = sum(map(_bytes, inputs)), sum(map(_bytes, outputs))
    site, phase, module = place
    peer, channel = -1, group.name
    if operation.point_to_point:
        peer, channel = _channel(operation, group, *other)
        asynchronous = site.api in _ASYNCHRONOUS_APIS
    return CallKind(
        op=operation.name,
        group=group.name,
        channel=channel,
        bytes=message_bytes(operation.name, given, got, len(group.ranks)),
        input_bytes=given,
        output_bytes=got,
        shapes=tuple([tuple(tensor.shape) for tensor in tensors[:SHOWN_SHAPES]]),
        tensors=len(tensors),
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        asynchronous=asynchronous,
        coalesced=coalesced,
        device=device,
        stream=stream,
        api=site.api,
        site=site.site,
        phase=phase,
        module=module,
        peer=peer,
    )


def _channel(operation: Operation, group: TracedGroup, peer: int, tag: int) -> tuple[int, str]:
    """The other rank, and what a message is numbered by: sender, receiver and tag, the same on both sides."""
    me = group.ranks[group.rank]
    if peer < 0:
        return -1, f"{group.name}:?>{me}/{tag}"
    other = group.ranks[peer]
    sender, receiver = (me, other) if operation.name == "send" else (other, me)
    return other, f"{group.name}:{sender}>{receiver}/{tag}"


def _bytes(tensor: Any) -> int:
    if tensor.is_sparse:
        return int(tensor._values().nbytes + tensor._indices().nbytes)
    return int(tensor.nbytes)


def _stream(tensor: Any) -> int:
    import torch

    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


# A key that every call passes, on all devices and with or without gradients, and where c10d has nothing of its
# own.
KEY = "BackendSelect"
MAX_RESULTS = 4096
MAX_KEPT_ALIVE = 4096
KEEP_ALIVE_NS = 10**9

Redispatch: TypeAlias = Callable[..., Any]
_CallClock: TypeAlias = HostClock | EventClock
# The keys of a call below ours, what tells its times (None for tensors without data), whether tensors are sparse.
Route: TypeAlias = tuple[Any, _CallClock | None, bool]
# A weak reference to a Work, and the calls that it is of, with true where only waiting for it tells their end.
Awaited: TypeAlias = tuple[Any, list[tuple[TracedCall, _CallClock, bool]]]


class Capture:
    """The one place of a process where calls are seen.

    Attributes:
        groups: the process groups.
        phases: where in training this is.
        pending: calls that have not ended, by identity.
        failed: calls that PyTorch refused.
        errors: calls that could not be described, and the first reason.
        unknown: collective operators of this PyTorch that are in no table here.
    """

    def __init__(self) -> None:
        import torch

        self.groups = TracedGroups()
        self.phases = Phases()
        self.pending: dict[int, TracedCall] = {}
        self.failed = 0
        self.errors = 0
        self.error = ""
        self.unknown: tuple[str, ...] = ()
        self._sites = CallSites()
        self._kinds = CallKinds()
        self._unbox_group: Any = torch.distributed.ProcessGroup.unbox
        self._unbox_work: Any = torch.distributed.Work.unbox
        key = torch._C.DispatchKey.__members__[KEY]
        self._below: Any = torch._C._dispatch_keyset_full_after(key)
        self._listeners: tuple[Listener, ...] = ()
        self._host = HostClock(self._finished)
        self._events = EventClock(self._finished, torch.cuda)
        self._awaited: dict[int, Awaited] = {}
        self._results: OrderedDict[int, tuple[TracedCall, _CallClock]] = OrderedDict()
        self._kept_alive: dict[int, TracedCall] = {}
        self._coalescing: dict[str, list[tuple[TracedCall, _CallClock]]] = {}
        self._latest: Any = None
        self._restore: list[Callable[[], None]] = []

    @property
    def listening(self) -> bool:
        """Whether anyone is told of calls."""
        return bool(self._listeners)

    def add(self, listener: Listener) -> None:
        """Tells of every call from now on."""
        if not self._restore:
            # Groups may have come and gone while nobody looked.
            self.groups = TracedGroups()
            self._install()
        self.groups.sweep()
        self._listeners += (listener,)

    def remove(self, listener: Listener) -> None:
        """Stops telling; without listeners PyTorch is as it was."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        if not self._listeners:
            while self._restore:
                self._restore.pop()()
            self.phases.detach()
            self._latest = None
            self._results.clear()
            self._awaited.clear()

    def read_events(self) -> None:
        """Looks which calls on devices have ended."""
        try:
            self._events.read()
        except Exception as error:
            self._confess(error)

    def _install(self) -> None:
        import torch
        from torch.distributed import ProcessGroup, Work, distributed_c10d

        for namespace, kernels in (
            ("c10d", {name: self._kernel(operation) for name, operation in OPERATIONS.items()}),
            ("_c10d_functional", {"wait_tensor": self._wait_tensor}),
        ):
            library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            for name, make in kernels.items():
                operator = getattr(getattr(torch.ops, namespace), name, None)
                if operator is not None:
                    # This way down the dispatcher lets go of the interpreter's lock: operators may block.
                    library.impl(name, make(operator.default._handle.redispatch_boxed), KEY, with_keyset=True)
            self._restore.append(library._destroy)
        for kind in (Work, *Work.__subclasses__()):
            if "wait" in vars(kind):
                self._wrap(kind, "wait", self._waiting)
        self._wrap(ProcessGroup, "_start_coalescing", self._coalescing_starts)
        self._wrap(ProcessGroup, "_end_coalescing", self._coalescing_ends)
        self._wrap(distributed_c10d, "_register_process_group", self._registering)
        self._wrap(distributed_c10d, "_unregister_process_group", self._unregistering)
        self._wrap(distributed_c10d, "_unregister_all_process_groups", self._unregistering)
        self.unknown = _unknown_operators()

    def _wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        # As it lies in the class: what `getattr` makes of a method of C++ would no longer be bound when put back.
        own = vars(owner).get(name)
        setattr(owner, name, around(getattr(owner, name)))
        self._restore.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _route(self, keyset: Any) -> Route:
        import torch

        keys = torch._C.DispatchKey
        below = keyset & self._below
        sparse = keyset.has(keys.SparseCPU) or keyset.has(keys.SparseCUDA)
        if keyset.has(keys.Meta):
            return below, None, sparse
        return below, self._events if keyset.has(keys.CUDA) or keyset.has(keys.SparseCUDA) else self._host, sparse

    def _kernel(self, operation: Operation) -> Callable[[Redispatch], Redispatch]:
        routes: dict[int, Route] = {}

        def make(redispatch: Redispatch) -> Redispatch:
            issue, follow, site_at, frame = self._issue, self._follow, self._sites.at, sys._getframe

            def kernel(keyset: Any, *arguments: Any, **named: Any) -> Any:
                keys = keyset.raw_repr()
                route = routes.get(keys)
                if route is None:
                    route = routes[keys] = self._route(keyset)
                keyset, clock, sparse = route
                if clock is None:
                    return redispatch(keyset, *arguments, **named)
                call = None
                try:
                    call = issue(operation, arguments, clock, sparse, site_at(frame().f_back))
                except Exception as error:
                    self._confess(error)
                try:
                    result = redispatch(keyset, *arguments, **named)
                except BaseException:
                    if call is not None:
                        self._refuse(call)
                    raise
                if call is not None:
                    try:
                        follow(operation, arguments, call, result, clock)
                    except Exception as error:
                        self._confess(error)
                return result

            return kernel

        return make

    def _issue(
        self, operation: Operation, arguments: OperatorArguments, clock: _CallClock, sparse: bool, site: CallSite
    ) -> TracedCall:
        group = self.groups.of(self._unbox_group(arguments[operation.group]))
        coalesced = group.torch_name in self._coalescing
        phase, module = self.phases.here()
        place = (site, phase, module)
        kind = self._kinds.of(operation, arguments, group, coalesced, clock.device, sparse, place)
        issued, channel = group.issued, kind.channel
        sequence = issued.get(channel, 0)
        issued[channel] = sequence + 1
        call = TracedCall(kind, group, sequence, self._listeners)
        clock.issue(call)
        self.pending[id(call)] = call
        for listener in call.listeners:
            listener.issued(call)
        return call

    def _follow(
        self, operation: Operation, arguments: OperatorArguments, call: TracedCall, result: Any, clock: _CallClock
    ) -> None:
        if not operation.work:
            call.wait, call.end = call.queued, time.perf_counter_ns()
            self._finished(call)
            return
        # Held until the next call, so that PyTorch gives the caller this very object, and its wait is known.
        work = self._latest = self._unbox_work(result[-1] if isinstance(result, (list, tuple)) else result)
        if call.kind.coalesced:
            self._coalescing[call.group.torch_name].append((call, clock))
            return
        if call.kind.asynchronous and not operation.point_to_point:
            for tensor in operation.outputs(arguments, True):
                self._results[tensor.data_ptr()] = (call, clock)
            while len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
        if call.kind.asynchronous:
            self._await(work, [(call, clock)])
        else:
            clock.waits(call, at_once=True)
            if not clock.watch(call, work):
                self._remember(work, [(call, clock, True)])

    def _await(self, work: Any, calls: list[tuple[TracedCall, _CallClock]]) -> None:
        """Follows calls that the caller may wait for to their ends."""
        reference = weakref.ref(work)
        followed = []
        for call, clock in calls:
            if call.kind.asynchronous:
                call.holder = reference
            else:
                clock.waits(call, at_once=True)
            followed.append((call, clock, not clock.watch(call, work)))
        self._remember(work, followed)

    def _remember(self, work: Any, calls: list[tuple[TracedCall, _CallClock, bool]]) -> None:
        """Until it is waited for, or gone."""
        before = self._awaited.get(id(work))
        self._awaited[id(work)] = weakref.ref(work), calls
        if before is not None:
            self._gone(before[1])

    def _gone(self, calls: list[tuple[TracedCall, _CallClock, bool]]) -> None:
        """Nobody waits for a Work that is gone."""
        for call, _, ends_here in calls:
            if ends_here:
                self._finished(call)

    def _finished(self, call: TracedCall) -> None:
        if self.pending.pop(id(call), None) is None:
            return
        call.work = None
        if call.holder is not None and call.wait == UNKNOWN and call.end != UNKNOWN:
            # Whether it was waited for before or after its end is worth a moment.
            self._kept_alive[id(call)] = call
            if len(self._kept_alive) > MAX_KEPT_ALIVE:
                self.settle(0)
            return
        for listener in call.listeners:
            listener.ended(call)

    def settle(self, keep_alive_ns: int = KEEP_ALIVE_NS) -> None:
        """Lets go of calls whose Work is gone, or that ended some time ago and that nobody has waited for.

        Where the caller still holds the Work, its waiting comes after the end; where C++ holds it, nobody knows.

        Args:
            keep_alive_ns: how long ago.
        """
        for key, (reference, calls) in list(self._awaited.items()):
            if reference() is None and self._awaited.get(key, (None,))[0] is reference:
                del self._awaited[key]
                self._gone(calls)
        before = time.perf_counter_ns() - keep_alive_ns
        for call in list(self._kept_alive.values()):
            if call.end <= before and self._kept_alive.pop(id(call), None) is not None:
                if call.holder() is self._latest:
                    self._latest = None
                if call.holder() is not None:
                    call.wait = call.end
                self._tell(call)

    def _tell(self, call: TracedCall) -> None:
        for listener in call.listeners:
            listener.ended(call)

    def _refuse(self, call: TracedCall) -> None:
        self.pending.pop(id(call), None)
        self.failed += 1
        issued = call.group.issued
        if issued[call.kind.channel] == call.sequence + 1:
            issued[call.kind.channel] = call.sequence
        for listener in call.listeners:
            listener.refused(call)

    def _confess(self, error: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            sys.stderr.write(f"echograph: a collective could not be traced ({type(error).__name__}: {error})\n")

    def _wait_tensor(self, redispatch: Redispatch) -> Redispatch:
        below = self._below

        def kernel(keyset: Any, tensor: Any) -> Any:
            if self._results:
                try:
                    found = self._results.pop(tensor.data_ptr(), None)
                    if found is not None:
                        self._waits_for(*found)
                except Exception as error:
                    self._confess(error)
            return redispatch(keyset & below, tensor)

        return kernel

    def _waits_for(self, call: TracedCall, clock: _CallClock) -> None:
        if call.wait == UNKNOWN:
            clock.waits(call)
        if self._kept_alive.pop(id(call), None) is not None:
            self._tell(call)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *arguments: Any, **named: Any) -> Any:
            if work is self._latest:
                self._latest = None
            awaited = self._awaited.pop(id(work), None)
            if awaited is None or awaited[0]() is not work:
                if awaited is not None:
                    self._gone(awaited[1])
                return original(work, *arguments, **named)
            for call, clock, _ in awaited[1]:
                self._waits_for(call, clock)
            try:
                result = original(work, *arguments, **named)
            except BaseException:
                # What has not ended may be waited for again.
                self._awaited[id(work)] = awaited
                raise
            for call, _, ends_here in awaited[1]:
                if ends_here:
                    call.end = time.perf_counter_ns()
                    self._finished(call)
            return result

        return wait

    def _coalescing_starts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(process_group: Any, *arguments: Any, **named: Any) -> Any:
            result = original(process_group, *arguments, **named)
            # Not before: a backend that has no such blocks refuses, and then none begins.
            self._coalescing[process_group.group_name] = []
            return result

        return start

    def _coalescing_ends(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(process_group: Any, *arguments: Any, **named: Any) -> Any:
            work = original(process_group, *arguments, **named)
            calls = self._coalescing.pop(process_group.group_name, [])
            if work is not None and calls:
                try:
                    self._await(work, calls)
                except Exception as error:
                    self._confess(error)
            return work

        return end

    def _registering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(name: str, process_group: Any) -> Any:
            self.groups.sweep()
            return original(name, process_group)

        return register

    def _unregistering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def unregister(*names: str) -> Any:
            self.groups.sweep()
            self.groups.forget(*names)
            return original(*names)

        return unregister


def _unknown_operators() -> tuple[str, ...]:
    import torch

    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")]
    schemas = {n: torch._C._get_schema(n, "") for n in names if "." not in n}
    taking_groups = {
        n.removeprefix("c10d::") for n, schema in schemas.items() if "c10d.ProcessGroup" in str(schema)
    }
    return tuple(sorted(taking_groups - set(OPERATIONS)))
