"""The plans that a search looks among: a tuple of axes, each with the values that divide.

An axis is a field of `Plan`. Its values are proposed, or given by whoever asks; each has to divide what the axes
before it left. What the graph and the machine say is read off them once (`SearchFacts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, isfinite, prod
from typing import Any

from echograph.errors import UnknownNameError, UsageError
from echograph.ir.graph import StepGraph
from echograph.ir.passes.pipeline.placement import layer_names
from echograph.ir.passes.pipeline.schedules import TURNING
from echograph.options import field_types, option_name
from echograph.simulator.clusters import Cluster
from echograph.workflow.plan import Plan, lighter_ends

PlanWords = Mapping[str, Any]
LEAST_TOKENS = 1024
"""Of a sequence that context-parallel ranks are proposed to be left with; other sizes can be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFacts:
    """What the graph and the cluster say of the sizes of plans.

    Attributes:
        gpus: numbers of GPUs that are asked about.
        global_batch: samples of a step over all GPUs.
        domain: GPUs of an NVLink domain.
        layers: layers of the model.
        experts: common divisor of the numbers of experts of its layers; 1 without experts.
        tokens: of a sequence; 0 where samples have none.
        batch: samples of the captured micro-batch.
    """

    gpus: tuple[int, ...]
    global_batch: int
    domain: int
    layers: int
    experts: int
    tokens: int
    batch: int

    @classmethod
    def of(cls, graph: StepGraph, cluster: Cluster, gpus: Sequence[int], global_batch: int) -> SearchFacts:
        """Reads them off a step and a cluster.

        Raises:
            UsageError: more GPUs than the cluster has.
        """
        for count in gpus:
            if not 1 <= count <= cluster.max_gpus:
                raise UsageError(
                    f"--gpus {count}: cluster {cluster.name} has 1 to {cluster.max_gpus} GPUs "
                    "(max_gpus of its file)"
                )
        return cls(
            gpus=tuple(gpus),
            global_batch=global_batch,
            domain=cluster.domain_gpus,
            layers=len(layer_names(graph)),
            experts=_experts(graph),
            tokens=graph.workload.sequence_length,
            batch=graph.workload.batch_size,
        )


def _experts(graph: StepGraph) -> int:
    """Experts of every layer, as the first dim of the weights of their grouped products has them."""
    names = [code for code, text in enumerate(graph.strings) if "_grouped_mm" in text]
    counts = []
    for row, name in enumerate(graph.ops.name.tolist()):
        if name in names:
            shapes = [graph.tensors.shape.row(i) for i in graph.ops.inputs.row(row)[:2]]
            counts += [int(shape[0]) for shape in shapes if len(shape) == 3]
    return gcd(*counts) if counts else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAxis:
    """One axis of the space.

    Attributes:
        name: a field of `Plan`.
        values: what is proposed, by the facts and by what the axes before it chose.
        divides: whether a value goes with them.
        why: what is said of those that do not.
    """

    name: str
    values: Callable[[SearchFacts, PlanWords], Sequence[Any]]
    divides: Callable[[Any, SearchFacts, PlanWords], bool] = lambda value, facts, chosen: True
    why: str = ""


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _left(chosen: PlanWords) -> int:
    """GPUs that the axes before an axis leave."""
    return int(chosen["gpus"] // prod(chosen.get(name, 1) for name in ("tp", "cp", "pp")))


def _samples(facts: SearchFacts, chosen: PlanWords) -> int:
    """Samples of each data-parallel rank, 0 where they do not divide."""
    each, rest = divmod(facts.global_batch, _left(chosen))
    return 0 if rest else each


def _micro_batches(facts: SearchFacts, chosen: PlanWords) -> int:
    return _samples(facts, chosen) // int(chosen["micro_batch"])


def _sizes(facts: SearchFacts, chosen: PlanWords, most: int) -> list[int]:
    return [n for n in _divisors(_left(chosen)) if n <= most]


def _context_sizes(facts: SearchFacts, chosen: PlanWords) -> list[int]:
    return [n for n in _sizes(facts, chosen, max(1, facts.tokens // LEAST_TOKENS)) if n == 1 or cuts(facts, n)]


def cuts(facts: SearchFacts, size: int) -> bool:
    """Whether so many context-parallel ranks cut the sequence in two balanced parts each."""
    return size == 1 or (facts.tokens > 0 and facts.tokens % (2 * size) == 0)


def _expert_sizes(facts: SearchFacts, chosen: PlanWords) -> list[int]:
    return [n for n in _divisors(facts.experts) if _shares_experts(n, facts, chosen)]


def _shares_experts(size: int, facts: SearchFacts, chosen: PlanWords) -> bool:
    if facts.experts % size:
        return False
    plan = Plan(**{name: chosen[name] for name in ("tp", "cp", "sequence_parallel")}, ep=size)
    return size % prod({"tp": plan.tp, "cp": plan.cp}[axis] for axis in plan.experts_across) == 0 and (
        _left(chosen) % plan.expert_ranks == 0
    )


def _chunks(facts: SearchFacts, chosen: PlanWords) -> list[int]:
    stages = chosen["pp"]
    if stages == 1:
        return [1]
    even = [n for n in _divisors(facts.layers // stages) if n == 1 or facts.layers % (stages * n) == 0]
    most = (facts.layers + 2) // stages
    return sorted({*even, *(n for n in range(2, most + 1) if _lighter(facts, stages * n))})


def _has_chunks(value: int, facts: SearchFacts, chosen: PlanWords) -> bool:
    stages = chosen["pp"]
    return value == 1 or (stages > 1 and 1 < value * stages <= facts.layers)


def _lighter(facts: SearchFacts, chunks: int) -> str:
    """Layers of each chunk with fewer at both ends, where none is left without; "" where they divide evenly."""
    return lighter_ends(facts.layers, chunks) if facts.layers + 2 >= 2 * chunks > 2 else ""


def _layouts(facts: SearchFacts, chosen: PlanWords) -> list[str]:
    chunks = chosen["pp"] * chosen["vpp"]
    return list(dict.fromkeys(("", _lighter(facts, chunks))))


def _laid_out(value: str, facts: SearchFacts, chosen: PlanWords) -> bool:
    if not value:
        return True  # evenly, and the first chunks take a layer more where it does not divide
    layers = [int(word) if word.isdigit() else -1 for word in value.split(",")]
    return len(layers) == chosen["pp"] * chosen["vpp"] > 1 and sum(layers) == facts.layers


def _schedules(facts: SearchFacts, chosen: PlanWords) -> list[str]:
    if chosen["pp"] == 1:
        return [""]
    # GPipe takes as long as 1F1B and more memory: it is there for those who ask for it.
    return ["interleaved"] if chosen["vpp"] > 1 else ["1f1b", "zb-h1"]


def _runs(value: str, facts: SearchFacts, chosen: PlanWords) -> bool:
    if chosen["pp"] == 1:
        return value == ""
    chunks = chosen["vpp"]
    if value in TURNING:
        return bool(chunks == 2)
    return value in ("", "interleaved") if chunks > 1 else value != "interleaved"


def _copies(facts: SearchFacts, chosen: PlanWords) -> list[int]:
    """One, or as many as leave each NVLink domain a copy of its own."""
    inside = max(1, facts.domain // (chosen["tp"] * chosen["cp"]))
    within = _left(chosen) // inside
    return [1, within] if _copied(within, facts, chosen) and within not in (0, 1) else [1]


def _copied(value: int, facts: SearchFacts, chosen: PlanWords) -> bool:
    ranks = _left(chosen)
    return value == 1 or (chosen["zero"] == 3 and 1 < value < ranks and ranks % value == 0)


def _stages_of_zero(facts: SearchFacts, chosen: PlanWords) -> Sequence[int]:
    # A lone rank has nobody to share with.
    return (0, 1, 2, 3) if _left(chosen) * chosen["cp"] > 1 else (0,)


def _micro(facts: SearchFacts, chosen: PlanWords) -> list[int]:
    return [n for n in _divisors(_samples(facts, chosen)) if _fed(n, facts, chosen)]


def _fed(value: int, facts: SearchFacts, chosen: PlanWords) -> bool:
    samples = _samples(facts, chosen)
    if not samples or samples % value or (facts.batch == 1 and value != 1):
        return False
    return chosen["vpp"] == 1 or samples // value % int(chosen["pp"]) == 0


AXES: tuple[SearchAxis, ...] = (
    SearchAxis(name="gpus", values=lambda facts, _: facts.gpus),
    SearchAxis(
        name="tp",
        values=lambda facts, chosen: _sizes(facts, chosen, facts.domain),
        divides=lambda value, facts, chosen: _left(chosen) % value == 0,
        why="does not divide the GPUs",
    ),
    SearchAxis(
        name="sequence_parallel",
        values=lambda _, chosen: (False, True) if chosen["tp"] > 1 else (False,),
        divides=lambda value, _, chosen: not value or chosen["tp"] > 1,
        why="needs --tp 2 or more",
    ),
    SearchAxis(
        name="cp",
        values=_context_sizes,
        divides=lambda value, facts, chosen: _left(chosen) % value == 0 and cuts(facts, value),
        why="does not divide the GPUs or the sequence",
    ),
    SearchAxis(
        name="pp",
        values=lambda facts, chosen: _sizes(facts, chosen, facts.layers),
        divides=lambda value, facts, chosen: _left(chosen) % value == 0 and value <= max(1, facts.layers),
        why="does not divide the GPUs, or is more than there are layers",
    ),
    SearchAxis(
        name="vpp",
        values=_chunks,
        divides=_has_chunks,
        why="is of no pipeline, or more than a stage has layers",
    ),
    SearchAxis(
        name="stage_layers",
        values=_layouts,
        divides=_laid_out,
        why="is of other layers or another number of chunks",
    ),
    SearchAxis(name="schedule", values=_schedules, divides=_runs, why="is of other --pp or --vpp"),
    SearchAxis(
        name="ep", values=_expert_sizes, divides=_shares_experts, why="does not divide the experts or their ranks"
    ),
    SearchAxis(name="zero", values=_stages_of_zero),
    SearchAxis(name="hsdp_replicas", values=_copies, divides=_copied, why="does not divide the ranks of --zero 3"),
    SearchAxis(
        name="micro_batch",
        values=_micro,
        divides=_fed,
        why="does not divide the samples of a rank, or a round of the pipeline",
    ),
    SearchAxis(name="recompute", values=lambda *_: ("none", "selective", "full")),
)
"""What a search varies, each with what it needs of the ones before it. Other fields of a plan vary where asked."""


@dataclass(slots=True)
class Space:
    """The plans of a search.

    Attributes:
        facts: of the graph and the cluster.
        axes: in order.
        base: what all plans have in common.
        asked: values that were given, by axis.
        refused: how many choices were left out while the plans were made, by what was wrong.
    """

    facts: SearchFacts
    axes: tuple[SearchAxis, ...]
    base: Plan
    asked: Mapping[str, tuple[Any, ...]]
    refused: Counter[str] = field(default_factory=Counter)

    def choices(self) -> Iterator[PlanWords]:
        """Every choice of values, in the order of the axes."""
        self.refused.clear()
        yield from self._from(0, {})

    def plan(self, chosen: PlanWords) -> Plan:
        """The plan of a choice.

        Raises:
            UsageError: no plan has these values.
        """
        return Plan(cluster=self.base.cluster, global_batch=self.base.global_batch, **chosen)

    def _from(self, at: int, chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if at == len(self.axes):
            yield dict(chosen)
            return
        axis = self.axes[at]
        given = self.asked.get(axis.name)
        for value in axis.values(self.facts, chosen) if given is None else given:
            if given is not None and not axis.divides(value, self.facts, chosen):
                self.refused[f"{option_name(axis.name)} {value}: {axis.why}"] += 1
                continue
            chosen[axis.name] = value
            yield from self._from(at + 1, chosen)
            del chosen[axis.name]


def space(
    graph: StepGraph,
    cluster: Cluster,
    base: Plan,
    asked: Mapping[str, tuple[Any, ...]] | None = None,
) -> Space:
    """The plans that a graph, a cluster and whoever asks leave.

    Args:
        graph: the step.
        cluster: where it runs.
        base: what all plans have in common; its `gpus` and `global_batch` are needed, and what else it gives is
            fixed.
        asked: values of fields of `Plan`, instead of those that are proposed.

    Raises:
        UsageError: the GPUs or the global batch are not given, or an axis cannot be searched over.
    """
    asked = dict(asked or {})
    given = {name: (value,) for name, value in base.given.items() if name not in ("cluster", "global_batch")}
    for name in asked:
        if name in given:
            raise UsageError(f"{option_name(name)}: is given and searched over: leave one of them out")
    asked = given | asked
    for name in ("passes", "cluster", "global_batch", "dp"):
        if name in asked:
            raise UsageError(
                f"{option_name(name)}: is nothing that a search of plans varies or takes: leave it out"
            )
    gpus = asked.pop("gpus", ())
    if not gpus:
        raise UsageError("--gpus: say how many GPUs there are, as --gpus 512, or --over gpus=256,512")
    if base.global_batch is None:
        raise UsageError("--global-batch: plans are compared by the same work: say how many samples a step has")
    known = {axis.name for axis in AXES}
    more = tuple(_extra(name) for name in asked if name not in known)
    facts = SearchFacts.of(graph, cluster, gpus, base.global_batch)
    return Space(
        facts=facts,
        axes=(*AXES[:1], *more, *AXES[1:]),
        base=Plan(cluster=base.cluster, global_batch=base.global_batch),
        asked=asked,
    )


def _extra(name: str) -> SearchAxis:
    """An axis for a field that a search leaves as it is unless it is asked for."""
    return SearchAxis(name=name, values=lambda *_: ())


def parse_axis(option: str, text: str) -> tuple[str, tuple[Any, ...]]:
    """An axis and its values, of "tp=1,2,4", "gpus=8..64:x2" or "gpus=8..64:+8".

    Args:
        option: how the option is called.
        text: what was given.

    Raises:
        UsageError: it is no axis with values, or a value is of another type than the field's.
        UnknownNameError: no plan has such a field.
    """
    key, separator, values = text.partition("=")
    name = key.strip().removeprefix("--").replace("-", "_")
    fields = field_types(Plan)
    if not separator or not values.strip():
        raise UsageError(f"{option} {text[:60]}: give NAME=VALUE,VALUE as tp=1,2,4, or gpus=8..1024:x2")
    if name not in fields:
        raise UnknownNameError(f"word in {option}:", key.strip(), [n.replace("_", "-") for n in fields])
    return name, tuple(typed(option, name, word, fields[name]) for word in words(option, values))


MOST_VALUES = 10_000


def words(option: str, text: str) -> list[str]:
    """The values of a list with commas, ranges written out.

    Raises:
        UsageError: a range has no end, or too many values.
    """
    found: list[str] = []
    for part in text.split(","):
        first, dots, rest = part.strip().partition("..")
        if not dots:
            if not first:
                raise UsageError(
                    f"{option} {text[:60]}: has an empty value: give values with one comma between them"
                )
            found.append(first)
            continue
        last, _, step = rest.partition(":")
        found += _range(option, part.strip(), first, last, step or "+1")
    if len(found) > MOST_VALUES:
        raise UsageError(f"{option} {text[:60]}: has {len(found):,} values: give at most {MOST_VALUES:,}")
    return list(dict.fromkeys(found))


def _range(option: str, text: str, first: str, last: str, step: str) -> list[str]:
    sign, by = step[:1], step[1:]
    try:
        low, high, size = float(first), float(last), float(by)
    except ValueError:
        low, high, size = 1.0, 0.0, 0.0
    grows = (sign == "x" and size > 1 and low > 0) or (sign == "+" and size > 0)
    if not (grows and low <= high < 1e15):
        raise UsageError(f"{option} {text[:60]}: give FIRST..LAST:xFACTOR or FIRST..LAST:+STEP, as 8..1024:x2")
    found: list[str] = []
    value = low
    while value <= high * (1 + 1e-12) and len(found) <= MOST_VALUES:
        found.append(f"{value:.12g}")
        value = value * size if sign == "x" else value + size
    return found


def typed(option: str, name: str, word: str, kind: type) -> Any:
    """A value of a field, of a word.

    Raises:
        UsageError: it is of another type.
    """
    if kind is bool:
        if word not in ("true", "false", "yes", "no"):
            raise UsageError(f"{option} {name.replace('_', '-')}={word[:40]}: give true or false")
        return word in ("true", "yes")
    try:
        value = kind(word)
        if kind is float and not isfinite(value):
            raise ValueError
        return value
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} {name.replace('_', '-')}={word[:40]}: give {what}") from None
