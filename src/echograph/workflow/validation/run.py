"""Predicts the rows of a table: rows are spread over processes, and share what their plans have in common.

An architecture is captured once, with few layers; deeper models, other micro-batches, and the steps of ranks that
share them are made of that capture by passes, each once for all the rows that want it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

from echograph.errors import EchoError, PlanError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import Pass, pass_text, run, split_at_job
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.depth import FEWEST, Depth
from echograph.ir.passes.extent import MicroBatch
from echograph.ir.passes.mesh import ResizeAxes
from echograph.progress import Progress, silent
from echograph.simulator.clusters import Cluster
from echograph.simulator.form import load_form
from echograph.simulator.memory import Runtime, largest_memory
from echograph.units import MIB, to_s
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan, passes
from echograph.workflow.predict import simulate
from echograph.workflow.scenario import Scenario
from echograph.workflow.shared import SharedJobs
from echograph.workflow.system import System, runtime_of
from echograph.workflow.validation.assumptions import unsaid_spread
from echograph.workflow.validation.model import with_known_sizes
from echograph.workflow.validation.score import Outcome
from echograph.workflow.validation.setup import Setup, setup
from echograph.workflow.validation.table import MeasuredStep, Skip
from echograph.workflow.validation.trainers import MemoryReport, trainer_of

PIECE = 360
"""Rows that a process takes at once: they share a capture, and no process is left alone with a large family."""

UPDATES = ("op:aten._foreach_*", "op:aten._fused_adamw_")
"""Operations of the optimizer."""

GIB = 2**30


def predict_rows(rows: Sequence[MeasuredStep], jobs: int = 1, progress: Progress = silent) -> list[Outcome]:
    """A prediction for every row that can be simulated, in the order of the rows.

    Args:
        rows: measured steps.
        jobs: processes.
        progress: told how far it is.
    """
    groups: dict[object, list[tuple[MeasuredStep, Setup]]] = defaultdict(list)
    done: dict[str, Outcome] = {}
    for row in map(with_known_sizes, rows):
        try:
            row.measured_s  # noqa: B018 - a row without is skipped before anything is compiled
            made = setup(row)
            groups[made.key].append((row, made))
        except (Skip, EchoError) as why:
            done[row.id] = _skipped(row, str(why))
    for outcomes in _run(list(_pieces(groups.values())), jobs):
        done |= {outcome.id: outcome for outcome in outcomes}
        progress("predicting measured steps", len(done), len(rows))
    return [done[row.id] for row in rows]


def _pieces(groups: Iterable[list[tuple[MeasuredStep, Setup]]]) -> Iterator[list[tuple[MeasuredStep, Setup]]]:
    """Groups, the large ones cut between rows that share least; the longest piece first."""
    pieces = []
    for group in groups:
        ordered = sorted(group, key=lambda pair: (pair[1].model.layers, *_order(pair[1].plan)))
        pieces += [ordered[i : i + PIECE] for i in range(0, len(ordered), PIECE)]
    return iter(sorted(pieces, key=_work, reverse=True))


def _run(pieces: list[list[tuple[MeasuredStep, Setup]]], jobs: int) -> Iterator[list[Outcome]]:
    if jobs == 1:
        yield from map(_predict_piece, pieces)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        try:
            for future in as_completed([pool.submit(_predict_piece, piece) for piece in pieces]):
                yield future.result()
        except BaseException:
            # An error or an interrupt does not wait for what has not begun.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _work(piece: list[tuple[MeasuredStep, Setup]]) -> int:
    """About how much there is to simulate, so that no process is left alone with the longest piece."""
    return sum((made.plan.global_batch or 1) * made.plan.model_ranks // made.micro_batch for _, made in piece)


def _predict_piece(piece: list[tuple[MeasuredStep, Setup]]) -> list[Outcome]:
    """Rows of one architecture."""
    steps = _Steps(sizes={made.micro_batch for _, made in piece})
    return [_predict(row, made, steps) for row, made in piece]


@dataclass(slots=True)
class _Steps:
    """Steps of one architecture, each made when it is asked for first.

    Attributes:
        sizes: all micro-batches that will be asked for.
        made: steps by what makes them.
        last: what made the last job, and the job.
        jobs: what passes make of steps.
    """

    sizes: set[int]
    made: dict[Hashable, StepGraph] = field(default_factory=dict)
    last: tuple[Hashable, JobGraph | None] = (None, None)
    jobs: SharedJobs = field(default_factory=SharedJobs)

    def job(self, made: Setup, system: System) -> JobGraph:
        """The annotated job of a row. DDP's does not depend on how many data-parallel ranks there are."""
        step = self._whole(made)
        of_step, of_job = split_at_job(passes(made.plan, step.workload, system.cluster))
        begun = (made.model.layers, made.micro_batch, *map(pass_text, of_step))
        key = (begun, made.plan.cluster, *made.settings.items(), *map(pass_text, map(_alike, of_job)))
        before, job = self.last
        if job is None or key != before:
            started = self._once(begun, lambda: run(step, of_step, to=StepGraph, verify=False))
            job = self.jobs.job(started, of_job)
            self.last = (key, job)
        sizes = [("dp", one.group) for one in of_job if isinstance(one, DataParallel)]
        return system.annotate(ResizeAxes(sizes=dict(sizes))(job))

    def _whole(self, made: Setup) -> StepGraph:
        """The model's step with a row's layers and micro-batch."""
        return self._once((made.model.layers, made.micro_batch), lambda: self._deep(made))

    def _deep(self, made: Setup) -> StepGraph:
        """A shallow capture made deeper; captured as deep as it is where layers differ."""
        layers = made.model.layers
        if layers <= FEWEST:
            return self._sized(made, layers)
        try:
            return Depth(layers=layers)(self._sized(made, FEWEST))
        except PlanError:
            return self._sized(made, layers)

    def _sized(self, made: Setup, layers: int) -> StepGraph:
        """The captured step with a row's micro-batch; captured anew where the batch cannot be told from others."""
        # A capture of one sample does not show where the batch is, so it cannot be resized.
        size = min(self.sizes) if len(self.sizes) == 1 else max(2, min(self.sizes))
        captured = self._once(("captured", layers, size), lambda: _compile(made, layers, size))
        try:
            return MicroBatch(size=made.micro_batch)(captured)
        except PlanError:
            return _compile(made, layers, made.micro_batch)

    def _once(self, key: Hashable, make: Callable[[], StepGraph]) -> StepGraph:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def _alike(one: Pass) -> Pass:
    """A pass with the number of replicas that makes the same programs: two of them, where there are several."""
    if isinstance(one, DataParallel) and not one.zero:
        return replace(one, replicas=min(one.replicas, 2))
    return one


def _shared(plan: Plan) -> Plan:
    """What of a plan says what a rank computes for a micro-batch; the rest says how often and beside whom."""
    plan = replace(plan, gpus=None, dp=None, global_batch=None, overlap_moe_expert_parallel_comm=False)
    plan = replace(plan, pp=1, vpp=1, schedule="", stage_layers="")
    return replace(plan, zero=0, hsdp_replicas=1, distributed_optimizer_instances=1, reshard_after_forward=None)


def _order(plan: Plan) -> tuple[object, ...]:
    """Rows with the same step of a rank beside each other, and of those the ones with the same job."""
    each = (plan.global_batch or 1) * plan.model_ranks // (plan.gpus or 1)
    return repr(_shared(plan)), plan.pp, plan.vpp, plan.zero, each, plan.gpus


def _compile(made: Setup, layers: int, batch_size: int) -> StepGraph:
    model = made.model
    return compile_entry(
        model.of_layers(layers), made.spec, batch_size=batch_size, seq_len=made.seq_len, attention=model.attention
    )


def _predict(row: MeasuredStep, made: Setup, steps: _Steps) -> Outcome:
    try:
        system = System(made.plan.cluster, settings=made.settings, launch_blocking=made.blocking)
        job = steps.job(made, system)
        result = simulate(job, system, plan=made.plan, memory=False)
        step_s, work = result.step_s, result.work
        durations_s = to_s(result.durations_interval_ps[0]), to_s(result.durations_interval_ps[1])
        if made.layer_alone:
            step_s, durations_s, work = _alone(made, steps, system)
        measured = measured_memory(row)
        peak = predicted_memory(row, job, system.cluster, made.plan) if measured else None
    except EchoError as error:
        return _skipped(row, str(error))
    unsaid = unsaid_spread(made.assumed)
    return Outcome(
        id=row.id,
        family=row.family,
        measured_s=row.measured_s,
        device=system.cluster.device,
        gpus=result.gpus,
        stack=made.plan.stack,
        experts=any("grouped_mm" in text for text in job.strings),
        predicted_s=step_s,
        interval_s=load_form().interval(step_s, durations_s, work, unsaid),
        durations_interval_s=durations_s,
        work=work,
        unsaid=unsaid,
        tokens_per_s=(made.plan.global_batch or 0) * made.seq_len / step_s,
        peak_bytes=peak,
        measured_peak_bytes=measured,
        assumed=made.assumed,
    )


def _alone(made: Setup, steps: _Steps, system: System) -> tuple[float, tuple[float, float], dict[str, float]]:
    """Seconds of the layers without embedding, loss and optimizer: by how much so many more make a step longer.

    The interval, of the errors of durations, is as wide, relatively, as that of the longer step; and so are the
    shares of kinds of work.
    """
    shallow = replace(made, model=made.model.with_layers(FEWEST))
    deep = replace(made, model=made.model.with_layers(FEWEST + made.model.layers))
    scenario = Scenario(without=UPDATES)
    short, long = (
        simulate(steps.job(one, system), system, scenario, plan=one.plan, memory=False) for one in (shallow, deep)
    )
    seconds = long.step_s - short.step_s
    low, high = (seconds * bound / long.step_ps for bound in long.durations_interval_ps)
    return seconds, (low, high), long.work


def _skipped(row: MeasuredStep, why: str) -> Outcome:
    return Outcome(id=row.id, family=row.family, skipped=" ".join(why.split()))


def measured_memory(row: MeasuredStep) -> int | None:
    """The row's figure in bytes; None where it has none."""
    try:
        gib = float(row.text("peak_mem_gib"))
    except ValueError:
        return None
    return round(gib * trainer_of(row).memory.gib_MiB * MIB) if 0 < gib < 1e6 else None


def predicted_memory(row: MeasuredStep, job: JobGraph, cluster: Cluster, plan: Plan) -> int | None:
    """The same figure, predicted, of the rank that needs most."""
    report = trainer_of(row).memory
    memory = largest_memory(job, cluster.memory_bytes, _runtime(report, plan))
    if memory is None:
        return None
    reserved = report.figure == "reserved" and memory.reserved_bytes is not None
    return memory.reserved_bytes if reserved else memory.device_bytes


def _runtime(report: MemoryReport, plan: Plan) -> Runtime:
    runtime = runtime_of(plan.stack, "")
    if report.cuda_context_MiB:
        runtime = replace(runtime, cuda_context_bytes=report.cuda_context_MiB * MIB)
    if report.cublas_workspace_MiB:
        runtime = replace(runtime, cublas_workspace_bytes=(report.cublas_workspace_MiB * MIB,) * 2)
    return runtime
