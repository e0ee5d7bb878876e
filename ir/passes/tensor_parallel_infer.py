"""Which parameters tensor parallelism shares in a model that no pattern is known for, from the graph alone.

A residual addition adds to a stream what a branch made of it. The product in the branch that writes back to the
stream is row-parallel, and those that it reads from, with no product between, are column-parallel: queries, keys
and values before the output projection, the first matrices of a feed-forward part before the last. Products before
these (low-rank ones, say) stay whole. A table that token ids look up is shared over the vocabulary, and so is the
product of as many outputs from which the loss takes its log-softmax.

A pair is taken if its ranks need nothing of each other between its products. One that they do is left whole, and
so is one whose extents do not divide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.tensor_parallel_plan import Style, style_of
from echograph.ir.types import DType, Phase, TensorRole

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm")
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
            if graph.ops.phase[row] == Phase.FORWARD and graph.strings[graph.ops.name[row]] in _ADDITIONS:
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
            if graph.ops.phase[row] == Phase.FORWARD and (weight := weight_of(graph, row))
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
    if graph.strings[graph.ops.name[row]] not in _PRODUCTS:
        return ""
    weights = (_parameter(graph, i) for i in graph.ops.inputs.row(row)[-3:] if len(graph.tensors.shape.row(i)) > 1)
    return next((name for name in weights if name), "")


def _parameter(graph: StepGraph, index: int) -> str | None:
    """Name of the parameter that a tensor is, turned or converted; None where it is something else."""
    while (maker := int(graph.maker[index])) != NONE and graph.strings[graph.ops.name[maker]] in _CARRIERS:
        index = graph.ops.inputs.row(maker)[0]
    is_parameter = graph.tensors.role[index] == TensorRole.PARAMETER
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
