"""The parallel plan that a user asks for, in the same words on the command line, in plan files and in results.

`passes` says what it means: the passes that `echoc lower` and `echosim run` put a step graph through, in order.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np

from echograph.errors import InputError, UnknownNameError, UsageError
from echograph.ir.graph import Graph, JobGraph, StepGraph, Workload
from echograph.ir.passes import PASSES
from echograph.ir.passes.base import Note, Pass, run, split_at_job
from echograph.ir.passes.kernels import PADDED, SUFFIX
from echograph.ir.passes.pipeline.schedules import TURNING
from echograph.ir.types import Attention, DType, Gemm
from echograph.models.stacks import Stack, load_stack, stack_names
from echograph.options import field_types, given, option, option_name

if TYPE_CHECKING:
    from echograph.profiler.costs import DeviceProfile
    from echograph.simulator.clusters import Cluster

G = TypeVar("G", bound=Graph)
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
RecomputeName = Literal["none", "selective", "selective-op", "full"]
LossName = Literal["eager", "fused"]
TpOverlapName = Literal["none", "bulk", "chunks"]
PrecisionName = Literal["bf16", "fp16", "fp32", "tf32", "fp8", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"]
GradDType = Literal["bf16", "fp16", "fp32"]
CpMethod = Literal["ring", "all-to-all"]
DispatcherName = Literal["alltoall", "deepep", "hybridep"]
AXES = ("tp", "cp", "ep", "dp", "pp")
"""Mesh axes in Megatron's order: neighbours first."""
ZERO_STAGES = (0, 1, 2, 3)
MAX_BYTES = 64 * 1024
MOST_APART = 3
"""Stages of which none stands for another: the first and the last do not, and one is left."""
"""Of a plan file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a step is spread over a cluster. The text of each field is its help on the command line.

    Raises:
        UsageError: a value that no plan can have, or two that exclude each other.
    """

    gpus: int | None = option(None, "Number of GPUs.", "one node, or as many as the plan needs")
    cluster: str = option("dgx-h100", "A preset (see echosim clusters), a TOML file, or an echoprof profile.pb.")
    tp: int = option(1, "Tensor-parallel ranks, which share each layer.")
    sequence_parallel: bool = option(False, "They share the sequence between the products as well.")
    tp_comm_overlap: str = option(
        "",
        "Gathers and scatters of tensor-parallel ranks beside products: none; bulk: those of backward beside "
        "gradients of inputs and weights (Megatron-LM); chunks: the others in parts with their own products, too "
        "(Transformer Engine's userbuffers, PyTorch's async tensor parallelism).",
        "as the stack does; none",
    )
    tp_plan: str = option(
        "", "TOML file of module patterns and how they are shared.", "the model's own, or by structure"
    )
    cp: int = option(1, "Context-parallel ranks, which share the sequence.")
    cp_method: str = option("ring", f"Attention over shared sequences: {', '.join(get_args(CpMethod))}.")
    ep: int = option(1, "Expert-parallel ranks, which share the experts of a layer.")
    etp: int | None = option(
        None,
        "Tensor-parallel ranks that cut each expert: all, or 1, so that they are expert-parallel ranks, too.",
        "as the stack does; as --tp",
    )
    capacity_factor: float | None = option(
        None, "Rows that an expert takes, in units of its even share; the rest is dropped.", "no limit"
    )
    moe_dispatcher: str = option(
        "",
        f"How rows get to experts: {', '.join(get_args(DispatcherName))}; the latter send a token once to a node.",
        "as the stack does; alltoall",
    )
    expert_imbalance: float = option(1.0, "Rows of the busiest rank's experts in units of the mean (assumed).")
    pp: int = option(1, "Pipeline stages.")
    vpp: int = option(1, "Chunks of layers on each stage (interleaving).")
    schedule: str = option("", f"{', '.join(get_args(ScheduleName))}.", "interleaved with --vpp, else 1f1b")
    stage_layers: str = option("", "Layers of each chunk in the model's order, as 10,12,12,10.", "even")
    dp: int | None = option(None, "Data-parallel ranks, experts' included.", "what the GPUs leave")
    zero: int = option(0, "0: DDP; 1: optimizer states sharded; 2: gradients, too; 3: parameters, too (FSDP).")
    hsdp_replicas: int = option(1, "Copies of the sharded model (HSDP), with --zero 3.")
    distributed_optimizer_instances: int = option(
        1, "Groups of ranks that each divide the optimizer among themselves, with --zero 1."
    )
    reshard_after_forward: bool | None = option(
        None, "Drop gathered parameters after forward, with --zero 3.", "yes; no in a pipeline"
    )
    overlap_grad_reduce: bool | None = option(
        None, "Reduce gradients while backward goes on.", "as the stack does; yes"
    )
    overlap_param_gather: bool | None = option(
        None, "Gather parameters while the next forward goes on, with --zero 1 and 2.", "as the stack does; no"
    )
    overlap_moe_expert_parallel_comm: bool = option(
        False, "Exchange rows of experts in pairs of a forward and a backward pass, while the other computes."
    )
    micro_batch: int | None = option(None, "Samples of a micro-batch.", "as the graph was compiled")
    global_batch: int | None = option(
        None, "Samples of one step over all GPUs.", "one micro-batch a data-parallel rank and stage"
    )
    recompute: str = option(
        "none",
        f"Activations computed again in backward: {', '.join(get_args(RecomputeName))}, "
        "or N: all of every Nth layer.",
    )
    recompute_early_stop: bool | None = option(
        None,
        "Recompute only until backward has what it needs, as PyTorch does; Megatron-LM runs all of it.",
        "as the stack does; yes, no with selective",
    )
    loss: str = option(
        "",
        "Cross-entropy: eager, or fused, which writes no probabilities (torch.compile, Liger Kernel).",
        "as the stack does; eager",
    )
    stack: str = option(
        "", f"Software that trains, whose kernels run: {', '.join(stack_names())}.", "as the graph was captured"
    )
    precision: str = option("", f"{', '.join(get_args(PrecisionName))}.", "as the graph was compiled")
    grad_dtype: str = option(
        "", f"Type in which gradients add up: {', '.join(get_args(GradDType))}.", "as the stack does; their own"
    )
    mesh_order: str = option("-".join(AXES), "Axes of the mesh, neighbours first.")
    passes: str = option("", "The passes themselves, as 'fuse data_parallel{replicas=8}'.", "those of the options")

    def __post_init__(self) -> None:
        for check in (_check_sizes, _check_words, _check_pairs):
            check(self)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model and work on one micro-batch."""
        return self.tp * self.cp * self.pp

    @property
    def experts_across(self) -> tuple[str, ...]:
        """Axes whose ranks share the experts as those of "ep" do, as Megatron-Core folds them."""
        over_tp = self.etp == 1 < self.tp
        over_cp = self.cp > 1 and self.ep % (self.cp * (self.tp if over_tp else 1)) == 0
        return ("cp",) * over_cp + ("tp",) * over_tp

    @property
    def expert_ranks(self) -> int:
        """Data-parallel ranks that share the experts of a layer."""
        sizes = {"cp": self.cp, "tp": self.tp}
        return self.ep // prod(sizes[axis] for axis in self.experts_across)

    @property
    def given(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return given(self)


def _check_sizes(plan: Plan) -> None:
    for name in (
        "tp",
        "cp",
        "ep",
        "etp",
        "pp",
        "vpp",
        "hsdp_replicas",
        "distributed_optimizer_instances",
        "dp",
        "micro_batch",
        "gpus",
        "global_batch",
    ):
        value = getattr(plan, name)
        if value is not None and value < 1:
            raise UsageError(f"{option_name(name)} {value}: give 1 or more")
    if not 1 <= plan.expert_imbalance < inf:
        raise UsageError(
            f"--expert-imbalance {plan.expert_imbalance:g}: the busiest rank has at least the mean, 1"
        )
    if plan.capacity_factor is not None and not 0 < plan.capacity_factor < inf:
        raise UsageError(f"--capacity-factor {plan.capacity_factor:g}: give more than 0")
    if plan.zero not in ZERO_STAGES:
        raise UsageError(f"--zero {plan.zero}: choose {', '.join(map(str, ZERO_STAGES))}")
    if plan.recompute.isdigit() and int(plan.recompute) < 1:
        raise UsageError("--recompute 0: give none, or 1 for every layer")


_WORDS: Mapping[str, tuple[str, ...]] = {
    "schedule": ("", *get_args(ScheduleName)),
    "cp_method": get_args(CpMethod),
    "stack": ("", *stack_names()),
    "loss": ("", *get_args(LossName)),
    "tp_comm_overlap": ("", *get_args(TpOverlapName)),
    "moe_dispatcher": ("", *get_args(DispatcherName)),
    "precision": ("", *get_args(PrecisionName)),
    "grad_dtype": ("", *get_args(GradDType)),
    "recompute": get_args(RecomputeName),
}


def _check_words(plan: Plan) -> None:
    for name, choices in _WORDS.items():
        value = getattr(plan, name)
        if value not in choices and not (name == "recompute" and value.isdigit()):
            known = ", ".join(c for c in choices if c)
            raise UsageError(f"{option_name(name)} {value[:40]}: choose {known}")
    if sorted(plan.mesh_order.split("-")) != sorted(AXES):
        raise UsageError(
            f"--mesh-order {plan.mesh_order[:40]}: give each of {', '.join(AXES)} once, as {'-'.join(AXES)}"
        )


_PAIRS: tuple[tuple[Callable[[Plan], object], str], ...] = (
    (
        lambda plan: plan.pp == 1 and plan.vpp > 1,
        "--vpp {0.vpp}: chunks are of pipeline stages: give --pp 2 or more, or leave it out",
    ),
    (
        lambda plan: plan.pp == 1 and plan.schedule,
        "--schedule: orders a pipeline: give --pp 2 or more, or leave it out",
    ),
    (
        lambda plan: plan.pp == 1 and plan.stage_layers,
        "--stage-layers: splits a pipeline: give --pp 2 or more, or leave it out",
    ),
    (
        lambda plan: plan.vpp > 1 and plan.schedule not in ("", "interleaved", *TURNING),
        "--vpp {0.vpp} with --schedule {0.schedule}: use interleaved for chunks, or --vpp 1",
    ),
    (
        lambda plan: plan.schedule in TURNING and plan.vpp != 2 and plan.pp > 1,
        "--schedule {0.schedule} with --vpp {0.vpp}: stages have two chunks each, give --vpp 2",
    ),
    (
        lambda plan: plan.schedule == "interleaved" and plan.vpp == 1 and plan.pp > 1,
        "--schedule interleaved with --pp {0.pp}: give --vpp 2 or more, or --schedule 1f1b",
    ),
    (
        lambda plan: plan.sequence_parallel and plan.tp == 1,
        "--sequence-parallel: shares the sequence among tensor-parallel ranks, give --tp 2 or more",
    ),
    (
        lambda plan: plan.etp not in (None, 1, plan.tp),
        "--etp {0.etp}: experts are cut by all tensor-parallel ranks or by none: give {0.tp} or 1",
    ),
    (
        lambda plan: plan.etp == 1 < plan.tp and not (plan.sequence_parallel and plan.ep % plan.tp == 0),
        "--etp 1 with --tp {0.tp}: ranks of --ep, a multiple of it, which needs --sequence-parallel",
    ),
    (
        lambda plan: plan.tp_plan and plan.tp == 1,
        "--tp-plan: says what tensor-parallel ranks share, give --tp 2 or more",
    ),
    (
        lambda plan: plan.hsdp_replicas != 1 and plan.zero != 3,
        "--hsdp-replicas: copies of a sharded model need --zero 3",
    ),
    (
        lambda plan: plan.distributed_optimizer_instances != 1 and plan.zero != 1,
        "--distributed-optimizer-instances: groups that divide the optimizer need --zero 1",
    ),
    (
        lambda plan: plan.reshard_after_forward is not None and plan.zero != 3,
        "--reshard-after-forward: is of gathered parameters, give --zero 3",
    ),
    (
        lambda plan: plan.overlap_moe_expert_parallel_comm and (plan.vpp == 1 or plan.schedule == "zb-v"),
        "--overlap-moe-expert-parallel-comm: pairs the passes of interleaved chunks, or of --schedule dualpipe-v: "
        "give --vpp 2 or more",
    ),
    (
        lambda plan: plan.overlap_param_gather and plan.zero not in (1, 2),
        "--overlap-param-gather: is of --zero 1 or 2; --zero 3 gathers ahead always",
    ),
)
"""Options that need another one: when it is missing, and what to give."""


def _check_pairs(plan: Plan) -> None:
    if plan.passes and (others := [name for name in plan.given if name not in ("passes", "cluster")]):
        raise UsageError(f"--passes: is the whole list: leave {', '.join(map(option_name, others))} out")
    for is_missing, line in _PAIRS:
        if is_missing(plan):
            raise UsageError(line.format(plan))


def resolve_world_size(plan: Plan, node: int, most: int, where: str) -> tuple[int, int]:
    """Ranks in all, and those that work on micro-batches of their own (data-parallel, experts' included).

    Args:
        plan: the plan.
        node: GPUs of a node.
        most: GPUs of the cluster.
        where: name of the cluster.

    Raises:
        UsageError: the sizes do not multiply to the number of GPUs; names the nearest that would.
    """
    copies = plan.hsdp_replicas * plan.distributed_optimizer_instances
    model, at_once = plan.model_ranks, plan.model_ranks * plan.expert_ranks * copies
    gpus = plan.gpus or (model * plan.dp if plan.dp else max(node, at_once) // at_once * at_once)
    if gpus > most:
        raise UsageError(f"--gpus {gpus}: cluster {where} has 1 to {most} GPUs (max_gpus of its file)")
    sizes = " ".join(f"{option_name(n)} {getattr(plan, n)}" for n in ("tp", "cp", "pp") if getattr(plan, n) > 1)
    if gpus % model:
        raise UsageError(
            f"{sizes}: {gpus} GPUs are no multiple of {model}: {_nearest(gpus, model, most)} would be"
        )
    replicas = gpus // model
    if plan.dp not in (None, replicas):
        raise UsageError(
            f"--dp {plan.dp}: {gpus} GPUs{f' with {sizes}' if sizes else ''} leave {replicas} data-parallel "
            f"ranks: give --dp {replicas}, or --gpus {model * plan.dp}"
        )
    sizes_of = {"ep": plan.expert_ranks}
    sizes_of |= {name: getattr(plan, name) for name in ("hsdp_replicas", "distributed_optimizer_instances")}
    for name, size in sizes_of.items():
        if replicas % size:
            fold = getattr(plan, name) // size
            fitting = [n * fold for n in range(1, replicas + 1) if replicas % n == 0]
            near = sorted(fitting, key=lambda n: abs(n - getattr(plan, name)))[:2]
            raise UsageError(
                f"{option_name(name)} {getattr(plan, name)}: does not divide the {replicas} data-parallel ranks: "
                f"choose {' or '.join(map(str, sorted(near)))}"
            )
    return gpus, replicas


def _nearest(value: int, unit: int, most: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return " or ".join(str(n) for n in (below, above) if 0 < n <= most) or "none on this cluster"


def micro_batches(plan: Plan, ranks: int, samples: int) -> int:
    """Micro-batches of each data-parallel rank.

    Args:
        plan: the plan.
        ranks: data-parallel ranks.
        samples: samples of a micro-batch.

    Raises:
        UsageError: the global batch is no multiple of what all ranks take at once; names the nearest that are.
    """
    if plan.global_batch is None:
        return plan.pp
    at_once = prod((ranks, samples))
    if not at_once:
        raise UsageError("--global-batch: the graph does not say how many samples its micro-batch has")
    if plan.global_batch % at_once:
        below = max(1, plan.global_batch // at_once) * at_once
        raise UsageError(
            f"--global-batch {plan.global_batch}: {ranks} data-parallel ranks with micro-batches of "
            f"{samples} take multiples of {at_once}, such as {below} or {below + at_once}"
        )
    return plan.global_batch // at_once


def read_plan(path: Path) -> dict[str, Any]:
    """The fields that a plan file gives; keys are the options' names without dashes in front.

    Raises:
        InputError: the file cannot be read, or is no TOML.
        UnknownNameError: a key is no option.
        UsageError: a value is of another type than the option's.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"plan file {path}: is over {MAX_BYTES // 1024} KiB, no plan is that long")
        found = tomllib.loads(data.decode())
    except OSError as error:
        raise InputError(f"plan file {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise InputError(f"plan file {path}: is no TOML: {error}") from None
    hints = field_types(Plan)
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise UnknownNameError(f"option in plan file {path}:", key, [n.replace("_", "-") for n in hints])
        values[name] = _value(path, key, value, hints[name])
    return values


def _value(path: Path, key: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if key == "recompute" and type(value) is int:
        return str(value)
    if key.replace("-", "_") == "stage_layers" and isinstance(value, list):
        return ",".join(map(str, value))
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        said = str(value).lower() if isinstance(value, bool) else repr(str(value)[:40])
        raise UsageError(f"plan file {path}: {key} is {said}: give {words[kind]}")
    return value


def lighter_ends(layers: int, chunks: int) -> str:
    """Layers of each chunk, as `stage_layers` has them, where embedding and loss take the place of a layer each.

    Llama 3's 126 layers are so spread (Dubey et al., 2024, section 3.3.2), and Megatron-LM has options for it. ""
    where layers divide evenly, or do not so either.
    """
    even, rest = divmod(layers + 2, chunks)
    if layers % chunks == 0 or rest:
        return ""
    return ",".join(str(even - (chunk in (0, chunks - 1))) for chunk in range(chunks))


# -- what a plan makes of a graph -----------------------------------------------------------------------------


def passes(plan: Plan, workload: Workload, cluster: Cluster) -> tuple[Pass, ...]:
    """What a plan makes of a step graph: the whole order, with every option.

    Those up to the first that makes a job of the step (`base.split_at_job`) depend of the cluster on its device
    alone, where tokens go to experts once a node on its NVLink domains, too, and not on how many data-parallel
    ranks there are.

    Args:
        plan: how the step is spread.
        workload: sizes of the captured step.
        cluster: the cluster that the job runs on.

    Raises:
        UsageError: the plan's sizes do not multiply to the GPUs, a batch or a number of copies does not divide, or
            what `plan.passes` lists is no list of passes.
    """
    if plan.passes:
        from echograph.ir.passes.base import parse_passes

        return parse_passes(plan.passes)
    stack = load_stack(plan.stack) if plan.stack else Stack()
    plan = with_stack(plan, stack)
    _, ranks = resolve_world_size(plan, cluster.gpus_per_node, cluster.max_gpus, cluster.name)
    count = micro_batches(plan, ranks, plan.micro_batch or workload.batch_size)
    replicas, dropping = ranks // plan.expert_ranks, {"capacity_factor": plan.capacity_factor}
    order: tuple[tuple[bool, str, dict[str, Any]], ...] = (
        # The step that one rank would run alone: its batch, what it is asked for, what it computes again.
        (plan.micro_batch not in (None, workload.batch_size), "micro_batch", {"size": plan.micro_batch}),
        (True, "model_flops", dropping),
        (stack.logged_losses > 0, "logged_losses", {"count": stack.logged_losses}),
        (plan.recompute != "none", "recompute", _recompute(plan)),
        # That of one of the ranks that share it, in its types: products are scaled as each rank has them.
        (plan.tp > 1, "tensor_parallel", _tensor_parallel(plan, stack)),
        (plan.cp > 1, "context_parallel", _context_parallel(plan, stack)),
        (
            plan.ep > 1 or plan.capacity_factor is not None,
            "expert_parallel",
            _expert_parallel(plan, cluster),
        ),
        (plan.loss == "fused", "fuse_loss", {}),
        (bool(plan.precision or plan.grad_dtype or stack.main_gradients), "precision", _precision(plan, stack)),
        # The kernels that its stack runs.
        (stack.foreach_optimizer, "foreach_optimizer", {}),
        (stack.repeated_heads, "repeated_heads", {}),
        (stack.complex_rotation, "complex_rotation", {}),
        (bool(stack.attention), "attention_kernel", {"kernel": _attention(stack, cluster)}),
        (bool(stack.fuse), "fuse", {"within": stack.fuse, "unfused": stack.unfused}),
        (
            plan.tp > 1 and plan.tp_comm_overlap in ("bulk", "chunks"),
            "tp_comm_overlap",
            {"chunks": plan.tp_comm_overlap == "chunks", "dtensor": stack.tp_dtensor},
        ),
        (plan.tp > 1 and stack.tp_comm_waits and plan.tp_comm_overlap in ("", "none"), "tp_comm_waits", {}),
        (plan.tp > 1 and stack.tp_dtensor, "tp_first_dim", {}),
        # The job of all ranks.
        (plan.pp > 1, "pipeline", _pipeline(plan, count, stack)),
        (plan.zero < 3, "data_parallel", _data_parallel(plan, replicas, count, stack)),
        (plan.zero == 3, "fully_shard", _fully_shard(plan, replicas, count, stack)),
        (plan.mesh_order != Plan().mesh_order, "mesh_order", {"order": tuple(plan.mesh_order.split("-"))}),
    )
    return tuple(PASSES[name](**options) for wanted, name, options in order if wanted)


def with_stack(plan: Plan, stack: Stack) -> Plan:
    """The plan with what its stack says where the plan says nothing."""
    in_pipeline = plan.pp > 1 and stack.overlap_grad_reduce_in_pipelines is not None
    reduces = stack.overlap_grad_reduce_in_pipelines if in_pipeline else stack.overlap_grad_reduce
    said: dict[str, Any] = {
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": stack.overlap_param_gather if plan.zero in (1, 2) else None,
        "recompute_early_stop": stack.recompute_early_stop,
        "loss": stack.loss if plan.tp == 1 else stack.loss_in_tensor_parallel,
        "moe_dispatcher": stack.moe_dispatcher,
        "etp": stack.etp if plan.sequence_parallel and plan.ep % plan.tp == 0 else None,
        "tp_comm_overlap": stack.tp_comm_overlap,
        "grad_dtype": (plan.pp > 1 and stack.grad_dtype_in_pipelines) or stack.grad_dtype,
    }
    return replace(plan, **{name: value for name, value in said.items() if getattr(plan, name) in (None, "")})


def _attention(stack: Stack, cluster: Cluster) -> str:
    """The first of a stack's kernels that a cluster's device has a model of; the first where it has none."""
    from echograph.profiler.costs import load_device
    from echograph.profiler.costs.releases import attention_model

    if not stack.attention:
        return ""
    device = load_device(cluster.device)
    return next((kernel for kernel in stack.attention if attention_model(device, kernel)), stack.attention[0])


def with_kernels(job: G, stack: Stack, device: DeviceProfile | None) -> G:
    """The graph with the kernels that its stack runs on a device, where none is named.

    Attention: the first of the stack's kernels that the device has a model of and its library has for such an
    attention on such a device, whose dropout and order of adding up it has to know. Products: padded ones, where
    the stack pads.
    """
    if device is None or not (stack.attention or stack.padded_products):
        return job
    ops, names = job.ops, {name: number for number, name in enumerate(job.strings)}
    renamed = ops.name.copy()

    def rename(row: int, name: str) -> None:
        renamed[row] = names.setdefault(name, len(names))

    kinds: tuple[type, ...] = (Attention,) if stack.attention else ()
    kinds += (Gemm,) if stack.padded_products else ()
    values = {i: value for i, value in enumerate(ops.attribute_values) if isinstance(value, kinds)}
    chosen = {i: _kernel_for(value, stack, device) for i, value in values.items() if isinstance(value, Attention)}
    for row in np.flatnonzero(np.isin(ops.attributes, list(values))).tolist():
        name, which = job.strings[ops.name[row]], int(ops.attributes[row])
        if not name.startswith("aten."):
            continue
        if which not in chosen:
            rename(row, f"{name}{PADDED}")
        elif (kernel := chosen[which]) is not None:
            rename(row, f"{kernel}{SUFFIX}{'_backward' * ('backward' in name)}")
    return replace(job, ops=replace(ops, name=renamed, strings=tuple(names)))


def _kernel_for(attention: Attention, stack: Stack, device: DeviceProfile) -> str | None:
    from echograph.profiler.costs.deterministic import is_possible
    from echograph.profiler.costs.releases import attention_model

    architecture, order = device.datasheet.architecture, attention.deterministic
    possible = (k for k in stack.attention if is_possible(k, architecture, attention.dropout, order))
    return next((kernel for kernel in possible if attention_model(device, kernel)), None)


def apply(
    graph: StepGraph | JobGraph, plan: Plan, cluster: Cluster, note: Note | None = None
) -> StepGraph | JobGraph:
    """What a plan makes of a graph: a job, or what the passes leave that it lists itself.

    Args:
        graph: a step; or a job, which is taken as it is.
        plan: how the step is spread.
        cluster: the cluster that the job runs on.
        note: told what could not be spread, and is computed by every rank, and which options have no effect.

    Raises:
        UsageError: as `passes`, or options for a job graph that has its plan already.
        PlanError: the plan does not fit the model.
    """
    # The passes of a plan end in a builder, which verifies; a list may hold anyone's.
    chosen = _passes_of(graph, plan, cluster)
    if isinstance(graph, StepGraph) and not plan.passes and plan.pp > MOST_APART:
        from echograph.workflow.shared import SharedJobs

        before, rest = split_at_job(chosen)
        step = run(graph, before, to=StepGraph, verify=False, note=note)
        made: StepGraph | JobGraph = SharedJobs().job(step, rest)
    else:
        made = run(graph, chosen, verify=bool(plan.passes), note=note)
    if plan.stack and isinstance(graph, StepGraph):  # a job says which software runs it, as its step does
        made = replace(made, workload=replace(made.workload, stack=plan.stack))
    if note is not None and isinstance(graph, StepGraph):
        for line in without_effect(plan, cluster):
            note(line)
    return made


def _passes_of(graph: StepGraph | JobGraph, plan: Plan, cluster: Cluster) -> tuple[Pass, ...]:
    if isinstance(graph, JobGraph) and not plan.passes:
        return _as_it_is(graph, plan)
    return passes(plan, graph.workload, cluster)


def _as_it_is(graph: JobGraph, plan: Plan) -> tuple[Pass, ...]:
    asked = [name for name in plan.given if name not in ("gpus", "cluster")]
    if asked:
        raise UsageError(f"a job graph has its plan already: give {', '.join(asked)} with its step graph")
    if plan.gpus in (None, graph.world_size):
        return ()
    if graph.mesh:
        raise UsageError(
            f"--gpus {plan.gpus}: the job graph is for {graph.world_size}; give its step graph instead"
        )
    return (PASSES["resize_world"](gpus=plan.gpus),)


def _recompute(plan: Plan) -> dict[str, Any]:
    counted = plan.recompute.isdigit()
    return {
        "policy": "full" if counted else plan.recompute.replace("-", "_"),
        "every": int(plan.recompute) if counted else 1,
        "early_stop": plan.recompute_early_stop,
    }


def _tensor_parallel(plan: Plan, stack: Stack) -> dict[str, Any]:
    patterns = None
    if plan.tp_plan:
        from echograph.ir.passes.tensor_parallel.plan import read_plan

        patterns = read_plan(Path(plan.tp_plan))
    sequence = {"sequence_parallel": plan.sequence_parallel, "expert_size": plan.etp if plan.ep > 1 else None}
    again = {} if not stack.tp_dtensor else {"gathers_again": False}
    return {"size": plan.tp, "plan": patterns} | sequence | again


def _expert_parallel(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    options: dict[str, Any] = {"size": plan.ep, "capacity_factor": plan.capacity_factor}
    options |= {"imbalance": plan.expert_imbalance, "across": plan.experts_across}
    if plan.moe_dispatcher in ("", "alltoall"):
        return options
    # Rows go once to each NVLink domain that the ranks of experts are on.
    order = plan.mesh_order.split("-")
    inside = [axis for axis in order[: order.index("ep")] if axis in ("tp", "cp", "pp")]
    between = prod(
        {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp}[a] for a in inside if a not in plan.experts_across
    )
    together = max(1, cluster.domain_gpus // between)
    return options | {"dispatcher": plan.moe_dispatcher, "domains": -(-plan.ep // together)}


def _precision(plan: Plan, stack: Stack) -> dict[str, Any]:
    return {
        "dtype": plan.precision or None,
        "grad_dtype": plan.grad_dtype or None,
        "kept": stack.fp8_kept,
        "delayed": stack.fp8_scaling == "delayed" and plan.precision == "fp8",
        "weights": stack.fp8_weights,
        "experts": stack.fp8_experts,
        "gathers": stack.fp8_gathers,
        "main_gradients": stack.main_gradients,
        "fused_accumulation": stack.fused_accumulation,
    }


def _context_parallel(plan: Plan, stack: Stack) -> dict[str, Any]:
    waits = {"host_waits": True} if plan.cp_method == "ring" and stack.ring_host_waits else {}
    return {"size": plan.cp, "method": plan.cp_method.replace("-", "_")} | waits


def _pipeline(plan: Plan, count: int, stack: Stack) -> dict[str, Any]:
    try:
        layers = tuple(int(part) for part in plan.stage_layers.split(",")) if plan.stage_layers else None
    except ValueError:
        raise UsageError(
            f"--stage-layers {plan.stage_layers[:40]}: give whole numbers with commas, as 10,12,12,10"
        ) from None
    options = {"stages": plan.pp, "micro_batches": count, "schedule": schedule_of(plan), "chunks": plan.vpp}
    # Ranks that cut the sequence have different activations already.
    whole = plan.tp > 1 and not plan.sequence_parallel
    overlap = {"overlap_experts": True} if plan.overlap_moe_expert_parallel_comm and plan.ep > 1 else {}
    shared = {"scatter_gather": stack.pipeline_scatter_gather and whole}
    return options | {"layers": layers} | shared | overlap


def schedule_of(plan: Plan) -> str:
    """The pipeline schedule of a plan; "" without a pipeline."""
    return plan.schedule or (("interleaved" if plan.vpp > 1 else "1f1b") if plan.pp > 1 else "")


def _data_parallel(plan: Plan, replicas: int, count: int, stack: Stack) -> dict[str, Any]:
    # Micro-batches of a pipeline are in its schedule already.
    options = {"replicas": replicas, "micro_batches": 1 if plan.pp > 1 else count}
    names = ("zero", "overlap_grad_reduce", "overlap_param_gather")
    options |= {name: plan.given[name] for name in names if name in plan.given}
    instances = plan.distributed_optimizer_instances
    whole = {"reduce_scatter": False} if plan.zero and stack.zero_all_reduces else {}
    return options | whole | ({"instances": instances} if instances > 1 else {})


def _fully_shard(plan: Plan, replicas: int, count: int, stack: Stack) -> dict[str, Any]:
    keep = plan.pp > 1 if plan.reshard_after_forward is None else not plan.reshard_after_forward
    return {
        "replicas": replicas,
        "shard": replicas // plan.hsdp_replicas,
        "micro_batches": 1 if plan.pp > 1 else count,
        "reshard_after_forward": not keep,
        "apart": stack.zero3_apart,
        "flat": stack.flat_parameters,
        "reduce_dtype": DType[stack.reduce_dtype.upper()] if stack.reduce_dtype else None,
    }


def without_effect(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Options of a plan that change nothing, since there is nothing for them to change: a line each.

    What no size of an axis could give an effect is refused by `Plan` itself.

    Args:
        plan: how a step is spread.
        cluster: the cluster that it runs on.

    Raises:
        UsageError: the plan's sizes do not multiply to the GPUs.
    """
    if plan.passes:
        return ()
    stack = load_stack(plan.stack) if plan.stack else Stack()
    _, ranks = resolve_world_size(with_stack(plan, stack), cluster.gpus_per_node, cluster.max_gpus, cluster.name)
    sizes = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "dp": ranks, "pp": plan.pp}
    order, usual = ([axis for axis in axes if sizes[axis] > 1] for axes in (plan.mesh_order.split("-"), AXES))
    gathers = "--zero 3 gathers ahead always" if plan.zero == 3 else "--zero 0 gathers none"
    rules = {
        "tp_comm_overlap": (plan.tp == 1, "one tensor-parallel rank communicates with no other"),
        "cp_method": (plan.cp == 1, "one rank has the whole sequence"),
        "etp": (plan.ep == 1 or plan.tp == 1, "experts are shared by tensor-parallel ranks alone, or by none"),
        "moe_dispatcher": (plan.ep == 1, "one rank has all experts of a layer"),
        "expert_imbalance": (plan.ep == 1, "one rank has all experts of a layer"),
        "overlap_moe_expert_parallel_comm": (plan.ep == 1, "one rank has all experts of a layer"),
        "zero": (ranks == 1, "one data-parallel rank shares with no other"),
        "overlap_grad_reduce": (
            ranks == 1 or plan.zero == 3,
            "one data-parallel rank reduces nothing" if ranks == 1 else "--zero 3 reduces while backward goes on",
        ),
        "overlap_param_gather": (
            ranks == 1 or plan.zero in (0, 3),
            "one data-parallel rank gathers nothing" if ranks == 1 else gathers,
        ),
        "recompute_early_stop": (plan.recompute == "none", "nothing is recomputed"),
        "mesh_order": (order == usual, "the axes that have several ranks stand in the same order"),
    }
    return tuple(
        f"{option_name(name)}: has no effect here: {why}"
        for name, (idle, why) in rules.items()
        if idle and name in plan.given
    )


def idle_options(notes: Iterable[Iterable[str]], asked: Collection[str]) -> tuple[str, ...]:
    """Of what `without_effect` says of several plans, what holds for all of them.

    Args:
        notes: of each plan; no more are taken once nothing holds for all.
        asked: the fields that were asked for.
    """
    options, common = set(map(option_name, asked)), set[str]()
    for number, lines in enumerate(notes):
        said = {line for line in lines if line.partition(":")[0] in options}
        common = common & said if number else said
        if not common:
            break
    return tuple(sorted(common))


def cluster_notes(cluster: Cluster, gpus: int) -> tuple[str, ...]:
    """What of a cluster is extrapolated for so many GPUs."""
    if gpus <= cluster.stated_gpus:
        return ()
    return (
        f"{gpus} GPUs: cluster {cluster.name} states levels for {cluster.stated_gpus}; those above are grown by "
        "its [network.growth], which is assumed",
    )


def record(job: JobGraph, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """The plan with its defaults filled in, for results; where it lists passes, those instead of its options."""
    mesh = {axis.name: axis.size for axis in job.mesh}
    data = 1
    for name, size in mesh.items():
        data *= size if name.startswith("dp") or name == "ep" else 1
    sizes = {
        "gpus": job.world_size,
        "cluster": cluster.name,
        **{axis: mesh.get(axis, 1) for axis in ("tp", "cp", "ep", "pp")},
        "dp": data,
    }
    options = {
        "vpp": plan.vpp,
        "zero": plan.zero,
        "hsdp_replicas": plan.hsdp_replicas,
        "sequence_parallel": plan.sequence_parallel,
        "schedule": schedule_of(plan),
        "recompute": plan.recompute,
        "precision": plan.precision or job.workload.dtype.text,
    }
    options |= {"stack": plan.stack} if plan.stack else {}
    instances = plan.distributed_optimizer_instances
    options |= {"distributed_optimizer_instances": instances} if instances > 1 else {}
    said = {"passes": plan.passes} if plan.passes else options
    return {**sizes, **said, "micro_batch": job.workload.batch_size, "mesh": mesh}
