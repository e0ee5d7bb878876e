"""How each operator carries a sharding from its inputs to its outputs, over one axis of ranks.

A tensor is *whole* on every rank, *sharded* along one dim, or *partial*: every rank holds a full-sized summand.
(The algebra is that of Xu et al., "GSPMD", 2021, and of torch.distributed.tensor.) A rule says which placement an
operator wants of each input and which each output then has; the pass makes the wanted ones. An operator without a
rule wants everything whole, which is always right. (The places where Megatron-LM communicates follow: Shoeybi et
al., "Megatron-LM", 2019, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from echograph.ir.graph import Graph
from echograph.ir.passes.dims import Ambiguous, Factor, Shape, kept_dims, product_factors, transposed, view_dim
from echograph.ir.types import Phase


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank holds all of it."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand.

    Attributes:
        experts: of the outputs of experts, or of gradients of their inputs: rows in the order of experts, each to
            be weighted, put back and added up by token. Those are sums too, and fewer: they are reduced after.
    """

    experts: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds a share of one dim.

    Attributes:
        dim: the dim.
        before: the dim is a merge of (before, shared, after) and the shared part is cut: a merge of batch and
            heads with sharded heads has the batch before it.
        vocab: the dim is the vocabulary, which is padded to divide.
        shares: in how many shares it is cut, if these are fewer than the ranks (key and value heads); as many
            neighbouring ranks as it takes hold the same one, and summands of its gradient. 0: one a rank.
    """

    dim: int
    before: int = 1
    vocab: bool = False
    shares: int = 0

    def at(self, dim: int, before: int | None = None) -> Shard:
        """The same sharding at another dim of another tensor."""
        return replace(self, dim=dim, before=self.before if before is None else before)

    def viewed(self, source: Shape, target: Shape) -> Shard | None:
        """The same sharding after a view of row-major memory; None where the view cuts across it."""
        moved = view_dim(self.dim, self.before, source, target)
        return self.at(*moved) if moved else None

    def finest(self, shape: Shape, size: int) -> Shard:
        """One share a rank, if the dim of a tensor has that many."""
        return replace(self, shares=0) if self.shares and self.extent(shape) % size == 0 else self

    def fitting(self, shape: Shape, size: int) -> Shard:
        """As many shares as the dim of a tensor can have, if it is a divisor of the ranks."""
        extent = self.extent(shape)
        return replace(self, shares=extent) if extent % size and size % extent == 0 and not self.shares else self

    def extent(self, shape: Shape) -> int:
        """What is cut of a tensor's dim."""
        return shape[self.dim] // self.before


Placement = Whole | Partial | Shard
WHOLE, PARTIAL, EXPERTS = Whole(), Partial(), Partial(experts=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSchema:
    """What a rule knows of an operation.

    Attributes:
        name: operator without namespace and in-place mark.
        inputs: global shapes of the inputs.
        placements: what the inputs have.
        outputs: global shapes of the outputs.
        in_place: placement of the memory that an in-place operator writes; None for any other.
        forward: placements that the forward operation wanted of its inputs; empty where there is none.
        phase: part of the step.
        size: number of ranks.
    """

    name: str
    inputs: tuple[Shape, ...]
    placements: tuple[Placement, ...]
    outputs: tuple[Shape, ...]
    in_place: Placement | None = None
    forward: tuple[Placement, ...] = ()
    phase: Phase = Phase.FORWARD
    size: int = 1

    @property
    def sharded(self) -> list[int]:
        """Inputs that are sharded, the largest first."""
        found = [i for i, p in enumerate(self.placements) if isinstance(p, Shard)]
        return sorted(found, key=lambda i: -prod(self.inputs[i]))


@dataclass(frozen=True, slots=True)
class Decision:
    """Placements that an operation wants of its inputs, and that its outputs then have."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


def decide(site: OpSchema) -> Decision:
    """The decision of the operator's rule, or all whole where none applies."""
    placements = tuple(map(_at_its_finest, site.placements, site.inputs, (site.size,) * len(site.inputs)))
    if site.phase == Phase.BACKWARD and EXPERTS in site.forward:
        # The gradient of a summand is that of the sum.
        placements = tuple(WHOLE if isinstance(p, Shard) else p for p in placements)
    site = replace(site, placements=placements)
    rule = RULES.get(site.name) or (elementwise if site.name.startswith(_FOREACH) else None)
    if EXPERTS in placements:
        made = _linear(site)
    else:
        made = rule(site) if rule and (site.placements or site.forward) else None
    return made or _all_whole(site)


def _at_its_finest(placement: Placement, shape: Shape, size: int) -> Placement:
    return placement.finest(shape, size) if isinstance(placement, Shard) else placement


def _linear(site: OpSchema) -> Decision | None:
    """Operators that are linear in the summands of experts pass them on; what else they read is whole.

    Gradients of a token's ways, through experts, a shared expert and the router, add up to summands of the token.
    """
    theirs = [p == EXPERTS for p in site.placements]
    if site.name == "add" and site.phase == Phase.BACKWARD and not site.sharded:
        return Decision(site.placements, (EXPERTS if all(theirs) else PARTIAL,))
    if site.name in ("add", "mul", "index_put", "scatter"):
        passes = all(theirs) if site.name == "add" else sum(theirs) == 1
    else:
        passes = theirs[0] and not any(theirs[1:]) and (site.name in VIEWS or site.name in _LINEAR)
    if passes:
        return Decision(tuple(EXPERTS if t else WHOLE for t in theirs), (EXPERTS,) * len(site.outputs))
    rule = RULES.get(site.name)
    return rule(site) if rule and site.sharded else None


def _all_whole(site: OpSchema) -> Decision:
    return Decision((WHOLE,) * len(site.inputs), (WHOLE,) * len(site.outputs))


def _view(site: OpSchema) -> Decision | None:
    source = site.placements[0]
    if isinstance(source, Partial):
        return Decision((PARTIAL,), (PARTIAL,) * len(site.outputs))
    if not isinstance(source, Shard):
        return None
    moved = [source.viewed(site.inputs[0], shape) for shape in site.outputs]
    if len(moved) == 1 and moved[0] is not None and not source.shares:
        # Channels cut finer than heads: whole heads are wanted, which some ranks then share.
        made = _of_one_head(site, source, moved[0]).fitting(site.outputs[0], site.size)
        return Decision((replace(source, shares=made.shares),), (made,))
    return None if None in moved else Decision((source,), tuple(m for m in moved if m is not None))


def _of_one_head(site: OpSchema, source: Shard, moved: Shard) -> Shard:
    """Channels that a view makes those of a single head: the head is what ranks hold."""
    target, last = site.outputs[0], len(site.inputs[0]) - 1
    splits = site.name == "view" and site.phase != Phase.BACKWARD and site.inputs[0] == (*target[:-2], target[-1])
    return moved.at(last) if splits and target[-2] == 1 and source.dim == last else moved


def _swap(site: OpSchema) -> Decision | None:
    """`t`, `transpose` and `permute`."""
    source = site.placements[0]
    if not isinstance(source, Shard):
        return _view(site)
    places = {o.index(source.dim) for o in transposed(site.name, site.inputs[0], site.outputs[0])}
    if len(places) != 1:
        raise Ambiguous
    return Decision((source,), (source.at(places.pop()),))


def elementwise(site: OpSchema) -> Decision | None:
    """Element by element, shapes broadcast.

    Sums of summands stay summands. So do sums of gradients of which some are whole: one rank counts those, and the
    gradients of several column-parallel layers are reduced once, in whatever order autograd adds them up.
    """
    kinds = set(site.placements)
    sums = site.name == "add" and len(site.inputs) > 1 and site.in_place is None and len(set(site.inputs)) == 1
    if sums and (kinds == {PARTIAL} or (kinds == {PARTIAL, WHOLE} and site.phase == Phase.BACKWARD)):
        return Decision(site.placements, (PARTIAL,) * len(site.outputs))
    rank = max(len(s) for s in (*site.inputs, *site.outputs))
    if site.in_place is not None:
        lead, shape = site.in_place, site.outputs[0] if site.outputs else site.inputs[0]
    elif site.sharded:
        first = site.sharded[0]
        lead, shape = site.placements[first], site.inputs[first]
    else:
        return None
    if not isinstance(lead, Shard):
        return None
    target = lead.at(lead.dim + rank - len(shape))
    extent = shape[lead.dim]

    def aligned(other: Shape) -> Placement:
        dim = target.dim - rank + len(other)
        return target.at(dim) if dim >= 0 and other[dim] == extent else WHOLE

    return Decision(tuple(map(aligned, site.inputs)), tuple(map(aligned, site.outputs)))


def _same_rank(site: OpSchema) -> Decision | None:
    """`cat`, `slice`, `split` and the like: the sharded dim stays, if every tensor has it.

    A last dim that is sharded and cut or joined holds several sharded parts (fused query, key and value): each
    rank holds its share of every part, as Megatron lays such weights out.
    """
    if not site.sharded:
        return _view(site) if len(site.inputs) == 1 and site.name in VIEWS else None
    source = site.placements[site.sharded[0]]
    if not isinstance(source, Shard) or len({len(s) for s in (*site.inputs, *site.outputs)}) != 1:
        return None
    cuts = len({s[source.dim] for s in (*site.inputs, *site.outputs)}) > 1
    joins = cuts and len(site.inputs) > 1
    if (cuts and source.dim != len(site.outputs[0]) - 1) or (joins and set(site.placements) != {source}):
        return None
    return Decision((source,) * len(site.inputs), (source,) * len(site.outputs))


def _removal(site: OpSchema) -> Decision | None:
    """`select` and `unbind` take one dim away."""
    source = site.placements[0]
    if not isinstance(source, Shard):
        return _view(site)
    places = _kept(site.inputs[0], site.outputs[0], source.dim)
    if len(places) != 1 or None in places:
        return None
    (place,) = places
    return Decision((source,), (source.at(place or 0),) * len(site.outputs))


def _insertion(site: OpSchema) -> Decision | None:
    """`select_backward` puts one dim back."""
    source = site.placements[0]
    if not isinstance(source, Shard):
        return None
    places = {dims[source.dim] for dims in kept_dims(site.outputs[0], site.inputs[0])}
    return Decision((source,), (source.at(places.pop()),)) if len(places) == 1 else None


def _kept(source: Shape, target: Shape, dim: int) -> set[int | None]:
    """Where a dim may be after some others were taken away; None for taken away itself."""
    return {dims.index(dim) if dim in dims else None for dims in kept_dims(source, target)}


def _reduction(site: OpSchema) -> Decision | None:
    source = site.placements[0]
    if not isinstance(source, Shard) or len(site.inputs) != 1:
        return None
    shape, made = site.inputs[0], site.outputs[0]
    if len(shape) == len(made):
        places: set[int | None] = {source.dim if made[source.dim] == shape[source.dim] else None}
    else:
        places = _kept(shape, made, source.dim)
    if len(places) != 1:
        raise Ambiguous
    (place,) = places
    if place is not None:
        return Decision((source,), (source.at(place),) * len(site.outputs))
    return Decision((source,), (PARTIAL,)) if site.name == "sum" else None


def _matmul(site: OpSchema) -> Decision | None:
    """Matrix products; a contraction of sharded dims gives summands. For `addmm` the pass adds the bias after."""
    factors = product_factors((*site.inputs, *site.outputs), len(site.inputs))
    left, right = len(site.inputs) - 2, len(site.inputs) - 1
    # Shares that ranks have in common are for what no product reads: the heads of queries have to divide.
    cut = {i: replace(p, shares=0) for i, p in enumerate(site.placements) if i >= left and isinstance(p, Shard)}
    if not cut:
        return None
    of = {i: next(f for f in factors if (i, p.dim) in f) for i, p in cut.items()}
    at, alike = min(cut), len(cut) == 2 and of[left] == of[right] and cut[left].before == cut[right].before
    if len(cut) == 2 and not alike and (of[left], of[right]) != (factors[-3], factors[-1]):
        at = right  # of two different cuts, the gradient of a weight keeps that of the output gradient
    return _along(site, at, cut[at], of[at])


def _along(site: OpSchema, at: int, placement: Shard, factor: Factor) -> Decision:
    """Operands cut along a factor; what does not have it is whole, a result is then the sum over it."""
    there = dict(factor)
    count = len(site.inputs)
    inputs = (placement.at(there[i]) if i in there else WHOLE for i in range(count))
    outputs = (placement.at(there[i]) if i in there else PARTIAL for i in range(count, count + len(site.outputs)))
    return Decision(tuple(inputs), tuple(outputs))


def _grouped_matmul(site: OpSchema) -> Decision | None:
    """Products of each expert's rows: [rows, k] with [experts, k, n]; of weights, [m, rows] with [rows, n]."""
    a, b, *offsets = site.placements
    rank = len(site.inputs[1])
    inner = rank == 3
    if inner and isinstance(b, Shard) and b.dim == 1:
        inputs: tuple[Placement, ...] = (b.at(1), b)
        made: Placement = EXPERTS
    elif isinstance(b, Shard) and b.dim == rank - 1:
        inputs, made = (WHOLE, b), b.at(len(site.outputs[0]) - 1)
    elif not inner and isinstance(a, Shard) and a.dim == 0:
        inputs, made = (a, WHOLE), a.at(1)
    else:
        return None
    return Decision((*inputs, *(WHOLE for _ in offsets)), (made,))


def _index(site: OpSchema) -> Decision | None:
    """Rows picked by one vector of positions, or put there; other dims stay as they are."""
    table, picked = site.inputs[0], (*site.inputs, *site.outputs)[2]
    lead = site.placements[0] if site.name == "index" else site.placements[-1]
    if not isinstance(lead, Shard) or len(site.inputs[1]) != 1 or picked != (*site.inputs[1], *table[1:]):
        return None
    wanted = (lead, WHOLE) if site.name == "index" else (lead, WHOLE, lead)
    return Decision(wanted, (lead,)) if lead.dim else None


def _scatter(site: OpSchema) -> Decision | None:
    """Element by element but along the one dim whose extent differs."""
    target, positions = site.inputs[:2]
    along = [dim for dim, extent in enumerate(target) if extent != positions[dim]]
    made = elementwise(site)
    return made if made and [p.dim for p in made.outputs if isinstance(p, Shard)] != along and along else None


def _attention(site: OpSchema) -> Decision | None:
    """Fused attention, by heads: query, key and value are [batch, heads, positions, channels]."""
    backward = site.name.endswith("backward")
    query, key, value = range(1, 4) if backward else range(3)
    cut = [site.placements[i] for i in (query, key, value)]
    if not any(isinstance(p, Shard) and p.at(1) == p for p in cut):
        return None
    heads, kv_heads = site.inputs[query][1], site.inputs[key][1]

    def by_head(shape: Shape) -> Placement:
        if len(shape) < 3 or shape[1] not in (heads, kv_heads):
            return WHOLE
        return Shard(1) if shape[1] == heads else Shard(1).fitting(shape, site.size)

    return Decision(tuple(map(by_head, site.inputs)), tuple(map(by_head, site.outputs)))


def _scan(site: OpSchema) -> Decision | None:
    """A scan by heads: x is [batch, positions, heads, channels]; B and C, queries and keys have groups."""
    if not site.sharded or any(shape[2] % site.size for shape in site.inputs if len(shape) > 1):
        return None

    def by_head(shape: Shape) -> Placement:
        return Shard(2 if len(shape) > 1 else 0)

    return Decision(tuple(map(by_head, site.inputs)), tuple(map(by_head, site.outputs)))


def _channels(site: OpSchema) -> Decision | None:
    """A convolution of each channel alone: signals are [batch, channels, positions], the rest begins with them."""
    if not site.sharded:
        return None

    def cut(shape: Shape) -> Placement:
        return Shard(1 if len(shape) == 3 else 0)

    return Decision(tuple(map(cut, site.inputs)), tuple(map(cut, site.outputs)))


def _norm(site: OpSchema) -> Decision | None:
    """Layer and RMS norms need the normalised dims whole; summands of their gradients come of other dims."""
    if not site.sharded:
        return None
    backward = site.name.endswith("backward")
    source = site.placements[site.sharded[0]]
    rank = len(site.inputs[0])
    weights = [s for s in site.inputs if len(s) < rank]
    normalised = max((len(s) for s in weights), default=1)
    if not isinstance(source, Shard) or source.dim >= rank - normalised:
        return None

    def cut(shape: Shape) -> Placement:
        return source if len(shape) == rank else WHOLE

    made = [PARTIAL if backward and len(s) < rank else cut(s) for s in site.outputs]
    return Decision(tuple(map(cut, site.inputs)), tuple(made))


def _softmax(site: OpSchema) -> Decision | None:
    """Element by element for any dim but the last, over which it sums."""
    return None if any(_cut_last(site, i) for i in site.sharded) else elementwise(site)


def _cut_last(site: OpSchema, index: int) -> bool:
    placement = site.placements[index]
    return isinstance(placement, Shard) and placement.dim == len(site.inputs[index]) - 1


def _log_softmax(site: OpSchema) -> Decision | None:
    """Over a sharded last dim: the pass writes out the parallel form (see `tensor_parallel`)."""
    return elementwise(site) if len(site.inputs[0]) == 2 else _softmax(site)


def _nll_loss(site: OpSchema) -> Decision | None:
    if not _cut_last(site, 0) or len(site.inputs[0]) != 2:
        return None
    return Decision((site.placements[0], *(WHOLE,) * (len(site.inputs) - 1)), (WHOLE,) * len(site.outputs))


def _nll_loss_backward(site: OpSchema) -> Decision | None:
    if not site.forward or not isinstance(site.forward[0], Shard):
        return None
    kept = site.outputs[0]  # log-probabilities that autograd keeps, as the loss had them
    return Decision(
        tuple(site.forward[0] if shape == kept else WHOLE for shape in site.inputs), (site.forward[0],)
    )


def _embedding(site: OpSchema) -> Decision | None:
    """Rows of a sharded table: a rank that lacks a row adds zeros. Sharded channels stay sharded."""
    table = site.placements[0]
    if not isinstance(table, Shard):
        return None
    made = PARTIAL if table.dim == 0 else table.at(len(site.outputs[0]) - 1)
    return Decision((table, WHOLE), (made,))


def _embedding_backward(site: OpSchema) -> Decision | None:
    table = site.forward[0] if site.forward else WHOLE
    if not isinstance(table, Shard):
        return None
    gradient = WHOLE if table.dim == 0 else table.at(len(site.inputs[0]) - 1)
    return Decision((gradient, WHOLE), (table,))


_FOREACH = ("_foreach_", "_fused_", "_amp_foreach_")
_LINEAR = ("neg", "div", "sum", "_to_copy", "expand", "clone", "index", "slice_backward", "select_backward")
_RULES: Sequence[tuple[Callable[[OpSchema], Decision | None], str]] = (
    (_view, "view _unsafe_view reshape unsqueeze squeeze alias detach"),
    (_swap, "t transpose permute numpy_T"),
    (_same_rank, "split chunk split_with_sizes slice narrow slice_backward cat"),
    (_removal, "select unbind"),
    (_insertion, "select_backward"),
    (_reduction, "sum mean amax amin max"),
    (_matmul, "mm addmm bmm baddbmm"),
    (_grouped_matmul, "_grouped_mm"),
    (_index, "index index_put"),
    (_scatter, "scatter"),
    (
        _attention,
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward",
    ),
    (_scan, "ssd_scan ssd_scan_backward gated_delta_rule gated_delta_rule_backward"),
    (_channels, "causal_conv1d causal_conv1d_backward"),
    (_norm, "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward"),
    (_softmax, "_softmax _safe_softmax _softmax_backward_data"),
    (_log_softmax, "_log_softmax _log_softmax_backward_data"),
    (_nll_loss, "nll_loss_forward"),
    (_nll_loss_backward, "nll_loss_backward"),
    (_embedding, "embedding"),
    (_embedding_backward, "embedding_dense_backward"),
    (
        elementwise,
        "add sub rsub mul div neg pow abs exp log log1p sqrt rsqrt reciprocal cos sin tanh sigmoid silu gelu relu"
        " leaky_relu softplus erf where masked_fill maximum minimum clamp clone copy _to_copy expand"
        " native_dropout bernoulli gelu_backward silu_backward tanh_backward sigmoid_backward threshold_backward"
        " native_dropout_backward softplus_backward eq ne lt le gt ge logical_not logical_and logical_or addcmul"
        " addcdiv lerp ones_like zeros_like full_like fill square",
    ),
)
RULES = {name: rule for rule, names in _RULES for name in names.split()}
_PARTS = "split chunk split_with_sizes slice narrow"
VIEWS = {n for rule, names in _RULES if rule in (_view, _swap, _removal) for n in names.split()} | {
    *_PARTS.split()
}
"""Operators that only rename memory, and so pass summands on."""


def operator(graph: Graph, row: int) -> str:
    """An operation's operator without its namespace."""
    name: str = graph.strings[graph.ops.name[row]]
    return name.rpartition(".")[2]
