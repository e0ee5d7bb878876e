"""A plan in the words of the software that runs it: a plan file, Megatron-LM, DeepSpeed, torchtitan, accelerate.

Each format is a function that asks for the plan's fields one by one. What it has not asked for when it ends,
and is not as the defaults are, is something that the software has no word for: that is refused, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from echograph.errors import UnknownNameError, UsageError
from echograph.ir.passes.data_parallel import zero_bucket_elements
from echograph.models.stacks import load_stack
from echograph.options import option_name
from echograph.workflow.plan import Plan, schedule_of, with_stack


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSizes:
    """What a plan leaves open, worked out for one graph and cluster.

    Attributes:
        gpus: of the job.
        node: GPUs of a node.
        data_ranks: data-parallel ranks, experts' included.
        micro_batch: samples of a micro-batch.
        micro_batches: of a data-parallel rank.
        layers: of the model.
        dtype: in which it computes, "bf16" as a rule.
        master_weights: whether the optimizer keeps fp32 copies of 16-bit parameters.
    """

    gpus: int
    node: int
    data_ranks: int
    micro_batch: int
    micro_batches: int
    layers: int
    dtype: str
    master_weights: bool = True

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return prod((self.data_ranks, self.micro_batch, self.micro_batches))


@dataclass(slots=True)
class _Asked:
    """A plan of which is noted what was asked."""

    plan: Plan
    sizes: PlanSizes
    software: str
    asked: set[str] = field(default_factory=lambda: {"gpus", "cluster", "dp", "stack", "passes"})
    notes: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """The value of a field."""
        self.asked.add(name)
        return getattr(self.plan, name)

    def one_of(self, name: str, words: dict[Any, Any]) -> Any:
        """The software's word for the value of a field.

        Raises:
            UsageError: it has none.
        """
        value = self.get(name)
        if value not in words:
            raise self.refusal(name)
        return words[value]

    def refusal(self, name: str) -> UsageError:
        """What is said of a value that the software has no word for."""
        value = getattr(self.plan, name)
        said = option_name(name) + ("" if value is True else f" {str(value).lower()}")
        return UsageError(f"{self.software} has no word for {said}: --fix another value, or write another format")

    def note(self, text: str) -> None:
        """Something that whoever runs the plan has to do besides."""
        self.notes.append(f"{self.software}: {text}")

    def end(self) -> None:
        """Refuses what was not asked for.

        Raises:
            UsageError: a field that the software has no word for.
        """
        for name in self.plan.given:
            if name not in self.asked:
                raise self.refusal(name)


def _plan_file(of: _Asked) -> str:
    of.asked |= of.plan.given.keys()
    lines = [f"{option_name(name)[2:]} = {_toml(value)}" for name, value in of.plan.given.items()]
    return "\n".join(["# A plan: echosim run GRAPH --plan this-file", *lines]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str | list) else str(value)


_RECIPES = {"fp8": "tensorwise", "fp8-blockwise": "blockwise", "mxfp8": "mxfp8"}


def _megatron(of: _Asked) -> str:
    """Arguments of Megatron-LM's training scripts (megatron/training/arguments.py).

    What the plan's stack does and Megatron-LM does not unless it is told is said, too.
    """
    early = of.plan.recompute_early_stop
    if of.plan.tp_comm_overlap == "bulk":
        of.note("bulk overlap of tensor-parallel communication is what it does without --tp-comm-overlap")
    of.plan = with_stack(of.plan, load_stack(of.plan.stack)) if of.plan.stack else of.plan
    of.plan = replace(of.plan, recompute_early_stop=early)
    if of.plan.ep == 1:
        of.plan = replace(of.plan, moe_dispatcher="", etp=None)
    sizes, plan = of.sizes, of.plan
    said: list[str] = [
        f"--tensor-model-parallel-size {of.get('tp')}",
        f"--pipeline-model-parallel-size {of.get('pp')}",
        f"--context-parallel-size {of.get('cp')}",
        f"--micro-batch-size {sizes.micro_batch}",
        f"--global-batch-size {sizes.global_batch}",
    ]
    of.asked |= {"micro_batch", "global_batch"}
    if of.get("ep") > 1:
        said.append(f"--expert-model-parallel-size {plan.ep}")
    if of.get("etp") is not None:
        said.append(f"--expert-tensor-parallel-size {plan.etp}")
    said += _megatron_pipeline(of)
    said += [
        *["--sequence-parallel"] * of.get("sequence_parallel"),
        *of.one_of("zero", {0: [], 1: ["--use-distributed-optimizer"], 3: ["--use-torch-fsdp2"]}),
        *of.one_of("recompute", {"none": [], "selective": [_GRANULAR + "selective"], "full": [_FULL]}),
        *["--overlap-grad-reduce"] * bool(of.get("overlap_grad_reduce")),
        *["--overlap-param-gather"] * bool(of.get("overlap_param_gather")),
        *["--overlap-moe-expert-parallel-comm"] * of.get("overlap_moe_expert_parallel_comm"),
        *of.one_of("tp_comm_overlap", {"": [], "none": [], "bulk": [], "chunks": ["--tp-comm-overlap"]}),
        *of.one_of("grad_dtype", _GRADIENTS),
        *of.one_of("mesh_order", {Plan().mesh_order: [], "tp-cp-ep-pp-dp": ["--use-tp-pp-dp-mapping"]}),
        *of.one_of("moe_dispatcher", _DISPATCHERS),
    ]
    if plan.cp > 1:
        said.append(f"--cp-comm-type {of.one_of('cp_method', {'ring': 'p2p', 'all-to-all': 'a2a'})}")
    if of.get("distributed_optimizer_instances") > 1:
        said.append(f"--num-distributed-optimizer-instances {plan.distributed_optimizer_instances}")
    if of.get("capacity_factor") is not None:
        said.append(f"--moe-expert-capacity-factor {plan.capacity_factor:g}")
    said += _megatron_precision(of)
    said += _megatron_loss(of)
    of.asked.add("expert_imbalance")  # which is assumed of the data, not set
    _its_own_recomputation(of)
    if plan.zero == 3 and plan.pp > 1:
        raise of.refusal("zero")
    return " \\\n".join(said) + "\n"


def _megatron_loss(of: _Asked) -> list[str]:
    """Its loss is eager unless told; `Fuse` within modules compiles it function by function, as that does."""
    compiled = bool(of.plan.stack) and load_stack(of.plan.stack).fuse == "modules"
    fused = ["--cross-entropy-loss-fusion"]
    if compiled and of.plan.loss == "eager":
        of.note("its loss is eager then; the prediction has it compiled function by function")
    return list(of.one_of("loss", {"": fused if compiled else [], "eager": [], "fused": fused}))


_GRADIENTS = {
    "": [],
    "fp32": ["--accumulate-allreduce-grads-in-fp32"],
    "bf16": ["--grad-reduce-in-bf16"],
}
_GRANULAR = "--recompute-granularity "
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend "
_DISPATCHERS = {
    "": [],
    "alltoall": ["--moe-token-dispatcher-type alltoall"],
    "deepep": [_FLEX + "deepep"],
    "hybridep": [_FLEX + "hybridep"],
}


def _megatron_pipeline(of: _Asked) -> list[str]:
    of.asked.add("schedule")
    if schedule_of(of.plan) not in ("", "1f1b", "interleaved"):
        raise of.refusal("schedule")
    chunks = of.get("pp") * of.get("vpp")
    if of.get("stage_layers") or of.sizes.layers % chunks:
        least, more = divmod(of.sizes.layers, chunks)
        even = ",".join(str(least + (chunk < more)) for chunk in range(chunks))
        stages = ["t" * int(count) for count in (of.plan.stage_layers or even).split(",")]
        # The embedding is in the first of the chunks and the loss in the last.
        return [f"--pipeline-model-parallel-layout 'E{'|'.join(stages)}L'"]
    if of.plan.vpp == 1:
        return []
    return [f"--num-layers-per-virtual-pipeline-stage {of.sizes.layers // chunks}"]


def _megatron_precision(of: _Asked) -> list[str]:
    precision = of.get("precision") or of.sizes.dtype
    if precision in ("bf16", "fp16"):
        return [f"--{precision}"]
    if precision == "fp32":
        return []
    if precision not in _RECIPES:
        raise of.refusal("precision")
    return ["--bf16", "--fp8-format hybrid", f"--fp8-recipe {_RECIPES[precision]}"]


def _its_own_recomputation(of: _Asked) -> None:
    if of.get("recompute_early_stop") is not None:
        of.note("recomputation ends where it ends it")


def _its_own_reduction(of: _Asked) -> None:
    if of.get("overlap_grad_reduce") is not None:
        of.note("gradients are reduced when it reduces them")


def _alone(of: _Asked, *names: str) -> None:
    """Refuses axes that a format says nothing of."""
    for name in names:
        of.one_of(name, {1: 1})


def _deepspeed(of: _Asked) -> str:
    """DeepSpeed's configuration, which says nothing of how the model is divided."""
    _alone(of, "tp", "cp", "ep", "pp", "vpp", "hsdp_replicas")
    sizes = of.sizes
    of.asked |= {"micro_batch", "global_batch"}
    _its_own_recomputation(of)
    config: dict[str, Any] = {
        "train_batch_size": sizes.global_batch,
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.micro_batches,
        "zero_optimization": {"stage": of.get("zero")},
    }
    of.asked.add("overlap_grad_reduce")
    # What the plan's stack does beside backward DeepSpeed does with stages 1 and 2 only when told.
    told = with_stack(of.plan, load_stack(of.plan.stack)) if of.plan.stack else of.plan
    if of.plan.zero in (1, 2) and told.overlap_grad_reduce is not None:
        config["zero_optimization"]["overlap_comm"] = told.overlap_grad_reduce
        if told.overlap_grad_reduce:
            config["zero_optimization"]["reduce_bucket_size"] = zero_bucket_elements(sizes.data_ranks)
    precision = of.get("precision") or sizes.dtype
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    elif precision != "fp32":
        raise of.refusal("precision")
    types = {"": None, "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    if kind := of.one_of("grad_dtype", types):
        config["data_types"] = {"grad_accum_dtype": kind}
    if of.get("recompute") != "none":
        of.note(
            f"recomputation ({of.plan.recompute}) is the model's to do: deepspeed.checkpointing or the model's own"
        )
    return json.dumps(config, indent=2) + "\n"


def _torchtitan(of: _Asked) -> str:
    """Tables of torchtitan's job configuration (torchtitan/config/job_config.py)."""
    plan, sizes = of.plan, of.sizes
    of.asked |= {"micro_batch", "global_batch", "schedule"}
    _its_own_recomputation(of)
    _its_own_reduction(of)
    _alone(of, "distributed_optimizer_instances")
    if of.get("tp") > 1 and not plan.sequence_parallel:
        raise UsageError(
            "torchtitan has no word for --no-sequence-parallel with --tp: --fix sequence-parallel=true"
        )
    of.get("sequence_parallel")
    zero, copies = of.one_of("zero", {0: 0, 3: 3}), of.get("hsdp_replicas")
    ranks = sizes.data_ranks
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": ranks if zero == 0 else copies,
        "data_parallel_shard_degree": 1 if zero == 0 else ranks // copies,
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": of.get("cp"),
        "pipeline_parallel_degree": of.get("pp"),
        "expert_parallel_degree": of.get("ep"),
    }
    if plan.pp > 1:
        schedules = {
            "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe", "zb-v": "ZBVZeroBubble",
            "dualpipe-v": "DualPipeV",
        }  # fmt: skip
        if (schedule := schedules.get(schedule_of(plan))) is None:
            raise of.refusal("schedule")
        parallel |= {
            "pipeline_parallel_schedule": schedule,
            "pipeline_parallel_microbatch_size": sizes.micro_batch,
        }
        if of.get("vpp") > 1:
            if sizes.layers % (plan.pp * plan.vpp):
                raise of.refusal("vpp")
            parallel["pipeline_parallel_layers_per_stage"] = -(-sizes.layers // (plan.pp * plan.vpp))
    if (again := of.get("reshard_after_forward")) is not None:
        parallel["fsdp_reshard_after_forward"] = "always" if again else "never"
    local = sizes.micro_batch * (sizes.micro_batches if plan.pp > 1 else 1)
    training: dict[str, Any] = {"local_batch_size": local, "global_batch_size": sizes.global_batch}
    checkpoint = _torchtitan_recompute(of)
    tables = {"training": training, "parallelism": parallel, "activation_checkpoint": checkpoint}
    tables |= _torchtitan_compile(of)
    precision = of.get("precision") or sizes.dtype
    if precision not in ("bf16", "fp32"):
        raise of.refusal("precision")
    training["mixed_precision_param"] = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _torchtitan_compile(of: _Asked) -> dict[str, dict[str, Any]]:
    """The table that says what is compiled, where the plan's stack compiles: torchtitan does not unless told."""
    fused = load_stack(of.plan.stack).fuse if of.plan.stack else ""
    if fused == "modules":
        of.note(f"its kernels are not those of the stack {of.plan.stack}")
    if fused == "step":
        of.note("it compiles each layer and the loss alone, not the whole step")
    components = {"layers": ["model"], "step": ["model", "loss"]}.get(fused)
    return {"compile": {"enable": True, "components": components}} if components else {}


def _torchtitan_recompute(of: _Asked) -> dict[str, str]:
    policy = of.get("recompute")
    if policy in ("none", "full"):
        return {"mode": policy}
    if policy == "selective":
        raise of.refusal("recompute")
    return {"mode": "selective", "selective_ac_option": "op" if policy == "selective-op" else policy}


def _accelerate(of: _Asked) -> str:
    """Hugging Face accelerate's configuration file: DDP, DeepSpeed, FSDP or Megatron-LM, as the plan needs it."""
    plan, sizes = of.plan, of.sizes
    _alone(of, "ep", "cp", "distributed_optimizer_instances")
    of.asked |= {"micro_batch", "global_batch", "schedule"}
    _its_own_recomputation(of)
    _its_own_reduction(of)
    precision = of.get("precision") or sizes.dtype
    if precision not in ("bf16", "fp16", "fp32"):
        raise of.refusal("precision")
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": {"fp32": "no"}.get(precision, precision),
        "num_machines": -(-sizes.gpus // sizes.node),
        "num_processes": sizes.gpus,
        "machine_rank": 0,
    }
    if plan.tp > 1 or plan.pp > 1:
        config |= {"distributed_type": "MEGATRON_LM", "megatron_lm_config": _accelerate_megatron(of)}
    elif of.get("zero") == 3:
        config |= {"distributed_type": "FSDP", "fsdp_config": _accelerate_fsdp(of)}
    elif plan.zero:
        deepspeed = {"zero_stage": plan.zero, "gradient_accumulation_steps": sizes.micro_batches}
        config |= {"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}
    if config["distributed_type"] == "MULTI_GPU" and precision != "fp32":
        # Its mixed precision of replicas is autocast: fp32 weights, cast at each use, and gradients in fp32.
        config["mixed_precision"] = "no"
        copies = " and gives it an optimizer with fp32 copies" if sizes.master_weights else ""
        of.note(f"the script makes the model in {precision}{copies}: mixed precision here would be another step")
    if config["distributed_type"] in ("MULTI_GPU", "DEEPSPEED") and of.get("recompute") != "none":
        of.note(f"recomputation ({plan.recompute}) is the model's to do: gradient_checkpointing_enable()")
    of.note(f"the script gives the batch: {sizes.micro_batch} samples, {sizes.micro_batches} micro-batches a step")
    return "".join(_yaml(config))


def _accelerate_fsdp(of: _Asked) -> dict[str, Any]:
    if of.get("hsdp_replicas") > 1:
        raise of.refusal("hsdp_replicas")
    again = of.get("reshard_after_forward")
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True if again is None else again,
        "fsdp_activation_checkpointing": of.one_of("recompute", {"none": False, "full": True}),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _accelerate_megatron(of: _Asked) -> dict[str, Any]:
    _alone(of, "vpp")
    if schedule_of(of.plan) not in ("", "1f1b"):
        raise of.refusal("schedule")
    if of.sizes.layers % of.plan.pp:
        raise of.refusal("pp")
    return {
        "megatron_lm_tp_degree": of.get("tp"),
        "megatron_lm_pp_degree": of.get("pp"),
        "megatron_lm_num_micro_batches": of.sizes.micro_batches,
        "megatron_lm_sequence_parallelism": of.get("sequence_parallel"),
        "megatron_lm_recompute_activations": of.one_of("recompute", {"none": False, "selective": True}),
        "megatron_lm_use_distributed_optimizer": of.one_of("zero", {0: False, 1: True}),
        "megatron_lm_gradient_clipping": 1.0,
    }


def _yaml(table: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:\n", *_yaml(value, indent + "  ")]
        else:
            word = str(value).lower() if isinstance(value, bool) else json.dumps(value)
            lines.append(f"{indent}{key}: {word}\n")
    return lines


FORMATS: dict[str, tuple[str, Callable[[_Asked], str]]] = {
    "plan": ("a plan file", _plan_file),
    "megatron": ("Megatron-LM", _megatron),
    "deepspeed": ("DeepSpeed's configuration", _deepspeed),
    "torchtitan": ("torchtitan", _torchtitan),
    "accelerate": ("accelerate", _accelerate),
}
"""Formats by their word: what writes them, and what is said of them."""


def parse_target(text: str) -> tuple[str, Path]:
    """A format and a file, of "megatron:args.txt".

    Raises:
        UnknownNameError: no such format.
        UsageError: no file.
    """
    name, separator, path = text.partition(":")
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS, hint="as --write megatron:args.txt")
    if not separator or not path:
        raise UsageError(f"--write {text[:60]}: say the file, too, as {name}:{name}.txt")
    return name, Path(path)


def written(name: str, plan: Plan, sizes: PlanSizes) -> tuple[str, Collection[str]]:
    """A plan as a format has it, and what whoever runs it has to do besides.

    Raises:
        UsageError: the software has no word for something of the plan.
        UnknownNameError: no such format.
    """
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    software, write = FORMATS[name]
    of = _Asked(plan, sizes, software)
    text = write(of)
    of.end()
    return text, tuple(of.notes)
