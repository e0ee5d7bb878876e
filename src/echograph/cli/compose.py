"""Where rooms meet: a model to a step graph, a step graph to an annotated job, a job to a prediction."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import EchoError, UsageError
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.host import Host
from echograph.units import to_ps

if TYPE_CHECKING:
    from echograph.frontend.pytorch.step import StepSpec
    from echograph.models import ModelEntry
    from echograph.simulator.result import Result

Say = Callable[[str], None]


def compile_model(
    model: str,
    spec: StepSpec,
    *,
    batch_size: int | None,
    seq_len: int | None,
    attention: str | None,
    producer: str = "recorder",
    say: Say = lambda _: None,
) -> StepGraph:
    """Captures and folds one training step of a zoo model, a Hugging Face configuration or `file.py:function`."""
    _quiet_libraries()
    if model.rpartition(":")[0].endswith(".py"):
        return _compile_user_model(model, spec, (batch_size, seq_len, attention), producer, say)
    from echograph.models import from_config, get_model

    is_config = model.endswith(".json") or os.path.isdir(model)  # noqa: PTH112 - a name may be no possible path
    entry = from_config(Path(model)) if is_config else get_model(model)
    return compile_entry(
        entry, spec, batch_size=batch_size, seq_len=seq_len, attention=attention, producer=producer, say=say
    )


def compile_entry(
    entry: ModelEntry,
    spec: StepSpec,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
    producer: str = "recorder",
    say: Say = lambda _: None,
) -> StepGraph:
    """Captures and folds one training step of a model of the zoo."""
    import torch

    from echograph.frontend.pytorch.capture import capture_mode
    from echograph.models import build

    say(f"building {entry.name}")
    before = torch.get_default_dtype()
    with _one_line_errors(entry.name), capture_mode():
        # A module of fake tensors cannot be converted afterwards, so it is made in the step's type.
        torch.set_default_dtype(spec.torch_dtype)
        try:
            built = build(entry, batch_size=batch_size, seq_len=seq_len, attention=attention)
        finally:
            torch.set_default_dtype(before)
    return _compile(entry.name, built, spec, producer, say)


def _compile_user_model(
    model: str, spec: StepSpec, zoo_options: tuple[object, ...], producer: str, say: Say
) -> StepGraph:
    from echograph.frontend.pytorch.capture import capture_mode
    from echograph.frontend.pytorch.userfile import build_from_file

    if any(option is not None for option in zoo_options):
        raise UsageError("--batch-size, --seq-len and --attention belong to zoo models: set them in your function")
    say(f"building {model}")
    with capture_mode():
        built = build_from_file(model)
    return _compile(model.rpartition(":")[2], built, spec, producer, say)


def _compile(name: str, built: tuple[Any, Any, Any], spec: StepSpec, producer: str, say: Say) -> StepGraph:
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


def predict(
    graph: StepGraph | JobGraph,
    *,
    cluster: str,
    gpus: int | None,
    global_batch: int | None = None,
    engine: str = "auto",
) -> tuple[Result, JobGraph]:
    """Lowers a graph to a job on a cluster, annotates it and simulates it.

    Args:
        graph: a step graph, replicated over the GPUs, or a job graph, run as it is.
        cluster: a preset's name or a TOML file.
        gpus: number of ranks; None takes one node, or what a job graph has.
        global_batch: samples of one step over all ranks; None: one micro-batch a rank.
        engine: "auto" or an engine's name.
    """
    from echograph.profiler.costs import load_device
    from echograph.profiler.costs.estimate import estimate
    from echograph.simulator.simulate import simulate

    where = load_cluster(cluster)
    device = load_device(where.device)
    # A cluster may name the file of a device; durations carry the name that stands in it.
    where = replace(where, device=device.name)
    job = lower_to_job(graph, where, gpus, global_batch)
    job = estimate(job, device)(job)
    host = Host(op_ps=to_ps(device.host.op_s), launch_ps=to_ps(device.host.launch_s), spread=host_spread())
    peak = device.datasheet.peak_flops_per_s.get(_peak_name(job), 0.0)
    plan: dict[str, Any] = {"gpus": job.world_size, "cluster": where.name}
    plan |= {axis.name: axis.size for axis in job.mesh}
    plan |= {
        "micro_batch": job.workload.batch_size,
        "global_batch": global_batch or job.workload.batch_size * job.world_size,
    }
    return simulate(job, where, host, peak_flops_per_s=peak, engine=engine, plan=plan), job


def lower_to_job(graph: Graph, cluster: Cluster, gpus: int | None, global_batch: int | None = None) -> JobGraph:
    """The job that a graph is on a cluster.

    Raises:
        UsageError: a number of GPUs that the cluster does not have, or that a job graph was not made for; a
            global batch that does not divide.
    """
    if gpus is not None and not 1 <= gpus <= cluster.max_gpus:
        raise UsageError(f"--gpus {gpus}: cluster {cluster.name} has 1 to {cluster.max_gpus} GPUs")
    if isinstance(graph, JobGraph):
        if global_batch is not None:
            raise UsageError("--global-batch: a job graph has its batch already; give its step graph instead")
        if gpus not in (None, graph.world_size):
            raise UsageError(
                f"--gpus {gpus}: the job graph is for {graph.world_size}; give its step graph instead"
            )
        return graph
    if not isinstance(graph, StepGraph):
        raise EchoError("neither a step graph nor a job graph")
    replicas = gpus or cluster.gpus_per_node
    return DataParallel(replicas=replicas, micro_batches=_micro_batches(graph, replicas, global_batch))(graph)


def _micro_batches(graph: StepGraph, replicas: int, global_batch: int | None) -> int:
    """Micro-batches of each rank.

    Raises:
        UsageError: the global batch is no multiple of what all ranks take at once; names the nearest that are.
    """
    if global_batch is None:
        return 1
    at_once = replicas * graph.workload.batch_size
    if not at_once:
        raise UsageError("--global-batch: the graph does not say how many samples its micro-batch has")
    if global_batch < 1 or global_batch % at_once:
        below = max(1, global_batch // at_once) * at_once
        raise UsageError(
            f"--global-batch {global_batch}: {replicas} GPUs with micro-batches of {graph.workload.batch_size} "
            f"take multiples of {at_once}, such as {below} or {below + at_once}"
        )
    return global_batch // at_once


def host_spread() -> float:
    """Relative standard error of the host's times."""
    from echograph.profiler.costs.host import SPREAD

    return SPREAD


def _peak_name(job: JobGraph) -> str:
    from echograph.profiler.costs.estimate import DTYPE_NAMES

    name = DTYPE_NAMES.get(job.workload.dtype, "fp32")
    return "bf16" if name == "fp16" else name
