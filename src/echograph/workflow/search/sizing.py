"""Questions around the best plan: how many GPUs a training needs, which cluster has the best plan, what fits.

All of them are searches over what they ask for: nothing here predicts in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from echograph.errors import EchoError, PlanError, UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.depth import Depth
from echograph.ir.passes.pipeline.placement import layer_names
from echograph.ir.tables import text_table
from echograph.progress import Progress, silent
from echograph.simulator.memory import Memory, largest_memory
from echograph.units import format_bytes, format_count, format_time
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower, predict
from echograph.workflow.scenario import Scenario
from echograph.workflow.search.branch import Candidate, in_words, search
from echograph.workflow.search.space import AXES
from echograph.workflow.system import System, SystemOptions, runtime_of
from echograph.workflow.training import Training, TrainingOptions, step_energy, training

_PLAIN = Scenario()


def tokens_of(graph: StepGraph | JobGraph, global_batch: int) -> int:
    """Tokens of a step of so many samples; the samples where they have none."""
    return global_batch * (graph.workload.sequence_length or 1)


def most_step_s(graph: StepGraph | JobGraph, global_batch: int | None, asked: TrainingOptions) -> float:
    """What a step may take for a training to end within its days; infinite where it may take any.

    Raises:
        UsageError: the samples of a step are not said.
    """
    if asked.days is None:
        return inf
    if global_batch is None:
        raise UsageError("--days: say how many samples a step has, on however many GPUs: give --global-batch")
    return asked.most_step_s(tokens_of(graph, global_batch))


def gpus_needed(
    graph: StepGraph | JobGraph,
    plan: Plan,
    system: System,
    scenario: Scenario,
    asked: TrainingOptions,
    progress: Progress = silent,
) -> Candidate:
    """The fewest GPUs on which a plan ends a training within its days, more replicas being all that changes.

    Args:
        graph: the step.
        plan: how the step is spread; `gpus` counts for nothing.
        system: where it runs.
        scenario: what is asked beyond that.
        asked: of the training.
        progress: told how far it is.

    Raises:
        UsageError: the samples of a step are not said, or the plan is one that a search does not take.
        PlanError: no number of GPUs is enough.
    """
    most = most_step_s(graph, plan.global_batch, asked)
    micro_batch = plan.micro_batch or graph.workload.batch_size
    counts, rest = divmod(plan.global_batch or 0, micro_batch)
    if rest:
        raise UsageError(f"--global-batch {plan.global_batch}: is no multiple of micro-batches of {micro_batch}")
    gpus = [plan.model_ranks * n for n in range(1, counts + 1) if counts % n == 0]
    fixed = {axis.name: (getattr(plan, axis.name),) for axis in AXES} | {"micro_batch": (micro_batch,)}
    more = {
        name: (value,) for name, value in plan.given.items() if name not in (*fixed, "cluster", "global_batch")
    }
    over: Mapping[str, Sequence[Any]] = {
        **fixed, **more, "gpus": tuple(n for n in gpus if n <= system.cluster.max_gpus)
    }  # fmt: skip
    base = Plan(cluster=plan.cluster, global_batch=plan.global_batch)
    found = search(
        graph, base, system, scenario, over=over, objective="gpus", most_step_s=most, top=1, front=False,
        progress=progress,
    )  # fmt: skip
    return found.best[0]


# -- the same work on other clusters --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCluster:
    """The best plan on one cluster, or why there is none.

    Attributes:
        cluster: its name.
        device: of its GPUs; "" where the cluster is not known so far.
        best: the plan; None where there is none.
        joules: that boards draw over a step; None where the device's power is not known.
        training: of a whole training, where it is asked for.
        why: there is no plan.
    """

    cluster: str
    device: str = ""
    best: Candidate | None = None
    joules: float | None = None
    training: Training | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The record in results."""
        return {
            "cluster": self.cluster,
            "device": self.device,
            "best": None if self.best is None else self.best.to_json(),
            "step_energy_J": self.joules,
            "training": None if self.training is None else self.training.to_json(),
            "error": self.why or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterComparison:
    """The best plan of each of several clusters.

    Attributes:
        model: name of the model.
        rows: the clusters, in the order in which they were asked for.
    """

    model: str
    rows: tuple[OnCluster, ...]

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim plan --compare-clusters --json`."""
        return {"model": self.model, "clusters": [row.to_json() for row in self.rows]}

    def __str__(self) -> str:
        """A row a cluster for people."""
        whole = any(row.training is not None for row in self.rows)
        titles = ["cluster", "GPUs", "step", "90 % interval", "tokens/s", "MFU", "in all", "boards"]
        titles += ["days", "GPU-hours", "price", "energy", "CO2"] if whole else []
        rows = [_shown(row, whole) for row in self.rows]
        said = [f"{self.model}: the best plan of each cluster", text_table([*titles, "plan"], rows)]
        if whole:
            pue = next(row.training.pue for row in self.rows if row.training is not None)
            said.append(f"  energy is of boards, with PUE {pue:g}, without hosts, switches and storage")
        return "\n".join(said)


def _shown(row: OnCluster, whole: bool) -> list[str]:
    best = row.best
    if best is None:
        return [row.cluster, *["-"] * (12 if whole else 7), row.why]
    low, high = (format_time(round(bound * 1e12)) for bound in best.interval_s)
    cells = [row.cluster, f"{best.gpus:,}", format_time(round(best.step_s * 1e12)), f"{low} to {high}"]
    cells += [
        format_count(best.tokens_per_s or best.samples_per_s),
        "-" if best.mfu is None else f"{best.mfu:.1%}",
    ]
    cells += [format_bytes(best.device_bytes), "-" if row.joules is None else format_count(row.joules, "J/step")]
    if whole:
        one = row.training
        assert one is not None
        cells += [
            f"{one.days:.4g}",
            format_count(one.gpu_hours),
            "-" if one.price is None else f"{one.price:,.0f}",
        ]
        cells.append("-" if one.energy_kwh is None else format_count(one.energy_kwh * 1000, "Wh"))
        cells.append("-" if one.co2_kg is None else f"{one.co2_kg / 1000:,.4g} t")
    return [*cells, in_words(best.plan, ("cluster", "global-batch", "gpus")) or "data-parallel"]


def compare_clusters(
    graph: StepGraph | JobGraph,
    plan: Plan,
    clusters: Sequence[str],
    options: SystemOptions | None = None,
    scenario: Scenario = _PLAIN,
    asked: TrainingOptions | None = None,
    **search_options: Any,
) -> ClusterComparison:
    """The best plan of each of several clusters, for the same work.

    Args:
        graph: the step.
        plan: what all plans have in common, as in `search`.
        clusters: presets or files.
        options: what is otherwise than their files say.
        scenario: what is asked beyond that.
        asked: of a whole training.
        search_options: what `search` takes besides.

    Raises:
        UnknownNameError: no such preset.
        UsageError: no clusters, or what no search takes.
    """
    if len(set(clusters)) < 2:
        raise UsageError("--compare-clusters: give several, as dgx-h100,dgx-b200")
    options, asked = options or SystemOptions(), asked or TrainingOptions()
    systems = {}
    for name in clusters:  # a misspelt one is told before the others are searched
        systems[name] = options.system(name)
    rows = []
    for name, system in systems.items():
        try:
            found = search(
                graph, replace(plan, cluster=name), system, scenario, **search_options | {"top": 1, "front": False}
            )
        except (PlanError, UsageError) as error:
            rows.append(OnCluster(cluster=name, device=system.cluster.device, why=str(error)))
            continue
        best = found.best[0] if found.best else None
        joules, whole = (None, None) if best is None else of_plan(graph, best.plan, system, scenario, asked)
        why = "" if best else "nothing was found in the time that there was"
        rows.append(
            OnCluster(
                cluster=name, device=system.cluster.device, best=best, joules=joules, training=whole, why=why
            )
        )
        if found.ended == "interrupt":
            raise KeyboardInterrupt
    return ClusterComparison(model=graph.workload.model or graph.name, rows=tuple(rows))


def of_plan(
    graph: StepGraph | JobGraph, plan: Plan, system: System, scenario: Scenario, asked: TrainingOptions
) -> tuple[float | None, Training | None]:
    """What the boards draw over a step of a plan, in joules, and what a whole training takes."""
    result, _ = predict(graph, plan, system, scenario, memory=False)
    return step_energy(result, system), training(result, system, asked)


# -- what fits ------------------------------------------------------------------------------------------------

MOST_SIZE, MOST_LAYERS = 2**24, 1_000
"""Nothing larger is tried; more layers than any model has, since memory is followed through each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest size that fits.

    Attributes:
        of: what has the size: "micro-batch", "layers" or "sequence".
        size: samples, layers or tokens; 0: not even what was captured fits.
        memory: of the fullest device at that size; None where nothing fits.
        tried_all: nothing larger was tried, though it may fit.
        why: there is no answer; "" where there is one.
    """

    of: str
    size: int = 0
    memory: Memory | None = None
    tried_all: bool = False
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The record in results."""
        needs = None if self.memory is None else self.memory.device_bytes
        return {
            "of": self.of,
            "size": self.size or None,
            "device_bytes": needs,
            "at_least": self.tried_all,
            "error": self.why or None,
        }

    def __str__(self) -> str:
        """One line for people."""
        if self.memory is None:
            return f"  largest       {self.of}: {self.why}"
        memory = self.memory
        of = f"{format_bytes(memory.device_bytes)} of {format_bytes(memory.capacity_bytes)}"
        more = ", nothing larger was tried" * self.tried_all
        return f"  largest       {self.of} {self.size:,} ({of}{more})"


def what_fits(
    graph: StepGraph,
    plan: Plan,
    system: System,
    capture: Callable[[int], StepGraph] | None = None,
    progress: Progress = silent,
) -> tuple[Largest, ...]:
    """The largest micro-batch, the deepest model, and the longest sequence that fit under a plan.

    Each is alone larger than in the graph. Sizes are doubled until one does not fit, and the answer looked for
    between the last two: more samples, layers or tokens need more memory.

    Args:
        graph: the step.
        plan: how it is spread.
        system: where it runs.
        capture: makes the step with a sequence of so many tokens; without it sequences are not tried.
        progress: told what is tried.
    """
    plan, workload = replace(plan, global_batch=None, dp=None), graph.workload
    # A pipeline of chunks takes micro-batches in rounds; one a stage is the least there is.
    layers = len(layer_names(graph))

    def memory_of(step: StepGraph, plan: Plan = plan) -> Memory | None:
        job = lower(step, plan, system.cluster)
        runtime = runtime_of(plan.stack or job.workload.stack, system.architecture)
        return largest_memory(job, system.cluster.memory_bytes, runtime)

    found = [
        _largest("micro-batch", 1, lambda n: memory_of(graph, replace(plan, micro_batch=n)), MOST_SIZE, progress),
        _largest("layers", layers, lambda n: memory_of(Depth(layers=n)(graph)), MOST_LAYERS, progress),
    ]
    if capture is not None:
        tokens = workload.sequence_length
        found.append(_largest("sequence", tokens, lambda n: memory_of(capture(n)), MOST_SIZE, progress, tokens))
    return tuple(found)


def longer(graph: StepGraph, model: str) -> Callable[[int], StepGraph]:
    """Makes the step of a graph with a sequence of so many tokens, for `what_fits`.

    Args:
        graph: the step.
        model: what it was compiled of, as of `compile`.

    Raises:
        UsageError: at the graph's own length the model is another step.
    """
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.workflow.compile import compile

    workload = graph.workload
    of_graph: dict[str, Any] = {"dtype": workload.dtype.name.lower()}
    spec = StepSpec(**of_graph)

    def capture(tokens: int) -> StepGraph:
        return compile(model, spec, batch_size=workload.batch_size, seq_len=tokens)

    own = capture(workload.sequence_length)
    its, said = ((s.workload.model_flops, s.unfolded_ops) for s in (own, graph))
    if its != said:
        raise UsageError(
            f"--model {model}: at {workload.sequence_length:,} tokens it is another step than the graph's "
            f"({its[1]:,} operations, {said[1]:,} there): give the model that the graph was compiled of"
        )
    return capture


def _largest(
    of: str, least: int, needs: Callable[[int], Memory | None], most: int, progress: Progress, step: int = 1
) -> Largest:
    """The largest size that fits, a multiple of `step` beyond `least`; `most` at most."""
    needed: dict[int, Memory] = {}

    def fits(size: int) -> bool:
        progress(f"trying {of} {size:,}")
        memory = needs(size)
        if memory is not None:
            needed[size] = memory
        return memory is not None and memory.fits

    try:
        if not fits(least):
            return Largest(of=of, why=f"{least:,} do not fit")
        low, most = least, most - (most - least) % step
        while low < most and fits(high := min(2 * low, most)):
            low = high
        if low >= most:
            return Largest(of=of, size=low, memory=needed[low], tried_all=True)
        while high - low > step:
            size = _between(low, high, needed, step)
            low, high = (size, high) if fits(size) else (low, size)
    except EchoError as error:
        return Largest(of=of, why=str(error))
    return Largest(of=of, size=low, memory=needed[low])


def _between(low: int, high: int, needed: dict[int, Memory], step: int) -> int:
    """The size to try between one that fits and one that does not.

    Memory grows nearly along a line with each size, so that where the line through both meets the capacity is the
    answer or next to it. Every third try halves the interval instead, should it bend.
    """
    steps = (high - low) // step
    at = steps // 2
    if len(needed) % 3 and high in needed:
        least, most = (needed[size].device_bytes for size in (low, high))
        at = steps * (needed[low].capacity_bytes - least) // (most - least)
    return low + min(max(at, 1), steps - 1) * step
