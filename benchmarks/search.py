"""Whether `echosim plan` is right: against measured plans, against every plan of a space, against published plans.

python -m benchmarks.search ranking TABLE RESULT.json
python -m benchmarks.search exhaustive [--only MODEL ...]
python -m benchmarks.search published TABLE [--only ID ...]

- ranking: RESULT.json is what `echosim validate TABLE -o` wrote. Of every two rows with the same model, GPUs and
  work (batch, sequence, types, trainer), and different plans, whose measured times are more than 5 % apart: is the
  one that was measured as the faster predicted to be? Then of every two with the same model and GPUs, whatever
  their work. Each family is listed, and the mean of families stands beside the mean of pairs. Steps that were
  computed rather than measured (`validation/computed.py`) are left out.
- exhaustive: small spaces of well-known models. Every plan is predicted, and the first by step that fits in memory
  is held against what the search found, as are the processor seconds of both.
- published: rows of TABLE, each searched among the neighbours of its plan: sizes half and twice as large, chunks
  as they divide, with and without recomputation. What is found must not be slower than what was published, as both
  are predicted. More values of an axis can only make it faster.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import echograph as eg
from echograph.errors import EchoError
from echograph.ir.passes.pipeline.placement import layer_names
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import lighter_ends
from echograph.workflow.predictor import Predictor
from echograph.workflow.search.space import AXES, space
from echograph.workflow.validation.computed import computed_sources
from echograph.workflow.validation.setup import Setup, setup
from echograph.workflow.validation.table import MeasuredStep, read_measured_steps

APART = 1.05
OF_MACHINE = ("model", "gpu_type", "n_gpus")
OF_WORK = (
    *OF_MACHINE, "layers", "hidden", "seq_len", "global_batch", "precision", "attention",
    "trainer",
)  # fmt: skip
OF_PLAN = ("tp", "pp", "vpp", "dp", "cp", "ep", "sequence_parallel", "zero_stage", "recompute", "micro_batch")

# -- the order of measured plans ------------------------------------------------------------------------------


@dataclass(slots=True)
class Order:
    """Pairs of plans of one family, and how many of them are predicted in the order that was measured."""

    pairs: int = 0
    right: int = 0


def ranking(
    rows: Iterable[MeasuredStep], predicted_s: Mapping[str, float], alike: Sequence[str] = OF_WORK
) -> dict[str, Order]:
    """The pairs of each family.

    Args:
        rows: measured steps.
        predicted_s: predictions of those that have one, by their ids.
        alike: columns that are the same in both rows of a pair.
    """
    groups: dict[tuple[str, ...], list[MeasuredStep]] = defaultdict(list)
    for row in rows:
        if row.id in predicted_s:
            groups[(row.family, *map(row.text, alike))].append(row)
    found: dict[str, Order] = defaultdict(Order)
    for (family, *_), members in groups.items():
        for one, other in combinations(members, 2):
            measured = one.measured_s / other.measured_s
            if all(one.text(name) == other.text(name) for name in OF_PLAN) or 1 / APART <= measured <= APART:
                continue
            found[family].pairs += 1
            found[family].right += (measured < 1) == (predicted_s[one.id] < predicted_s[other.id])
    return dict(found)


def print_ranking(table: Path, result: Path) -> None:
    """Prints the share of pairs in the right order, by family."""
    predicted = {
        row["id"]: row["predicted_s"] for row in json.loads(result.read_text())["rows"] if row["predicted_s"]
    }
    rows = read_measured_steps(table, grades=("A", "B"))
    computed = computed_sources(rows)
    measured = [row for row in rows if row.text("source") not in computed]
    for what, alike in (("the same model, GPUs and work", OF_WORK), ("the same model and GPUs", OF_MACHINE)):
        print(f"Pairs with {what}:")
        _print_orders(ranking(measured, predicted, alike))


def _print_orders(found: Mapping[str, Order]) -> None:
    for family, order in sorted(found.items(), key=lambda item: -item[1].pairs):
        print(f"  {family:<12} {order.right:>6,} of {order.pairs:>6,} pairs  {order.right / order.pairs:6.1%}")
    right, pairs = (sum(getattr(order, name) for order in found.values()) for name in ("right", "pairs"))
    families = sum(order.right / order.pairs for order in found.values()) / len(found)
    print(f"  {'all':<12} {right:>6,} of {pairs:>6,} pairs  {right / pairs:6.1%}; mean of families {families:.1%}")


# -- every plan of a space ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small space: a model, what its plans have in common, and what varies otherwise than proposed."""

    model: str
    gpus: int
    global_batch: int
    over: dict[str, tuple[Any, ...]]


_ONE: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (True,),
    "cp": (1,),
    "zero": (1,),
    "micro_batch": (1,),
    "vpp": (1, 2),
    "hsdp_replicas": (1,),
}
CASES = (
    Case(
        model="bert-large-uncased", gpus=8, global_batch=64,
        over={"recompute": ("none",), "zero": (0, 3), "vpp": (1, 2)},
    ),
    Case(
        model="gpt3-175b", gpus=256, global_batch=128,
        over=_ONE | {"tp": (8,), "micro_batch": (1, 2), "recompute": ("selective", "full")},
    ),
    Case(
        model="llama-3-70b", gpus=128, global_batch=64,
        over=_ONE | {"tp": (4, 8), "zero": (1, 3), "recompute": ("selective", "full")},
    ),
    Case(
        model="llama-3.1-405b", gpus=512, global_batch=64,
        over=_ONE | {"tp": (8,), "cp": (1, 2), "recompute": ("selective", "full")},
    ),
    Case(
        model="mixtral-8x7b", gpus=64, global_batch=64,
        over=_ONE | {"sequence_parallel": (False,), "tp": (1,), "recompute": ("none", "full")},
    ),
)  # fmt: skip
"""Of sizes at which most plans fit: memory of those that are too fast to fit costs more than their steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """What predicting every plan finds."""

    plans: int
    step_ps: int
    plan: eg.Plan


def exhaustive(
    graph: eg.StepGraph, system: eg.System, base: eg.Plan, over: Mapping[str, Sequence[Any]]
) -> Exhausted:
    """The fastest plan of a space that fits in memory, by predicting every one; of equal ones the first."""
    among = space(graph, system.cluster, base, {name: tuple(values) for name, values in over.items()})
    predictor, steps = Predictor(graph, system), []
    for number, chosen in enumerate(among.choices()):
        try:
            plan = among.plan(chosen)
            steps.append((predictor.predict(plan, memory=False, interval=False).step_ps, number, plan))
        except EchoError:
            continue  # which is no plan of this graph
    for step_ps, _, plan in sorted(steps, key=lambda entry: entry[:2]):
        memory = predictor.predict(plan).memory
        if memory is None or memory.fits:
            return Exhausted(plans=len(steps), step_ps=step_ps, plan=plan)
    raise SystemExit("no plan fits: give the case more GPUs")


def print_exhaustive(only: Sequence[str]) -> None:
    """Prints what both ways find, and what they cost."""
    print(f"{'model':<20} {'plans':>6} {'predicted':>9} {'every s':>8} {'search s':>8}  best")
    for case in CASES:
        if only and case.model not in only:
            continue
        graph, system = eg.compile(case.model, batch_size=2), eg.System("dgx-h100")
        base = eg.Plan(gpus=case.gpus, global_batch=case.global_batch)
        began = time.process_time()
        every = exhaustive(graph, system, base, case.over)
        between = time.process_time()
        found = eg.search(graph, base, system, over=case.over, top=1, front=False)
        spent = between - began, time.process_time() - between
        best = found.best[0]
        equal = (round(best.step_s * 1e12), best.plan) == (every.step_ps, every.plan)
        words = " ".join(f"{name}={value}" for name, value in best.plan.given.items() if name != "global_batch")
        print(
            f"{case.model:<20} {every.plans:>6,} {found.simulated:>9,} {spent[0]:>8.1f} {spent[1]:>8.1f}  "
            f"{'equal' if equal else 'OTHER'}: {best.step_s:.4f} s, {words}",
            flush=True,
        )
        assert best.step_s * 1e12 <= every.step_ps + 1, f"{case.model}: {every.plan} is faster"


# -- published plans ------------------------------------------------------------------------------------------

PUBLISHED = ("mlperf-019", "mlperf-001", "dgxc-006", "dgxc-023", "dgxc-169", "dgxc-186", "titan-019", "titan-011")
"""GPT-3 175B and Llama 3.1 70B where they run on the fewest GPUs; others can be asked for."""


def neighbours(plan: eg.Plan, layers: int) -> dict[str, tuple[Any, ...]]:
    """What is searched around a published plan of so many layers; words that no search varies are as they are."""
    known = {axis.name for axis in AXES}
    kept = {
        name: (value,) for name, value in plan.given.items() if name not in (*known, "cluster", "global_batch")
    }
    sizes = {name: _around(getattr(plan, name)) for name in ("tp", "pp", "micro_batch")}
    sizes |= {name: tuple(sorted({1, getattr(plan, name)})) for name in ("cp", "ep")}
    words = {
        "vpp": tuple(sorted({1, *_around(plan.vpp)})),
        "stage_layers": tuple(dict.fromkeys((plan.stage_layers, "", *_lighter(layers, plan)))),
        "sequence_parallel": (plan.sequence_parallel,),
        "schedule": ("",),
        "zero": (plan.zero,),
        "hsdp_replicas": (plan.hsdp_replicas,),
        "recompute": tuple(sorted({"none", plan.recompute})),
    }
    return kept | sizes | words


def _lighter(layers: int, plan: eg.Plan) -> set[str]:
    """Layouts with fewer layers at the ends, of the neighbours' numbers of chunks."""
    chunks = {pp * vpp for pp in _around(plan.pp) for vpp in (1, *_around(plan.vpp)) if pp > 1}
    return {layout for each in chunks if (layout := lighter_ends(layers, each))}


def _around(size: int | None) -> tuple[int, ...]:
    one = size or 1
    return tuple(sorted({max(1, one // 2), one, one * 2}))


def compiled(made: Setup) -> eg.StepGraph:
    """The step of a row, captured with several samples so that micro-batches can vary."""
    model = made.model
    entry = model.of_layers(model.layers)
    return compile_entry(entry, made.spec, batch_size=2, seq_len=made.seq_len, attention=model.attention)


def published(rows: Sequence[MeasuredStep]) -> Iterator[tuple[MeasuredStep, str]]:
    """What is said of each row."""
    graphs: dict[object, eg.StepGraph] = {}
    for row in rows:
        made = setup(row)
        system = eg.System(made.plan.cluster)
        if made.key not in graphs:
            graphs[made.key] = compiled(made)
        graph = graphs[made.key]
        yield row, held(graph, system, made.plan)


def held(graph: eg.StepGraph, system: eg.System, plan: eg.Plan) -> str:
    """The best neighbour of a plan beside it.

    Raises:
        AssertionError: the plan is faster than what was found.
    """
    over = neighbours(plan, len(layer_names(graph)))
    base = eg.Plan(gpus=plan.gpus, cluster=plan.cluster, global_batch=plan.global_batch)
    among = space(graph, system.cluster, base, over)
    if plan not in map(among.plan, among.choices()):
        return "is no plan of a search"
    own = Predictor(graph, system).predict(plan)
    try:
        found = eg.search(graph, base, system, over=over, top=1, front=False)
    except EchoError as error:
        return f"published {own.step_s:.4f} s; {error}"
    best = found.best[0]
    fits = own.memory is None or own.memory.fits
    assert best.step_s <= own.step_s or not fits, f"{plan} is faster than {best.plan}"
    words = " ".join(f"{n}={v}" for n, v in best.plan.given.items() if getattr(plan, n) != v) or "the same"
    return (
        f"published {own.step_s:.4f} s{'' if fits else ' (does not fit)'}, found {best.step_s:.4f} s "
        f"({best.step_s / own.step_s - 1:+.1%}) of {found.considered:,}, {found.simulated:,} predicted: {words}"
    )


def main() -> None:
    """Prints what one of the three shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_subparsers(dest="which", required=True)
    order = which.add_parser("ranking")
    order.add_argument("table", type=Path)
    order.add_argument("result", type=Path)
    which.add_parser("exhaustive").add_argument("--only", nargs="+", default=())
    of_table = which.add_parser("published")
    of_table.add_argument("table", type=Path)
    of_table.add_argument("--only", nargs="+", default=PUBLISHED)
    arguments = parser.parse_args()
    if arguments.which == "ranking":
        print_ranking(arguments.table, arguments.result)
    elif arguments.which == "exhaustive":
        print_exhaustive(arguments.only)
    else:
        for row, said in published(
            [row for row in read_measured_steps(arguments.table) if row.id in arguments.only]
        ):
            print(f"{row.id:<12} {said}", flush=True)


if __name__ == "__main__":
    main()
