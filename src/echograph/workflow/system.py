"""Where a job runs: a cluster, what its device's kernels take, and the host that feeds it, resolved once.

`annotate` writes a graph with the durations that a simulation on it would take, or that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import NONE, distinct
from echograph.ir.graph import Graph, JobGraph
from echograph.ir.passes.annotate import Annotate, Coverage, join
from echograph.ir.profile import Profile, load_profile
from echograph.ir.types import COMMUNICATIONS, SCRIPT, OpKind, Phase, Source
from echograph.models.stacks import Stack, load_stack
from echograph.options import option, option_name
from echograph.profiler.costs import DeviceProfile, load_device
from echograph.simulator.clusters import DEFAULT_CLUSTER, Cluster, load_cluster
from echograph.simulator.host import IssueTimes
from echograph.simulator.memory import Runtime
from echograph.units import format_bytes, to_ps

if TYPE_CHECKING:
    from echograph.profiler.costs.estimate import Bursts, KnownCosts
    from echograph.simulator.durations import NetworkModel

G = TypeVar("G", bound=Graph)
_AS_SHIPPED: Mapping[str, str] = MappingProxyType({})
IDLE_HOST_WAITS = "--host-waits: has no effect here: no stage receives from another"


@dataclass(frozen=True, slots=True, init=False)
class System:
    """A cluster of one kind of device, and the hosts that feed them.

    `System("dgx-h100")` is a preset, `System("ours.toml")` a user's own cluster, and `System("profile.pb")` the
    one machine that a profile of `echoprof ops` was measured on.

    Attributes:
        cluster: nodes, links and memory; its `device` is the name under which durations stand in graphs.
        device: the cost models of its device; None where every duration stands in the graph or in `profile`.
        host: what issuing an operation takes.
        profile: durations measured on the one device; None for a cluster.
        settings: keys of the cluster's file that have other values, as text: {"network.nic_GBps": "100"}.
        asked: what is otherwise than the file says, by the fields of `SystemOptions`.
    """

    cluster: Cluster
    device: DeviceProfile | None
    host: IssueTimes
    profile: Profile | None
    settings: Mapping[str, str]
    asked: tuple[str, ...]

    def __init__(
        self,
        cluster: str | Path | Cluster = DEFAULT_CLUSTER,
        device: str | Path | DeviceProfile | None = None,
        *,
        settings: Mapping[str, str] = _AS_SHIPPED,
        host_waits: bool = False,
        launch_blocking: bool = False,
        power_limit_W: float | None = None,
    ) -> None:
        """Resolves names and files.

        Args:
            cluster: a preset, a cluster file (.toml), a measured profile (.pb), or a cluster.
            device: another device than the cluster's file names, with its memory: a name, a profile file (.json),
                or a profile.
            settings: keys of the cluster's file with other values, as text.
            host_waits: the host waits for what a pipeline stage receives.
            launch_blocking: every launch waits for its kernel.
            power_limit_W: what a board may draw, at most what its maker allows; None: that.

        Raises:
            UnknownNameError: no preset, device, processor or key of that name.
            UsageError: another device or limit of power for a measured profile, which is of one machine; a limit
                that the device cannot have.
            InputError: a file cannot be read.
            DataError: a file breaks a rule of its format.
        """
        asked = {
            "device": device is not None, "set": settings, "host_waits": host_waits,
            "launch_blocking": launch_blocking, "power_limit": power_limit_W is not None,
        }  # fmt: skip
        profile, costs = None, None
        if isinstance(cluster, str | Path) and str(cluster).endswith(".pb"):
            where, host, profile = _measured(str(cluster), [name for name, given in asked.items() if given])
        else:
            where = cluster if isinstance(cluster, Cluster) else load_cluster(cluster, settings)
            costs = device if isinstance(device, DeviceProfile) else load_device(device or where.device)
            costs = _limited(costs, power_limit_W)
            # A cluster may name the file of a device; durations carry the name that stands in it.
            another = device is not None and costs.name != where.device
            memory = costs.datasheet.memory_bytes if another else where.memory_bytes
            where, host = replace(where, device=costs.name, memory_bytes=memory), host_of(costs)
        if where.processor:
            from echograph.profiler.costs.host import load_processor

            load_processor(where.processor)  # refuses a name that no table has, whichever framework runs
        host = replace(host, waits=host_waits, blocking=launch_blocking or host.blocking)
        self._fill(
            cluster=where,
            device=costs,
            host=host,
            profile=profile,
            settings=settings,
            asked=tuple(name for name, value in asked.items() if value),
        )

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def timed(cls, cluster: Cluster, host: IssueTimes) -> System:
        """A system for jobs in which every duration stands already, as in one that was traced.

        Args:
            cluster: its `device` is the name under which they stand.
            host: what issuing takes.
        """
        system = cls.__new__(cls)
        system._fill(cluster=cluster, device=None, host=host, profile=None, settings=_AS_SHIPPED, asked=())
        return system

    def with_memory(self, device_bytes: int) -> System:
        """The system whose devices hold at most so many bytes.

        Raises:
            UsageError: it is no memory at all, or more than they have.
        """
        has = self.cluster.memory_bytes
        if not 0 < device_bytes <= has:
            raise UsageError(
                f"--max-memory {format_bytes(device_bytes)}: {self.cluster.device} has {format_bytes(has)}: "
                "give as much at most"
            )
        system = System.__new__(System)
        cluster = replace(self.cluster, memory_bytes=device_bytes)
        system._fill(**{f.name: getattr(self, f.name) for f in fields(self)} | {"cluster": cluster})
        return system

    def annotate(self, graph: G, costs: KnownCosts | None = None, network: NetworkModel | None = None) -> G:
        """The graph with a duration for every operation of the device: those that it has, else this system's.

        Products and attention of a job take as long as on the slowest of its GPUs. Where power sets the clock, it
        is higher the longer kernels wait for communication.

        Args:
            graph: a step or a job.
            costs: what kernels of other graphs cost on this system; gets this one's.
            network: the cluster's, where it keeps what it said of other graphs.

        Raises:
            UnavailableError: the device has no model of a kind of operation.
        """
        if self.profile is not None:
            from echograph.ir.passes.annotate import join

            return join(graph, self.profile)[0](graph)
        if self.device is None:
            return graph
        from echograph.profiler.costs.estimate import KnownCosts, estimate

        slower = self.slower(graph.world_size if isinstance(graph, JobGraph) else 1)
        costs = KnownCosts() if costs is None else costs
        waits = self.device.power is not None and bool(np.isin(graph.ops.kind, COMMUNICATIONS).any())
        exposed = partial(self._exposed, graph, network) if waits else None
        return estimate(graph, self.device, slower, costs, exposed)(graph)

    def bursts(self, graph: Graph, costs: KnownCosts | None = None) -> Bursts | None:
        """What kernels take before it is known how long they run; None where durations are measured, or not known.

        Args:
            graph: a step or a job.
            costs: as of `annotate`.

        Raises:
            UnavailableError: the device has no model of a kind of operation.
        """
        if self.profile is not None or self.device is None:
            return None
        from echograph.profiler.costs.estimate import bursts

        return bursts(graph, self.device, costs)

    def slower(self, boards: int) -> float:
        """How much longer kernels of tensor cores take on the slowest of so many boards than on a typical one."""
        from echograph.profiler.costs.power import slowest_of

        return slowest_of(boards, self.cluster.gpu_spread)

    def _exposed(
        self, graph: Graph, network: NetworkModel | None, kernels: Annotate
    ) -> dict[tuple[int, int], int]:  # fmt: skip
        """What kernels wait for communication of their call in a micro-batch amid the others (`exposed_ps`)."""
        from echograph.simulator.durations import durations
        from echograph.simulator.exposed import exposed_ps

        timed: Graph = kernels(graph)
        job = (
            timed
            if isinstance(timed, JobGraph)
            else JobGraph(**{f.name: getattr(timed, f.name) for f in fields(timed)})
        )
        takes = durations(job, replace(self.cluster, degraded=()), network=network).picoseconds
        return exposed_ps(job, takes, [program.usual_calls for program in job.programs])

    @property
    def architecture(self) -> str:
        """That of the device ("hopper"); "" where it is not known."""
        return self.device.datasheet.architecture if self.device is not None else ""

    @property
    def sm_count(self) -> int:
        """Multiprocessors of one device; 0 where it is not known."""
        return self.device.datasheet.sm_count if self.device is not None else 0

    def host_running(self, framework: str) -> IssueTimes:
        """The host that runs a framework; as it is for any where one of them, or the processor, is not known.

        Args:
            framework: a name of the profiler's table; "": not known.

        Raises:
            UnknownNameError: no such framework or processor.
        """
        if not framework or not self.cluster.processor or self.device is None:
            return self.host
        from echograph.profiler.costs.host import RATED_SPREAD, load_framework, load_processor

        processor = load_processor(self.cluster.processor)
        work = load_framework(framework).on(processor)
        return replace(
            self.host,
            op_ps=to_ps(work[Phase.FORWARD] + processor.launch_s),
            launch_ps=to_ps(processor.launch_s),
            work_ps={phase: to_ps(seconds) for phase, seconds in work.items()},
            communication_ps=to_ps(processor.communication_s),
            spread=RATED_SPREAD,
        )

    def host_of_script(self, graph: Graph) -> IssueTimes | None:
        """The host that runs a graph which says what its script does; None for another graph.

        A measured CPU is taken to be the processor that the work is told for.

        Raises:
            UnknownNameError: the graph's processor is in no table.
            UsageError: it is not known which processor the cluster's hosts have.
        """
        from echograph.profiler.costs.host import load_processor, slower, told_by

        ops = graph.ops
        names = (ops.strings[device] for device in distinct(ops.duration_device).tolist())
        told = next((name for name in names if name.endswith(SCRIPT)), "")
        if not told:
            return None
        units, measured_on = told_by(told)
        if self.profile is not None:
            in_place = to_ps(units.times_in_place * units.operator_s)
            besides = -to_ps(units.alone_s) if self.host.blocking else in_place
            return replace(self.host, script=told, kernel_ps=besides)
        if not self.cluster.processor:
            raise UsageError(
                f"the graph says what its script takes the host on {measured_on}, and cluster {self.cluster.name} "
                "does not say which processor its hosts have: give it, as --set cluster.node.processor=xeon-8480c"
            )
        processor = load_processor(self.cluster.processor)
        operator_s = slower(units.processor, self.cluster.processor) * units.times_in_place * units.operator_s
        return replace(
            self.host,
            script=told,
            slower=units.in_training * slower(measured_on, self.cluster.processor),
            kernel_ps=to_ps(units.in_training * operator_s + processor.launch_s),
            communication_ps=to_ps(processor.communication_s),
        )

    def peak_flops_per_s(self, graph: Graph) -> float:
        """FLOP/s of one device in the type of the step; 0 where it is not known, as of fp64."""
        if self.device is None:
            return 0.0
        from echograph.profiler.costs.estimate import DTYPE_NAMES
        from echograph.profiler.costs.gemm import STAND_IN

        peaks, name = self.device.datasheet.peak_flops_per_s, DTYPE_NAMES.get(graph.workload.dtype, "")
        return peaks.get(name) or peaks.get(STAND_IN.get(name, name), 0.0)


IDLE_HOST_WAITS = "--host-waits: has no effect here: no stage receives from another"


@cache
def runtime_of(stack: str, architecture: str) -> Runtime:
    """What a framework takes of memory besides tensors.

    Args:
        stack: the software that trains; "": any.
        architecture: of the device; "": not known.
    """
    chosen = load_stack(stack) if stack else Stack()
    return replace(
        Runtime.on(architecture),
        expandable_segments=chosen.expandable_segments,
        other_communicators=chosen.other_communicators,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """What is otherwise than a cluster's file says. The text of each field is its help on the command line."""

    device: str = option("", "Another device: a name (see echosim devices) or a profile.json.", "the cluster's")
    set: tuple[str, ...] = option((), "What if cluster.KEY=VALUE, as cluster.network.nic_GBps=100.")
    host_waits: bool = option(
        False, "The host waits for what a pipeline stage receives (Megatron-LM of 2021, DeepSpeed)."
    )
    launch_blocking: bool = option(False, "Every launch waits for its kernel (CUDA_LAUNCH_BLOCKING=1).")

    power_limit: float | None = option(
        None, "Watts that a board may draw (nvidia-smi --power-limit).", "what its maker allows"
    )

    def system(self, cluster: str) -> System:
        """The system of a cluster with these options.

        Raises:
            UsageError: a setting is misspelt.
            EchoError: as `System`.
        """
        return System(
            cluster,
            self.device or None,
            settings=dict(map(_setting, self.set)),
            host_waits=self.host_waits,
            launch_blocking=self.launch_blocking,
            power_limit_W=self.power_limit,
        )


def _limited(device: DeviceProfile, power_limit_W: float | None) -> DeviceProfile:
    """The device with another limit of power."""
    if power_limit_W is None:
        return device
    if device.power is None:
        raise UsageError(f"--power-limit: nothing is known of the power of {device.name}: leave it out")
    least, most = device.power.static_W, device.power.limit_W
    if not least < power_limit_W <= most:
        raise UsageError(
            f"--power-limit {power_limit_W:g}: {device.name} draws {least:g} W at rest, and its maker allows "
            f"{most:g} W: give more than the one, and at most the other"
        )
    power = msgspec.structs.replace(device.power, limit_W=power_limit_W)
    return msgspec.structs.replace(device, power=power)


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.startswith("cluster."):
        raise UsageError(f"--set {text[:60]}: give cluster.KEY=VALUE, as cluster.network.nic_GBps=100")
    return key.removeprefix("cluster."), value


def host_name(device: str) -> str:
    """The name under which a file says how long the host takes to issue an operation for a device."""
    return f"{device}/host"


def host_of(device: DeviceProfile) -> IssueTimes:
    """The host that feeds a device."""
    from echograph.profiler.costs.device import HOST_SPREAD

    model = device.host
    return IssueTimes(
        op_ps=to_ps(model.op_s),
        launch_ps=to_ps(model.kernel_s),
        communication_ps=None if model.communication_s is None else to_ps(model.communication_s),
        spread=HOST_SPREAD,
        name=host_name(device.name),
    )


def measured_host(profile: Profile) -> IssueTimes:
    """The host as it was measured. Where it computes itself it issues nothing meanwhile."""
    environment = profile.environment
    return IssueTimes(
        op_ps=environment.host_op_picoseconds,
        launch_ps=environment.host_op_picoseconds - environment.host_view_picoseconds,
        blocking=environment.threads > 0,
    )


def _measured(path: str, asked: Sequence[str]) -> tuple[Cluster, IssueTimes, Profile]:
    """The one machine that a profile was measured on, of which little can be otherwise than it was."""
    for name in asked:
        if name != "launch_blocking":
            raise UsageError(
                f"{option_name(name)}: {path} is one measured device: give a cluster, or leave it out"
            )
    profile = load_profile(path)
    return _machine(profile, Path(path).stem), measured_host(profile), profile


def _machine(profile: Profile, name: str) -> Cluster:
    """A cluster of one device; what stands there of links joins nothing."""
    return replace(
        load_cluster(),
        name=name,
        device=profile.environment.device,
        memory_bytes=profile.environment.memory_bytes,
        gpus_per_node=1,
        domain_gpus=1,
        nvlink_bytes_per_s=0.0,
        max_gpus=1,
        stated_gpus=1,
    )


def annotate(graph: G, system: System) -> G:
    """The graph with all durations that its simulation on a system uses.

    Operations of the device have theirs under its name, all under `host_name` what the host takes to issue them
    (host work: to do them), and communications under the cluster's name. What is known already stays.

    Raises:
        PlanError: a group does not fit the cluster.
    """
    where, device = system.cluster, system.device
    graph = system.annotate(graph)
    count = len(graph.ops)
    fitted = device is not None and device.host.source == "measured"
    source = Source.FITTED if fitted else Source.ANALYTICAL if device is not None else Source.MEASURED
    of_host = Annotate(
        device=host_name(where.device),
        picoseconds=system.host.issue(graph),
        source=np.full(count, source, np.uint8),
        spread=np.full(count, system.host.spread, np.float32),
        samples=np.zeros(count, np.int64),
    )
    if isinstance(graph, JobGraph):
        graph = cast(G, _communicate(graph, where))
    return of_host(graph)


def _communicate(job: JobGraph, where: Cluster) -> JobGraph:
    """The job with what the simulator takes for everything that has no duration on the device."""
    from echograph.simulator.durations import durations

    times = durations(job, where)
    known, _, _ = job.ops.duration_on(where.device)
    communicates = np.isin(job.ops.kind, COMMUNICATIONS)
    still = job.ops.is_view | (job.ops.kind == OpKind.HOST)
    for name, rows in ((where.name, communicates), (where.device, ~communicates & ~still)):
        job = Annotate(
            device=name,
            picoseconds=np.where(rows & (known == NONE), times.picoseconds, NONE),
            source=times.source,
            spread=times.spread,
            samples=np.zeros(len(job.ops), np.int64),
        )(job)
    return job


def duration_sources(graph: Graph, system: System) -> dict[str, tuple[str, dict[str, int]]]:
    """Where the durations of an annotated graph come from.

    Returns:
        For "device", "host" and "network": the name of the durations, and how many operations have one by source
        ("measured", "fitted", "analytical", "imported").
    """
    device, network = system.cluster.device, system.cluster.name
    found: dict[str, tuple[str, dict[str, int]]] = {}
    for part, name in {"device": device, "host": host_name(device), "network": network}.items():
        _, source, _ = graph.ops.duration_on(name)
        counts = {s.name.lower(): int((source == s).sum()) for s in Source}
        found[part] = name, {kind: count for kind, count in counts.items() if count}
    return found


def annotate_measured(graph: G, profile: Path, device: str = "") -> tuple[G, dict[str, Any]]:
    """The graph with a profile's durations, under a device's name or the profile's own; and what they cover.

    Where the profile says what the host takes, that goes under `host_name` of the device.
    """
    measured = load_profile(profile)
    annotate, coverage = join(graph, measured, device)
    runs = coverage.measured + coverage.free + coverage.missing
    record = {
        "device": annotate.device,
        "operations": {
            "measured": coverage.measured,
            "free": coverage.free,
            "missing": coverage.missing,
            "communication_and_host": coverage.other,
        },
        "measured_share": coverage.measured / max(1, coverage.measured + coverage.missing),
        "free_share": coverage.free / max(1, runs),
        "missing_operators": dict(coverage.missing_operators),
        "unmatched": _unmatched(coverage),
    }
    annotated = annotate(graph)
    if measured.environment.host_op_picoseconds:
        annotated = _with_host(annotated, measured, annotate.device)
        record["host"] = host_name(annotate.device)
    return annotated, record


def _with_host(graph: G, profile: Profile, device: str) -> G:
    count = len(graph.ops)
    communicates = np.isin(graph.ops.kind, COMMUNICATIONS)
    return Annotate(
        device=host_name(device),
        # Of collectives, which go through a process group, the profile says nothing.
        picoseconds=np.where(communicates, NONE, measured_host(profile).issue(graph)),
        source=np.full(count, Source.MEASURED, np.uint8),
        spread=np.zeros(count, np.float32),
        samples=np.zeros(count, np.int64),
    )(graph)


def _unmatched(coverage: Coverage) -> list[str]:
    return [m.arguments or m.operator for m in coverage.unmatched]
