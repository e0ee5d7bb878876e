"""Where rooms meet: a model to a step graph, a step graph to an annotated job, a job to a prediction."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from echograph.cli.lowering import lower, record
from echograph.cli.plan import Plan, PlanOptions
from echograph.cli.replay import is_traced, replay_plan
from echograph.cli.study import Study
from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.progress import Progress, silent
from echograph.simulator.clusters import load_cluster
from echograph.simulator.flows import links_of
from echograph.simulator.goodput import goodput
from echograph.simulator.host import Host
from echograph.units import to_ps, to_s

if TYPE_CHECKING:
    from echograph.frontend.pytorch.step import StepSpec
    from echograph.models import ModelEntry
    from echograph.profiler.costs import DeviceProfile
    from echograph.simulator.result import Result


def compile_model(
    model: str,
    spec: StepSpec,
    *,
    batch_size: int | None,
    seq_len: int | None,
    attention: str | None,
    producer: str = "recorder",
    say: Progress = silent,
) -> StepGraph:
    """Captures and folds one training step of a zoo model, a Hugging Face configuration or `file.py:function`."""
    from echograph.frontend.pytorch.capture import capture_mode

    with capture_mode():
        name, built = build_model(
            model, spec, batch_size=batch_size, seq_len=seq_len, attention=attention, say=say
        )
    return _compile(name, built, spec, producer, say)


def build_model(
    model: str,
    spec: StepSpec,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
    say: Progress = silent,
) -> tuple[str, tuple[Any, Any, Any]]:
    """A model's name, and its module, inputs and loss: fake tensors under `capture_mode`, real ones elsewhere."""
    _quiet_libraries()
    say(f"building {model}")
    if model.rpartition(":")[0].endswith(".py"):
        from echograph.frontend.pytorch.userfile import build_from_file

        if any(option is not None for option in (batch_size, seq_len, attention)):
            raise UsageError(
                "--batch-size, --seq-len and --attention belong to zoo models: set them in your function"
            )
        return model.rpartition(":")[2], build_from_file(model)
    from echograph.models import from_config, get_model

    is_config = model.endswith(".json") or os.path.isdir(model)  # noqa: PTH112 - a name may be no possible path
    entry = from_config(Path(model)) if is_config else get_model(model)
    return entry.name, _build_entry(entry, spec, batch_size=batch_size, seq_len=seq_len, attention=attention)


def compile_entry(
    entry: ModelEntry,
    spec: StepSpec,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
    producer: str = "recorder",
    say: Progress = silent,
) -> StepGraph:
    """Captures and folds one training step of a model of the zoo."""
    from echograph.frontend.pytorch.capture import capture_mode

    say(f"building {entry.name}")
    with capture_mode():
        built = _build_entry(entry, spec, batch_size=batch_size, seq_len=seq_len, attention=attention)
    return _compile(entry.name, built, spec, producer, say)


def _build_entry(entry: ModelEntry, spec: StepSpec, **sizes: Any) -> tuple[Any, Any, Any]:
    import torch

    from echograph.models import build

    before = torch.get_default_dtype()
    # A module of fake tensors cannot be converted afterwards, so it is made in the step's type.
    torch.set_default_dtype(spec.torch_dtype)
    try:
        with _one_line_errors(entry.name):
            return build(entry, **sizes)
    finally:
        torch.set_default_dtype(before)


def _compile(name: str, built: tuple[Any, Any, Any], spec: StepSpec, producer: str, say: Progress) -> StepGraph:
    from echograph.frontend.pytorch.capture import capture
    from echograph.frontend.pytorch.lower import lower
    from echograph.ir.passes.fold import fold

    with _one_line_errors(name):
        say(f"capturing one training step of {name}")
        captured = capture(*built, spec, producer=producer)
        say("lowering")
        graph = lower(captured, spec, name=name)
    say("folding repeated blocks")
    return fold(graph)


def _quiet_libraries() -> None:
    # What goes wrong is said once: these libraries log it before they raise it, one as set when it is imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """What no operator can hold is said in our words, whichever library notices it."""
    try:
        yield
    except OverflowError:
        raise UsageError(
            f"model {name}: sizes or FLOPs are beyond 64-bit integers: make the batch or the samples smaller"
        ) from None


def lower_graph(graph: StepGraph | JobGraph, plan: Plan) -> JobGraph:
    """The job that a graph becomes under a plan; a job graph is taken as it is."""
    from echograph.cli.measured import cluster_of

    return lower(graph, plan, cluster_of(plan.cluster))


def predict(
    graph: StepGraph | JobGraph, *, engine: str = "auto", **options: Unpack[PlanOptions]
) -> tuple[Result, JobGraph]:
    """Lowers a graph to a job on a cluster, annotates it and simulates it.

    Args:
        graph: a step graph, spread by the plan, or a job graph, run as it is.
        engine: "auto" or an engine's name.
        options: the fields of `plan.Plan`; none: one node, data-parallel.
    """
    return predict_plan(graph, Plan(**options), engine=engine)


def predict_plan(
    graph: StepGraph | JobGraph,
    plan: Plan,
    *,
    engine: str = "auto",
    study: Study | None = None,
    memory: bool = True,
) -> tuple[Result, JobGraph]:
    """`predict` for a plan that is made already, with what is asked beyond it, and without memory if so asked."""
    from echograph.profiler.costs import load_device
    from echograph.profiler.costs.estimate import estimate
    from echograph.simulator.simulate import simulate

    study = study or Study()
    if isinstance(graph, JobGraph) and is_traced(graph):
        return replay_plan(graph, plan, study)
    if plan.cluster.endswith(".pb"):
        from echograph.cli.measured import predict_measured

        return predict_measured(graph, plan, engine=engine, study=study, memory=memory)
    where = load_cluster(plan.cluster, study.settings).with_degraded(study.degraded)
    device = load_device(where.device)
    # A cluster may name the file of a device; durations carry the name that stands in it.
    where = replace(where, device=device.name)
    job = lower(graph, plan, where)
    for entry in study.degraded:
        links_of(job, where).find(entry.where)
    job = estimate(job, device)(job)
    host = host_of(device, waits=study.host_waits, blocking=study.launch_blocking)
    peak = _peak(job, device)
    result = simulate(
        job,
        where,
        host,
        peak_flops_per_s=peak,
        engine=engine,
        ranks=study.ranks(where.gpus_per_node),
        network=study.network,
        trace_ranks=study.trace_ranks,
        scales=study.scales,
        plan=record(job, plan, where),
        memory=memory,
    )
    if study.reliability is not None:
        nodes = -(-job.world_size // where.gpus_per_node)
        result = replace(result, goodput=goodput(to_s(result.step_ps), nodes, study.reliability))
    return result, job


def host_of(device: DeviceProfile, *, waits: bool = False, blocking: bool = False) -> Host:
    """The host that feeds a device, and what it waits for (`Host`)."""
    from echograph.cli.annotate_profile import host_name

    model = device.host
    communication = None if model.communication_s is None else to_ps(model.communication_s)
    return Host(
        op_ps=to_ps(model.op_s),
        launch_ps=to_ps(model.kernel_s),
        communication_ps=communication,
        spread=host_spread(),
        waits=waits,
        blocking=blocking,
        name=host_name(device.name),
    )


def host_spread() -> float:
    """Relative standard error of the host's times."""
    from echograph.profiler.costs.host import SPREAD

    return SPREAD


def _peak(job: JobGraph, device: DeviceProfile) -> float:
    """FLOP/s of the device in the step's type; 0 where it has none."""
    from echograph.profiler.costs.estimate import DTYPE_NAMES
    from echograph.profiler.costs.gemm import STAND_IN

    peaks, name = device.datasheet.peak_flops_per_s, DTYPE_NAMES.get(job.workload.dtype, "fp32")
    return peaks.get(name) or peaks.get(STAND_IN.get(name, name), 0.0)
