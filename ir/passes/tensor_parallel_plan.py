"""Which parameters a tensor-parallel rank shares, and how: Megatron's plan for the zoo's families, or a user's.

A plan maps patterns (as of `fnmatch`) of modules or parameters to what the ranks share: the outputs of a matrix
("colwise"), its inputs ("rowwise"), the vocabulary ("vocab"), the outputs of three matrices of equal size that
stand in one, for queries, keys and values ("packed_qkv": `nn.MultiheadAttention`), or nothing ("whole"). The first
pattern that fits counts. Matrices that stand in one and whose outputs `split` or `chunk` cut apart are "colwise".
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

from echograph.errors import InputError, PlanError, UnknownNameError
from echograph.ir.columns import NONE
from echograph.ir.files import read_whole
from echograph.ir.graph import Graph
from echograph.ir.passes.tensor_parallel_placement import WHOLE, Placement, Shard
from echograph.ir.types import TensorRole

Style = Literal["colwise", "rowwise", "vocab", "packed_qkv", "whole"]

PLAN: Mapping[str, Style] = {
    # GPT-2 and GPT-3 of Hugging Face (Conv1D)
    "*.attn.c_attn": "colwise", "*.attn.c_proj": "rowwise", "*.mlp.c_fc": "colwise", "*.mlp.c_proj": "rowwise",
    # Llama, Mistral, Qwen, Gemma, Phi, OPT
    "*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.qkv_proj": "colwise",
    "*.o_proj": "rowwise", "*.out_proj": "rowwise", "*.self_attn.dense": "rowwise",
    "*.gate_proj": "colwise", "*.up_proj": "colwise", "*.gate_up_proj": "colwise", "*.down_proj": "rowwise",
    "*.fc1": "colwise", "*.fc2": "rowwise",
    # BERT, RoBERTa, ViT
    "*.attention.query": "colwise", "*.attention.key": "colwise", "*.attention.value": "colwise",
    "*.self.query": "colwise", "*.self.key": "colwise", "*.self.value": "colwise",
    "*.intermediate.dense": "colwise", "*.output.dense": "rowwise",
    # DistilBERT
    "*.q_lin": "colwise", "*.k_lin": "colwise", "*.v_lin": "colwise", "*.out_lin": "rowwise",
    "*.lin1": "colwise", "*.lin2": "rowwise",
    # BLOOM and MPT
    "*.query_key_value": "colwise", "*.self_attention.dense": "rowwise",
    "*.dense_h_to_4h": "colwise", "*.dense_4h_to_h": "rowwise", "*.attn.Wqkv": "colwise",
    # T5
    "*Attention.q": "colwise", "*Attention.k": "colwise", "*Attention.v": "colwise", "*Attention.o": "rowwise",
    "*.wi": "colwise", "*.wi_0": "colwise", "*.wi_1": "colwise", "*.wo": "rowwise", "shared": "vocab",
    # Experts: one parameter for all, not a module each; and DeepSeek's products after the low-rank ones
    "*.experts.gate_up_proj_bias": "colwise", "*.q_b_proj": "colwise", "*.kv_b_proj": "colwise",
    "*.self_attn.sinks": "colwise",
    # Embeddings and heads
    "*.wte": "vocab", "*.embed_tokens": "vocab", "*.word_embeddings": "vocab", "lm_head": "vocab",
    "cls.predictions": "vocab", "cls.predictions.decoder": "vocab", "vocab_projector": "vocab",
}  # fmt: skip
"""Pattern of modules or parameters -> what is shared: outputs, inputs, or the vocabulary. The first counts."""


_HUGGING_FACE: Mapping[str, Style | None] = {
    **dict.fromkeys(("colwise", "packed_colwise", "colwise_rep", "colwise_gather_output"), "colwise"),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), "rowwise"),
    # Said of weights that lie as [inputs, outputs], where it means their second dim.
    "packed_rowwise": "colwise",
    "embedding_rowwise": "vocab",
    "embedding_colwise": "colwise",
    # What follows from the others, or leaves its module whole.
    **dict.fromkeys(
        ("sequence_parallel", "replicate", "replicated_with_grad_allreduce", "all_reduce", "mla_kv_a_proj",
         "local_params", "moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts")
    ),
}  # fmt: skip
_MAX_PLAN_BYTES = 1 << 20
_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")
_TRANSPOSES = ("t", "transpose", "permute", "numpy_T")


def check_plan(plan: Mapping[str, Style]) -> None:
    """Refuses a style that does not exist.

    Raises:
        UnknownNameError: names the style and the choices.
    """
    for style in plan.values():
        if style not in get_args(Style):
            raise UnknownNameError("parallel style", style, get_args(Style))


def read_plan(path: Path) -> dict[str, Style]:
    """A plan from a TOML file, with a table [plan] of patterns, or [base_model_tp_plan] as Hugging Face has it.

    Raises:
        InputError: there is no such file, it is no TOML, or it has neither table, or both.
        UnknownNameError: a style does not exist.
    """
    data = read_whole(path, "give a TOML file with a table [plan]", _MAX_PLAN_BYTES)
    try:
        content = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise InputError(f"{path}: no TOML: {str(error).splitlines()[0]}") from None
    tables = {name: content.get(name) for name in ("plan", "base_model_tp_plan")}
    given = [table for table in tables.values() if isinstance(table, dict)]
    if len(given) != 1 or set(content) - set(tables):
        raise InputError(f"{path}: give one table, [plan] or [base_model_tp_plan], with patterns and styles")
    plan = {pattern: style if isinstance(style, str) else repr(style) for pattern, style in given[0].items()}
    if "plan" not in content:
        return from_hugging_face(plan)
    check_plan(plan)  # type: ignore[arg-type]
    return plan  # type: ignore[return-value]


def from_hugging_face(plan: Mapping[str, str]) -> dict[str, Style]:
    """A plan from a model's `base_model_tp_plan` (names relative to the base model) or `_tp_plan`.

    What is gathered or reduced follows from what is shared, so styles that only say that are left out. The head is
    shared over the vocabulary, and its outputs not gathered.

    Raises:
        UnknownNameError: a style does not exist.
    """
    styles: dict[str, Style] = {}
    for name, style in plan.items():
        if style not in _HUGGING_FACE:
            raise UnknownNameError("Hugging Face parallel style", style, _HUGGING_FACE)
        ours = "vocab" if name.rpartition(".")[2] == "lm_head" else _HUGGING_FACE[style]
        if ours is not None:
            styles[f"*{name}"] = ours
    return styles


def given_placements(graph: Graph, plan: Mapping[str, Style]) -> dict[int, Placement]:
    """Placements of parameters and of their optimizer state, by row of the tensor table; whole ones are left out.

    Raises:
        PlanError: the plan fits no parameter.
    """
    found: dict[int, Placement] = {}
    for block in graph.blocks:
        by_name: dict[str, tuple[tuple[int, ...], Placement]] = {}
        unmade = [i for i in block.tensors if graph.maker[i] == NONE and not graph.tensors.port[i]]
        for index in unmade:
            tensor = graph.tensors[index]
            style = style_of(plan, tensor.name) if tensor.role == TensorRole.PARAMETER else None
            if style is not None and (placement := _cut(graph, index, style)) != WHOLE:
                by_name[tensor.name] = tensor.shape, placement
                found[index] = placement
        for index in unmade:
            tensor = graph.tensors[index]
            shape, placement = by_name.get(tensor.name.rpartition(".")[0], (None, WHOLE))
            if tensor.role == TensorRole.OPTIMIZER_STATE and tensor.shape == shape:
                found[index] = placement
    if not found:
        raise PlanError("the tensor-parallel plan fits no parameter: give a plan of module patterns")
    return found


def style_of(plan: Mapping[str, Style], name: str) -> Style | None:
    """The style of a parameter, by its own name or its module's."""
    module = name.rpartition(".")[0]
    fits = (s for pattern, s in plan.items() if fnmatchcase(module, pattern) or fnmatchcase(name, pattern))
    return next(fits, None)


def _cut(graph: Graph, index: int, style: Style) -> Placement:
    rank, read_by = len(graph.tensors[index].shape), _first_reader(graph, index)
    before = 3 if style == "packed_qkv" else 1
    if style == "whole":
        return WHOLE
    if rank == 1:
        return WHOLE if style == "rowwise" else Shard(0, before, vocab=style == "vocab")
    if rank == 2 and style == "vocab":
        return Shard(0, vocab=True)
    if rank == 2 and read_by == "index":  # a bias for each expert
        return WHOLE if style == "rowwise" else Shard(1, before)
    if rank != 2 and read_by not in (*_TRANSPOSES, "_grouped_mm"):
        return WHOLE
    outputs = rank - 1 if read_by in (*_PRODUCTS, "embedding") else rank - 2
    return Shard(2 * rank - 3 - outputs if style == "rowwise" else outputs, before)


def _first_reader(graph: Graph, index: int) -> str:
    """What reads a parameter first, converted or not; of one that lies as [inputs, outputs], that is a product."""
    name = "_to_copy"
    while name == "_to_copy":
        readers = graph.ops.inputs.rows[graph.ops.inputs.values == index]
        if not len(readers):
            return ""
        name = graph.strings[graph.ops.name[readers[0]]].rpartition(".")[2]
        index = graph.ops.outputs.row(readers[0])[0] if name == "_to_copy" else index
    return name
