"""The parallel plan that a user asks for, and the job that a graph becomes under it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fully_shard import FullyShard
from echograph.simulator.clusters import Cluster

ZERO_STAGES = (0, 3)


class PlanOptions(TypedDict, total=False):
    """The fields of a plan, for functions that take them as keywords."""

    gpus: int | None
    global_batch: int | None
    zero: int
    hsdp_replicas: int
    tp: int
    sequence_parallel: bool
    pp: int
    vpp: int
    schedule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a step is spread over a cluster; the words of the command line.

    Attributes:
        gpus: number of ranks; None: one node, or what a job graph has.
        global_batch: samples of one step over all ranks; None: one micro-batch a data-parallel rank, or as many as
            the pipeline has stages.
        zero: 0 replicates the model (DDP); 3 shards parameters, gradients and optimizer state (FSDP2).
        hsdp_replicas: copies of the sharded model (HSDP); with zero 3 only.
        tp: ranks that share each layer (tensor parallelism).
        sequence_parallel: they share the sequence between the products, too.
        pp: pipeline stages.
        vpp: chunks of layers on each stage (interleaving).
        schedule: a name of `pipeline_schedules.SCHEDULES`; "": interleaved with several chunks, else 1f1b.
    """

    gpus: int | None = None
    global_batch: int | None = None
    zero: int = 0
    hsdp_replicas: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vpp: int = 1
    schedule: str = ""

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise UsageError(f"--tp {self.tp}: at least one rank holds each layer")
        if self.pp < 1 or self.vpp < 1:
            raise UsageError(f"--pp {self.pp} --vpp {self.vpp}: at least one stage, with one chunk")
        if (self.vpp > 1 or self.schedule) and self.pp == 1:
            raise UsageError("--vpp and --schedule: belong to a pipeline, give --pp as well")
        if self.zero and self.pp > 1:
            raise UsageError(
                f"--zero {self.zero} with --pp {self.pp}: a pipeline's stages are replicated, not sharded"
            )
        if self.sequence_parallel and self.tp == 1:
            raise UsageError(
                "--sequence-parallel: shares the sequence among tensor-parallel ranks, give --tp as well"
            )
        if self.zero not in ZERO_STAGES:
            raise UsageError(f"--zero {self.zero}: choose 0 (DDP) or 3 (fully sharded)")
        if self.hsdp_replicas != 1 and self.zero != 3:
            raise UsageError("--hsdp-replicas: copies of a sharded model need --zero 3")

    def lower(self, graph: StepGraph | JobGraph, cluster: Cluster) -> JobGraph:
        """The job that a graph is on a cluster; a job graph is taken as it is.

        Raises:
            UsageError: a number of GPUs that the cluster does not have, a batch or a number of copies that does
                not divide, or options for a job graph that has its plan already.
        """
        if self.gpus is not None and not 1 <= self.gpus <= cluster.max_gpus:
            raise UsageError(f"--gpus {self.gpus}: cluster {cluster.name} has 1 to {cluster.max_gpus} GPUs")
        if isinstance(graph, JobGraph):
            if self.gpus not in (None, graph.world_size):
                asked = f"--gpus {self.gpus}: the job graph is for {graph.world_size}"
                raise UsageError(f"{asked}; give its step graph instead")
            if replace(self, gpus=None) != Plan():
                raise UsageError(
                    "a job graph has its plan and batch already: give such options with its step graph"
                )
            return graph
        model = self.tp * self.pp
        gpus = self.gpus or max(cluster.gpus_per_node, model)
        if gpus % model:
            below = max(1, gpus // model) * model
            raise UsageError(
                f"--tp {self.tp} --pp {self.pp}: {gpus} GPUs do not divide; {below} or {below + model} would"
            )
        if self.tp > 1:
            graph = self._tensor_parallel(graph)
        replicas = gpus // model
        micro_batches = _micro_batches(graph, replicas, self.global_batch) or self.pp
        if self.pp > 1:
            return DataParallel(replicas=replicas)(self._pipeline(graph, micro_batches))
        if self.zero == 0:
            return DataParallel(replicas=replicas, micro_batches=micro_batches)(graph)
        if self.hsdp_replicas < 1 or replicas % self.hsdp_replicas:
            copies = f"--hsdp-replicas {self.hsdp_replicas}"
            raise UsageError(f"{copies}: {replicas} data-parallel ranks do not divide into so many copies")
        shard = replicas // self.hsdp_replicas
        return FullyShard(replicas=replicas, shard=shard, micro_batches=micro_batches)(graph)

    def _pipeline(self, graph: StepGraph, micro_batches: int) -> JobGraph:
        from echograph.ir.passes.pipeline import Pipeline

        schedule = self.schedule or ("interleaved" if self.vpp > 1 else "1f1b")
        return Pipeline(stages=self.pp, micro_batches=micro_batches, schedule=schedule, chunks=self.vpp)(graph)

    def _tensor_parallel(self, graph: StepGraph) -> StepGraph:
        from echograph.ir.passes.tensor_parallel import TensorParallel

        return TensorParallel(size=self.tp, sequence_parallel=self.sequence_parallel)(graph)

    def notes(self, graph: StepGraph | JobGraph) -> tuple[str, ...]:
        """What the plan could not spread, and is computed by every rank."""
        if self.tp == 1 or isinstance(graph, JobGraph):
            return ()
        from echograph.ir.passes.tensor_parallel import TensorParallel

        lines = TensorParallel(size=self.tp, sequence_parallel=self.sequence_parallel).report(graph)
        # Gathering the sequence before a product is what sequence parallelism does, not something it failed to.
        return tuple(line for line in lines if not (self.sequence_parallel and ": gathers " in line))

    def record(self, job: JobGraph, cluster: Cluster) -> dict[str, Any]:
        """The plan with its defaults filled in, for results."""
        return {
            "gpus": job.world_size,
            "cluster": cluster.name,
            "zero": self.zero,
            "hsdp_replicas": self.hsdp_replicas,
            "sequence_parallel": self.sequence_parallel,
            "vpp": self.vpp,
            "micro_batch": job.workload.batch_size,
            **{axis.name: axis.size for axis in job.mesh},
        }


def _micro_batches(graph: StepGraph, ranks: int, global_batch: int | None) -> int | None:
    """Micro-batches of each data-parallel rank; None where no batch is given.

    Raises:
        UsageError: the global batch is no multiple of what all ranks take at once; names the nearest that are.
    """
    if global_batch is None:
        return None
    at_once = ranks * graph.workload.batch_size
    if not at_once:
        raise UsageError("--global-batch: the graph does not say how many samples its micro-batch has")
    if global_batch < 1 or global_batch % at_once:
        below = max(1, global_batch // at_once) * at_once
        raise UsageError(
            f"--global-batch {global_batch}: {ranks} data-parallel ranks with micro-batches of "
            f"{graph.workload.batch_size} take multiples of {at_once}, such as {below} or {below + at_once}"
        )
    return global_batch // at_once
