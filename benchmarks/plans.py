"""What one more plan costs: GPT-3 175B on 1,024 GPUs under 62 plans, and under 500 more.

python -m benchmarks.plans [--more 500] [--alone 8] [--calculon CHECKOUT]
python -m benchmarks.plans --space 5000 [--model gpt3-175b] [--gpus 1024] [--global-batch 1536] [--jobs 2]

The first 62 plans are ones that Calculon (Isaev et al., "Calculon: a Methodology and Tool for High-Level
Codesign of Systems and Large Language Models", SC 2023) can express, too; from a checkout of its sources it
predicts them in the same run. The others vary all that a search varies. Some are predicted alone as well, and have
to be equal to the picosecond. Times are processor seconds of one process: on a busy machine their ratio counts.

With --space, as many plans of what `echosim plan` looks among are predicted, spread evenly over it, in several
processes: the step of each alone, without bounds that leave any out.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import echograph as eg
from echograph.errors import EchoError
from echograph.workflow.predict import predict
from echograph.workflow.predictor import Predictor
from echograph.workflow.search.space import space
from echograph.workflow.workers import WorkerOptions, workers

GPUS, LAYERS, GLOBAL_BATCH, SEED = 1024, 96, 1536, 20


def expressible() -> list[eg.Plan]:
    """62 plans of words that a closed form of transformers has as well."""
    words = {
        "tp": (2, 4, 8), "pp": (4, 8, 16, 32), "vpp": (1, 3), "micro_batch": (1, 2),
        "recompute": ("selective", "full"), "zero": (0, 1), "sequence_parallel": (True,),
    }  # fmt: skip
    return Random(SEED).sample(_plans(words), 62)


def more(count: int) -> list[eg.Plan]:
    """Plans over everything that a search varies."""
    words = {
        "tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8, 16, 32), "vpp": (1, 2, 3, 4, 6), "micro_batch": (1, 2, 4),
        "recompute": ("none", "selective", "full"), "zero": (0, 1, 2, 3), "sequence_parallel": (False, True),
    }  # fmt: skip
    return Random(SEED).sample(_plans(words), count)


def _plans(words: dict[str, tuple[Any, ...]]) -> list[eg.Plan]:
    every = (dict(zip(words, values, strict=True)) for values in product(*words.values()))
    return [eg.Plan(gpus=GPUS, global_batch=GLOBAL_BATCH, **each) for each in every if _fits(**each)]


def _fits(tp: int, pp: int, vpp: int, micro_batch: int, sequence_parallel: bool, **_: object) -> bool:
    """Whether layers, ranks and the batch divide."""
    count, rest = divmod(GLOBAL_BATCH, GPUS // tp // pp * micro_batch)
    chunks = not LAYERS % (pp * vpp) and (vpp == 1 or (pp > 1 and not count % pp))
    return not rest and count > 0 and chunks and (tp > 1 or not sequence_parallel)


def calculon(checkout: Path) -> Callable[[eg.Plan], None]:
    """Calculon's prediction of a plan on its H100."""
    sys.path.insert(0, str(checkout))
    import calculon as package
    from calculon.llm import Llm

    read = package.io.read_json_file
    model = Llm.Application(read(str(checkout / "models" / "gpt3-175B.json")))
    system = read(str(checkout / "systems" / "h100_80g_nvl8.json"))

    def predict_one(plan: eg.Plan) -> None:
        execution = {
            "num_procs": GPUS, "tensor_par": plan.tp, "pipeline_par": plan.pp,
            "data_par": GPUS // plan.tp // plan.pp,
            "tensor_par_net": 0, "pipeline_par_net": 1, "data_par_net": 1, "batch_size": GLOBAL_BATCH,
            "microbatch_size": plan.micro_batch, "datatype": "float16", "fused_activation": True,
            "attention_type": "multihead", "pipeline_interleaving": plan.vpp, "optimizer_sharding": plan.zero > 0,
            "activation_recompute": {"selective": "attn_only"}.get(plan.recompute, plan.recompute),
            "tensor_par_comm_type": "rs_ag", "tensor_par_overlap": "none", "seq_par_ag_redo": False,
            "data_par_overlap": False, "weight_offload": False, "activations_offload": False,
            "optimizer_offload": False, "training": True,
        }  # fmt: skip
        one = Llm(model, _Silent())
        one.compile(package.System(system), Llm.Execution.from_json(execution))
        with suppress(Llm.Error):  # a plan that does not fit, which it says once all is worked out
            one.run(package.System(system))

    return predict_one


class _Silent:
    """A log that nobody reads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def timed(call: Callable[[eg.Plan], object], plans: Sequence[eg.Plan]) -> tuple[list[float], list[Any]]:
    """Processor seconds of each call, and what they answer."""
    spent, answers = [], []
    for plan in plans:
        began = time.process_time()
        answers.append(call(plan))
        spent.append(time.process_time() - began)
    return spent, answers


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a worker predicts: plans that follow each other in a space. Calling it makes the worker."""

    graph: eg.StepGraph
    system: eg.System

    def __call__(self) -> Callable[[list[eg.Plan]], list[int]]:
        """What predicts plans: picoseconds of those that fit the graph."""
        predictor = Predictor(self.graph, self.system)

        def answer(plans: list[eg.Plan]) -> list[int]:
            found = []
            for plan in plans:
                with suppress(EchoError):
                    found.append(predictor.predict(plan, memory=False, interval=False).step_ps)
            return found

        return answer


def print_space(arguments: argparse.Namespace) -> None:
    """Prints what plans of a search's space cost."""
    graph, system = eg.compile(arguments.model, batch_size=2), eg.System("dgx-h100")
    base = eg.Plan(gpus=arguments.gpus, global_batch=arguments.global_batch)
    among = space(graph, system.cluster, base, {})
    choices = list(among.choices())
    step = max(1, len(choices) // arguments.space)
    plans = [among.plan(chosen) for chosen in choices[::step][: arguments.space]]
    # Neighbours have most in common.
    stretches = [plans[at : at + 25] for at in range(0, len(plans), 25)][::-1]
    began, found = time.perf_counter(), 0
    with workers(Stretch(graph, system), WorkerOptions(jobs=arguments.jobs)) as at:
        while stretches or at.busy:
            while at.free and stretches:
                at.give(stretches.pop())
            found += sum(len(answer) for _, answer in at.take())
    wall = time.perf_counter() - began
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent, peak = sum(each.ru_utime for each in used), max(each.ru_maxrss for each in used) / 1024
    print(
        f"{len(plans):,} of {len(choices):,} plans of {arguments.model} on {arguments.gpus:,} GPUs, {found:,} of "
        f"them possible: {wall:.0f} s on {arguments.jobs} processes, {spent:.0f} s of processor, "
        f"{1e3 * spent / max(1, found):.1f} ms a plan; {peak:.0f} MiB the largest process"
    )


def main() -> None:
    """Prints what plans cost one after the other, alone, and in Calculon; or those of a space."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--more", type=int, default=0, help="how many of the 500 others")
    parser.add_argument("--alone", type=int, default=8, help="how many of all to predict alone, too")
    parser.add_argument("--calculon", type=Path, help="a checkout of Calculon")
    parser.add_argument("--space", type=int, default=0, help="how many plans of a search's space instead")
    parser.add_argument("--model", default="gpt3-175b", help="with --space: of the zoo")
    parser.add_argument("--gpus", type=int, default=GPUS, help="with --space")
    parser.add_argument("--global-batch", type=int, default=GLOBAL_BATCH, help="with --space")
    parser.add_argument("--jobs", type=int, default=2, help="with --space: processes")
    arguments = parser.parse_args()
    if arguments.space:
        print_space(arguments)
        return
    step, system = eg.compile("gpt3-175b", batch_size=2), eg.System("dgx-h100")
    plans = expressible() + more(500)[: arguments.more]
    predictor = Predictor(step, system)
    spent, answers = timed(lambda plan: predictor.predict(plan, memory=False, interval=False), plans)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    mean = 1e3 * sum(spent[1:]) / (len(spent) - 1)
    print(f"{len(plans)} plans: the first {spent[0]:.2f} s, then {mean:.1f} ms a plan; {peak:.0f} MiB")
    if arguments.calculon:
        theirs, _ = timed(calculon(arguments.calculon), expressible())
        ours, closed = 1e3 * sum(spent[1:62]) / 61, 1e3 * sum(theirs) / 62
        print(f"of the first 62: {ours:.1f} ms, Calculon {closed:.2f} ms: {ours / closed:.0f} times")
    chosen = Random(SEED).sample(range(1, len(plans)), min(arguments.alone, len(plans) - 1))
    alone, whole = timed(lambda plan: predict(step, plan, system)[0], [plans[which] for which in chosen])
    for which, one in zip(chosen, whole, strict=True):
        assert answers[which].step_ps == one.step_ps, (
            f"{plans[which]}: {answers[which].step_ps}, alone {one.step_ps}"
        )
    if alone:
        ratio = sum(alone) / sum(spent[which] for which in chosen)
        print(
            f"{len(alone)} of them alone: {1e3 * sum(alone) / len(alone):.0f} ms, {ratio:.1f} times; equal steps"
        )


if __name__ == "__main__":
    main()
