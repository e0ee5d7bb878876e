"""Which parameters a tensor-parallel rank shares, and how: Megatron's plan for the families of the zoo."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

from echograph.errors import PlanError, UnknownNameError
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph
from echograph.ir.passes.tensor_parallel_rules import WHOLE, Placement, Shard
from echograph.ir.types import TensorRole

Style = Literal["colwise", "rowwise", "vocab"]

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
    # Embeddings and heads
    "*.wte": "vocab", "*.embed_tokens": "vocab", "*.word_embeddings": "vocab", "lm_head": "vocab",
    "cls.predictions": "vocab", "cls.predictions.decoder": "vocab", "vocab_projector": "vocab",
}  # fmt: skip
"""Module pattern -> what its weight shares: outputs, inputs, or the vocabulary. The first that fits counts."""


def check_plan(plan: Mapping[str, Style]) -> None:
    """Refuses a style that does not exist.

    Raises:
        UnknownNameError: names the style and the choices.
    """
    for style in plan.values():
        if style not in get_args(Style):
            raise UnknownNameError("parallel style", style, get_args(Style))


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
            style = _style(plan, tensor.name) if tensor.role == TensorRole.PARAMETER else None
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


def _style(plan: Mapping[str, Style], name: str) -> Style | None:
    module = name.rpartition(".")[0]
    return next((style for pattern, style in plan.items() if fnmatchcase(module, pattern)), None)


def _cut(graph: Graph, index: int, style: Style) -> Placement:
    rank = len(graph.tensors[index].shape)
    if rank == 1:
        return WHOLE if style == "rowwise" else Shard(0, vocab=style == "vocab")
    if rank != 2:
        return WHOLE
    if style == "vocab":
        return Shard(0, vocab=True)
    output = 1 if _is_input_by_output(graph, index) else 0
    return Shard(output if style == "colwise" else 1 - output)


def _is_input_by_output(graph: Graph, index: int) -> bool:
    """Whether a weight lies as [inputs, outputs] (Conv1D): a product reads it as it is, and not transposed."""
    readers = graph.ops.inputs.rows[graph.ops.inputs.values == index].tolist()
    return bool(readers) and graph.strings[graph.ops.name[readers[0]]] in ("aten.mm", "aten.addmm")
