"""Which parameters a tensor-parallel rank shares, and how, and the placement of every tensor that follows.

A plan maps patterns (as of `fnmatch`) of modules or parameters to what the ranks share: the outputs of a matrix
("colwise"), its inputs ("rowwise"), the vocabulary ("vocab"), the outputs of three matrices of equal size that
stand in one, for queries, keys and values ("packed_qkv": `nn.MultiheadAttention`), or nothing ("whole"). The
first pattern that fits counts. Matrices that stand in one and whose outputs `split` or `chunk` cut apart are
"colwise". It is Megatron's for the zoo's families, or a user's.

What no pattern is known for is inferred from the graph. A residual addition adds to a stream what a branch made
of it. The product in the branch that writes back to the stream is row-parallel, and those that it reads from,
with no product between, are column-parallel: queries, keys and values before the output projection, the first
matrices of a feed-forward part before the last. Products before these (low-rank ones, say) stay whole. A table
that token ids look up is shared over the vocabulary, and so is the product of as many outputs from which the loss
takes its log-softmax.

A pair is taken if its ranks need nothing of each other between its products. One that they do is left whole, and
so is one whose extents do not divide.

`Sharding` propagates the placements of the parameters through all operations, by the operators' `rules`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Literal, get_args

from echograph.errors import InputError, PlanError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.files import read_whole
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.dims import Ambiguous, Shape
from echograph.ir.passes.model import NORMS, overflow_flags, total_norms
from echograph.ir.passes.tensor_parallel.rules import (
    PARTIAL,
    VIEWS,
    WHOLE,
    Decision,
    OpSchema,
    Partial,
    Placement,
    Shard,
    decide,
    operator,
)
from echograph.ir.types import DType, Phase, TensorRole

Style = Literal["colwise", "rowwise", "vocab", "packed_qkv", "whole"]

PLAN: Mapping[str, Style] = {
    # GPT-2 and GPT-3 of Hugging Face (Conv1D)
    "*.attn.c_attn": "colwise", "*.attn.c_proj": "rowwise", "*.mlp.c_fc": "colwise", "*.mlp.c_proj": "rowwise",
    # Llama, Mistral, Qwen, Gemma, Phi, OPT
    **{f"*.{name}.lora_b": "colwise" for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")},
    "*.o_proj.lora_a": "rowwise", "*.down_proj.lora_a": "rowwise",
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
    # Mamba-2: all that is of heads, or of the groups that share B and C
    **{f"*.mixer.{name}": "colwise" for name in ("in_proj", "conv1d", "norm", "A_log", "D", "dt_bias")},
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
    if rank == 3 and read_by == "squeeze":  # channels of a convolution of each alone
        return WHOLE if style == "rowwise" else Shard(0, before)
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


_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm")
_ADDITIONS = ("aten.add", "aten.add_")
_INTEGERS = (DType.INT64, DType.INT32)
# Between a parameter and the product that reads it.
_CARRIERS = ("aten.t", "aten.transpose", "aten.permute", "aten.view", "aten.expand", "aten._to_copy")


@dataclass(frozen=True, slots=True)
class Pair:
    """Products that share what lies between them, in all layers that have them.

    Attributes:
        columns: names of the weights of the first products.
        rows: names of the weights of the last.
        packed: whether the first may be three matrices in one.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    packed: bool

    def plans(self) -> Iterator[dict[str, Style]]:
        """Ways to share it, the likeliest first: the style of each weight and its bias."""
        styles: tuple[Style, ...] = ("colwise", "packed_qkv") if self.packed else ("colwise",)
        for style in styles:
            yield _with_bias(self.columns, style) | _with_bias(self.rows, "rowwise")

    def joined(self, other: Pair) -> Pair:
        """This pair and the same one of other layers."""
        return Pair((*self.columns, *other.columns), (*self.rows, *other.rows), self.packed)

    def __str__(self) -> str:
        """What it is called in any layer."""
        names = (", ".join(dict.fromkeys(map(_any_layer, its))) for its in (self.columns, self.rows))
        return " -> ".join(names)


def infer_plan(
    graph: StepGraph,
    known: Mapping[str, Style],
    rows_of_vocabulary: int,
    fault: Callable[[Mapping[str, Style]], str],
) -> tuple[dict[str, Style], list[str]]:
    """Styles, by name, of what known patterns leave out; and a line for each pair of products that stays whole.

    They come before the known ones: where these fit but one of a pair, and the pair stays whole, so does that.

    Args:
        graph: the step.
        known: patterns for models that are known; their styles are kept.
        rows_of_vocabulary: a smaller table is not shared.
        fault: what is wrong with a plan; "" for nothing.
    """
    found = dict(_vocabulary(graph, known, rows_of_vocabulary))
    lines: list[str] = []
    for pair in _pairs(graph):
        if all(style_of(known, name) for name in (*pair.columns, *pair.rows)):
            continue
        faults = []
        for plan in pair.plans():
            together = {name: style_of(known, name) or style for name, style in plan.items()}
            faults.append(fault(together))
            if not faults[-1]:
                break
        found |= dict.fromkeys(together, "whole") if faults[-1] else together
        if faults[-1]:
            lines.append(f"{pair}: left whole: {'; as three matrices in one: '.join(faults)}")
    return found, lines


def _with_bias(names: Iterable[str], style: Style) -> dict[str, Style]:
    return {p: style for name in names for p in (name, _bias(name))}


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias" if name.endswith("weight") else f"{name}_bias"


def _any_layer(name: str) -> str:
    """A parameter's name with a star in place of each number."""
    return re.sub(r"(?<![^.])(\d+|\{\})(?![^.])", "*", name)


# -- pairs of products ---------------------------------------------------------------------------------------


def _pairs(graph: StepGraph) -> list[Pair]:
    """Those of the model."""
    pairs: dict[str, Pair] = {}
    for number in range(len(graph.blocks)):
        flow = _Flow(graph, number)
        for row in graph.blocks[number].ops:
            if graph.ops.phases[row] == Phase.FORWARD and graph.strings[graph.ops.name[row]] in _ADDITIONS:
                for pair in flow.pairs_of(row):
                    same = pairs.get(str(pair))
                    pairs[str(pair)] = pair if same is None else same.joined(pair)
    return list(pairs.values())


class _Flow:
    """What reads what in the forward pass of a block."""

    def __init__(self, graph: StepGraph, number: int) -> None:
        self.graph = graph
        self.products = {
            row: weight
            for row in graph.blocks[number].ops
            if graph.ops.phases[row] == Phase.FORWARD and (weight := weight_of(graph, row))
        }

    def pairs_of(self, row: int) -> Iterator[Pair]:
        """Of a residual addition, for each product that writes back to the stream."""
        stream, branch = self._branch(row)
        if branch is None:
            return
        for last in self._products_before([branch], stream)[0]:
            before, reads_stream = self._products_before(self._data(last), stream)
            if before and not reads_stream:
                columns = tuple(sorted({self.products[p] for p in before}))
                yield Pair(columns, (self.products[last],), len(columns) == 1 and self._is_packed(before[0]))

    def _is_packed(self, row: int) -> bool:
        """Whether a product makes three of each channel that it reads."""
        read, made = (
            self.graph.tensors.shape.row(i)[-1] for i in (self._data(row)[0], self.graph.ops.outputs.row(row)[0])
        )
        return bool(made == 3 * read)

    def _branch(self, row: int) -> tuple[int, int | None]:
        """The memory of the stream, and the tensor added to it; None where neither is made of the other."""
        graph = self.graph
        inputs = graph.ops.inputs.row(row)
        if len(inputs) == 2 and graph.tensors.shape.row(inputs[0]) == graph.tensors.shape.row(inputs[1]):
            for stream, branch in (inputs, inputs[::-1]):
                if self._leads_to(stream, branch):
                    return int(graph.root[stream]), branch
        return NONE, None

    def _leads_to(self, source: int, target: int) -> bool:
        """Whether a tensor is made of another one; what was made earlier than that other is not looked at."""
        graph, memory, first = self.graph, int(self.graph.root[source]), int(self.graph.maker[source])
        seen, left = {target}, [target]
        while left:
            index = left.pop()
            if graph.root[index] == memory:
                return True
            maker = int(graph.maker[index])
            if maker > first:
                new = set(graph.ops.inputs.row(maker)) - seen
                seen |= new
                left += new
        return False

    def _products_before(self, tensors: Iterable[int], stream: int) -> tuple[list[int], bool]:
        """The products from which tensors are made with no product between; whether the stream is one source.

        Positions (which expert a token goes to) are not followed.
        """
        graph, found, reads_stream = self.graph, [], False
        left = list(tensors)
        seen = set(left)
        while left:
            index = left.pop()
            maker = int(graph.maker[index])
            if graph.tensors.dtype[index] in _INTEGERS:
                continue
            if graph.root[index] == stream:
                reads_stream = True
            elif maker in self.products:
                found.append(maker)
            elif maker != NONE:
                new = set(graph.ops.inputs.row(maker)) - seen
                seen |= new
                left += new
        return sorted(set(found)), reads_stream

    def _data(self, row: int) -> list[int]:
        """What a product reads besides its weight and bias."""
        graph = self.graph
        return [i for i in graph.ops.inputs.row(row) if _parameter(graph, i) is None]


def weight_of(graph: StepGraph, row: int) -> str:
    """Name of the weight that a product multiplies its other input with; "" where there is none."""
    if graph.strings[graph.ops.name[row]] not in _MATRIX_PRODUCTS:
        return ""
    weights = (_parameter(graph, i) for i in graph.ops.inputs.row(row)[-3:] if len(graph.tensors.shape.row(i)) > 1)
    return next((name for name in weights if name), "")


def _parameter(graph: StepGraph, index: int) -> str | None:
    """Name of the parameter that a tensor is, turned or converted; None where it is something else."""
    while (maker := int(graph.maker[index])) != NONE and graph.strings[graph.ops.name[maker]] in _CARRIERS:
        index = graph.ops.inputs.row(maker)[0]
    is_parameter = graph.tensors.roles[index] == TensorRole.PARAMETER
    return graph.tensors[index].name if maker == NONE and is_parameter else None


# -- the vocabulary ------------------------------------------------------------------------------------------


def _vocabulary(graph: StepGraph, known: Mapping[str, Style], least: int) -> Iterator[tuple[str, Style]]:
    """Tables that token ids look up, and the products of which the loss takes a log-softmax over as many."""
    extents: set[int] = set()
    for number, rows in enumerate(block.ops for block in graph.blocks):
        for row in rows:
            if graph.strings[graph.ops.name[row]] != "aten.embedding":
                continue
            table, ids = graph.ops.inputs.row(row)[:2]
            extent, name = graph.tensors.shape.row(table)[0], _parameter(graph, table)
            if name and extent >= least and graph.tensors.role[_source(graph, number, ids)] == TensorRole.INPUT:
                extents.add(extent)
                if not style_of(known, name):
                    yield name, "vocab"
    for number, block in enumerate(graph.blocks):
        flow = _Flow(graph, number)
        for row in block.ops:
            if graph.strings[graph.ops.name[row]] == "aten._log_softmax":
                scores = graph.ops.inputs.row(row)[0]
                heads = flow._products_before([scores], NONE)[0]
                names = [flow.products[head] for head in heads if not style_of(known, flow.products[head])]
                if graph.tensors.shape.row(scores)[-1] in extents:
                    yield from _with_bias(names, "vocab").items()


def _source(graph: StepGraph, block: int, index: int) -> int:
    """What a tensor is a view of, in whichever block."""
    at = block, 0, index
    while (made := graph.source(*at)) is not None and graph.strings[graph.ops.name[made[2]]] in _CARRIERS:
        at = made[0], made[1], graph.ops.inputs.row(made[2])[0]
    return graph.value(*at)[2]


# -- what follows for all other tensors --------------------------------------------------------------------------


class Indivisible(PlanError):
    """An extent that the ranks cannot share evenly.

    Args:
        where: the tensor or operation.
        extent: what they would share.
        size: number of ranks.
    """

    def __init__(self, where: str, extent: int, size: int) -> None:
        super().__init__(f"{where} has an extent of {extent}, which {size} ranks do not share")
        self.extent = extent


class Sharding:
    """Placements and decisions, once per row of the tables.

    Operations run in program order; a block's ports have the placement of what its instances bind, which must be
    the same for all. A summand is passed on through views and through sums with other summands; where anything
    else reads it, it is summed over the ranks as soon as it is made. That is found by repetition: each round
    learns which summands to reduce at once, and what to cut: what an operation that every rank runs whole makes of
    the sequence, as a text in which images have found their places, where other instances of the block that
    reads it take shares of the sequence (Megatron's `scatter_to_sequence_parallel_region`).

    Args:
        graph: the step.
        size: ranks that share it.
        plan: module pattern -> style.
        vocab_multiple: each rank's rows of the vocabulary are a multiple of it.
        sequence_parallel: reduce into shares of the sequence, not to whole tensors.
        decided: what is known of an operation, by its row, and not asked of its rule; None where nothing is.

    Raises:
        PlanError: an extent does not divide, or the step has what cannot be shared.
    """

    def __init__(
        self,
        graph: StepGraph,
        *,
        size: int,
        plan: Mapping[str, Style],
        vocab_multiple: int = 128,
        sequence_parallel: bool = False,
        decided: Callable[[int], Decision | None] | None = None,
    ) -> None:
        self.graph, self.size, self.vocab_multiple = graph, size, vocab_multiple
        self._decided = decided
        self.sequence_parallel = sequence_parallel
        self.given = given_placements(graph, plan)
        self.norms, flags = total_norms(graph), overflow_flags(graph)
        self._of_all_gradients = {graph.ops.outputs.row(row)[-1] for row in (*self.norms, *flags)}
        self.reduced: set[int] = set(self._of_all_gradients)
        self.cut: set[int] = set()
        self.placement: dict[int, Placement] = {}
        self.decisions: dict[int, Decision] = {}
        self._demanded: set[int] = set()
        while not self._round() or self._cut_before_ports():
            pass
        self._check_ports()
        self.shapes = {index: self.local_shape(index, p) for index, p in self.placement.items()}
        for row, decision in self.decisions.items():
            for index, wanted in zip(graph.ops.inputs.row(row), decision.inputs, strict=True):
                self.local_shape(index, wanted)

    def local_shape(self, index: int, placement: Placement) -> Shape:
        """Shape of what one rank holds of a tensor.

        Raises:
            PlanError: the sharded extent does not divide.
        """
        shape: Shape = self.graph.tensors.shape.row(index)
        if not isinstance(placement, Shard):
            return shape
        part, shares = placement.extent(shape), placement.shares or self.size
        if placement.vocab:
            rows = self.vocab_multiple * ceil(part / shares / self.vocab_multiple)
        elif part % shares:
            raise Indivisible(self._where(index), part, self.size)
        else:
            rows = part // shares
        return (*shape[: placement.dim], placement.before * rows, *shape[placement.dim + 1 :])

    def is_partial(self, index: int) -> bool:
        """Whether the operation that makes the tensor leaves summands, which are then reduced."""
        maker = int(self.graph.maker[index])
        if maker == NONE or maker not in self.decisions:
            return False
        at = self.graph.ops.outputs.row(maker).index(index)
        return isinstance(self.decisions[maker].outputs[at], Partial)

    def reduction_target(self, index: int) -> Placement:
        """What summands are reduced to: whole, or with sequence parallelism a share of the positions."""
        workload, shape = self.graph.workload, self.graph.tensors.shape.row(index)
        batch, positions = workload.batch_size, workload.sequence_length
        shared = self.sequence_parallel and positions and positions % self.size == 0
        if not shared or self.graph.tensors.roles[index] != t.TensorRole.ACTIVATION:
            return WHOLE
        if len(shape) == 3 and shape[:2] == (batch, positions):
            return Shard(1)
        return Shard(0, batch) if len(shape) == 2 and shape[0] == batch * positions else WHOLE

    def _round(self) -> bool:
        """Propagates once; whether nothing more has to be reduced than was known."""
        self.placement, self.decisions, self._demanded = dict(self.given), {}, set()
        for block, begin, end, instance, _ in self.graph.programs[0].calls.tolist():
            for row in range(begin, end):
                if row not in self.decisions:
                    self._decide(block, instance, row)
        new = self._demanded - self.reduced
        self.reduced |= new
        return not new

    def _decide(self, block: int, instance: int, row: int) -> None:
        graph = self.graph
        inputs, outputs = graph.ops.inputs.row(row), graph.ops.outputs.row(row)
        name = operator(graph, row)
        site = OpSchema(
            name=name.removesuffix("_"),
            inputs=tuple(graph.tensors.shape.row(i) for i in inputs),
            placements=tuple(self._placement(block, instance, i) for i in inputs),
            outputs=tuple(graph.tensors.shape.row(i) for i in outputs),
            in_place=self._in_place(name, outputs, block, instance),
            forward=self._forward(block, instance, row),
            phase=t.Phase(int(graph.ops.phase[row])),
            size=self.size,
        )
        try:
            decision = self._at_gradients(site, row)
        except Ambiguous:
            raise PlanError(
                f"{graph.strings[graph.ops.module[row]]} (aten.{name}) {site.inputs[0]} -> {site.outputs[0]}: "
                "dims of equal extent cannot be told apart: take another batch size or sequence length"
            ) from None
        self.decisions[row] = decision
        for index, has, wanted in zip(inputs, site.placements, decision.inputs, strict=True):
            if isinstance(has, Partial) and not isinstance(wanted, Partial):
                self._demanded.add(self._first_summand(index))
        for index, made in zip(outputs, decision.outputs, strict=True):
            at_once = site.name in ("addmm", "baddbmm") or graph.tensors.roles[index] == t.TensorRole.GRADIENT
            if isinstance(made, Partial) and (at_once or index in self.reduced):
                self.reduced.add(index)
                made = self.reduction_target(index)
            self.placement[index] = self.reduction_target(index) if index in self.cut else made

    def _at_gradients(self, site: OpSchema, row: int) -> Decision:
        """The decision; norms for clipping and overflow flags are first those of a rank, then of all."""
        outputs = self.graph.ops.outputs.row(row)
        local = (self._decided and self._decided(row)) or decide(site)
        if (
            self.norms
            and site.phase == t.Phase.OPTIMIZER
            and self.graph.strings[self.graph.ops.name[row]] in NORMS
        ):
            local = Decision(site.placements, (WHOLE,) * len(outputs))
        made = (PARTIAL if i in self._of_all_gradients else p for i, p in zip(outputs, local.outputs, strict=True))
        return replace(local, outputs=tuple(made))

    def _placement(self, block: int, instance: int, index: int) -> Placement:
        graph = self.graph
        if index not in self.placement:
            placement: Placement = WHOLE
            if graph.tensors.port[index]:
                bound = graph.locate_tensor(graph.tensor_id(block, instance, index))
                placement = self._placement(*bound)
                if isinstance(placement, Partial):  # what crosses a block's border is never a summand
                    self._demanded.add(self._first_summand(bound[2]))
                    placement = WHOLE
            elif (alias := int(graph.tensors.alias_of[index])) != NONE:
                placement = self._placement(block, instance, alias)
            self.placement[index] = placement
        return self.placement[index]

    def _first_summand(self, index: int) -> int:
        """The tensor that a summand is a view of: reducing that one at once hides more of the reduction."""
        while True:
            maker = int(self.graph.maker[index])
            reads = self.graph.ops.inputs.row(maker)
            if operator(self.graph, maker) not in VIEWS or not isinstance(self.placement.get(reads[0]), Partial):
                return index
            index = reads[0]

    def _in_place(self, name: str, outputs: tuple[int, ...], block: int, instance: int) -> Placement | None:
        if not name.endswith("_") or not outputs:
            return None
        alias = int(self.graph.tensors.alias_of[outputs[0]])
        placement = self._placement(block, instance, alias) if alias != NONE else None
        return WHOLE if isinstance(placement, Partial) else placement

    def _forward(self, block: int, instance: int, row: int) -> tuple[Placement, ...]:
        forward = int(self.graph.ops.forward_op[row])
        if forward < NONE:
            bound = self.graph.blocks[block].instances[instance].op_bindings[-2 - forward]
            forward = self.graph.locate_op(bound)[2]
        return self.decisions[forward].inputs if forward in self.decisions else ()

    def _cut_before_ports(self) -> bool:
        """Finds what is whole where other instances of a block take a share of the sequence; if any is new."""
        graph, new = self.graph, set()
        for number, _, port, where in graph.bindings():
            first = graph.locate_tensor(graph.tensor_id(number, 0, port))
            for one, other in ((first, where), (where, first)):
                share = self._placement(*other)
                if (
                    isinstance(share, Shard)
                    and self._placement(*one) == WHOLE
                    and self.reduction_target(one[2]) == share
                    and int(graph.maker[one[2]]) in self.decisions
                ):
                    new.add(one[2])
        self.cut |= new
        return bool(new)

    def _check_ports(self) -> None:
        """All instances of a block must bind a port to tensors of one placement."""
        for number, instance, port, where in self.graph.bindings():
            if self._placement(*where) != self._placement(number, instance, port):
                raise PlanError(
                    f"{self._where(where[2])} is shared otherwise than what instance 0 of block "
                    f"'{self.graph.blocks[number].name}' takes in its place: leave it out of the plan"
                )

    def _where(self, index: int) -> str:
        graph, maker = self.graph, int(self.graph.maker[index])
        if maker == NONE:
            return graph.tensors[index].name
        return f"{graph.strings[graph.ops.module[maker]]} ({graph.strings[graph.ops.name[maker]]})"
