"""Public configurations, unedited: which compile, with how many parameters, and which lower and simulate.

python -m benchmarks.configurations [--only WORD ...] [--page docs/configurations.md]

Each configuration of configurations.toml is compiled, one sample a micro-batch, and predicted on DGX H100 in two
plans: tensor parallelism over two ranks with a pipeline of two stages, and ZeRO-3 over 64 GPUs. Prints a table in
Markdown; the exit status is 1 if a configuration does not compile.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echograph.errors import EchoError
from echograph.ir.graph import StepGraph
from echograph.models import from_config
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict
from echograph.workflow.system import System

PLANS = {"TP 2 x PP 2": Plan(gpus=64, tp=2, pp=2, zero=1), "ZeRO-3": Plan(gpus=64, zero=3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a configuration.

    Attributes:
        name: of the model.
        published: parameters as published, billions.
        counted: parameters of the graph, billions; None where it did not compile.
        cpu_s: processor time of compiling it, seconds.
        said: the error, or "".
        steps: plan -> step time in milliseconds, or what was said instead.
    """

    name: str
    published: float
    counted: float | None
    cpu_s: float
    said: str
    steps: dict[str, str]


def read(path: Path) -> list[dict[str, Any]]:
    """The configurations of a file."""
    models: list[dict[str, Any]] = tomllib.loads(path.read_text())["models"]
    return models


def run(model: dict[str, Any]) -> Outcome:
    """Compiles a configuration, and predicts it under each plan."""
    from echograph.frontend.pytorch.spec import StepSpec

    begin, name = time.process_time(), model["name"]
    about = {"name": name, "published": model["parameters"]}
    try:
        graph = compile_entry(from_config(model["config"], name=name.rpartition("/")[2]), StepSpec(), batch_size=1)
    except EchoError as error:
        spent = time.process_time() - begin
        return Outcome(**about, counted=None, cpu_s=spent, said=str(error), steps={})
    spent = time.process_time() - begin
    steps = {plan: _step(graph, PLANS[plan]) for plan in PLANS}
    return Outcome(**about, counted=graph.workload.parameters / 1e9, cpu_s=spent, said="", steps=steps)


def _step(graph: StepGraph, plan: Plan) -> str:
    try:
        result, _ = predict(graph, plan, System("dgx-h100"), memory=False)
    except EchoError as error:
        return str(error)
    return f"{result.step_s * 1e3:.1f} ms"


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"| configuration | parameters | published | {' | '.join(PLANS)} | compiled in, CPU s |"
    yield f"|---|---|---|{'---|' * len(PLANS)}---|"
    for one in outcomes:
        counted = f"{one.counted:.4g} B" if one.counted is not None else one.said
        steps = " | ".join(one.steps.get(plan, "") for plan in PLANS)
        yield f"| {one.name} | {counted} | {one.published:g} B | {steps} | {one.cpu_s:.1f} |"
    compiled = [one for one in outcomes if one.counted is not None]
    told = [f"{len(compiled)} of {len(outcomes)} compile"]
    told += [f"{sum(one.steps[p].endswith(' ms') for one in compiled)} under {p}" for p in PLANS]
    yield ""
    yield "; ".join(told) + "."


def main() -> int:
    """Runs them, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[""], help="words, one of which is in the name")
    parser.add_argument("--page", type=Path, help="a page to write the table to, below its first heading")
    given = parser.parse_args()
    models = [m for m in read(Path(__file__).with_suffix(".toml")) if any(w in m["name"] for w in given.only)]
    outcomes = []
    for model in models:
        outcomes.append(run(model))
        print(f"{model['name']}: {outcomes[-1].said or outcomes[-1].steps}", file=sys.stderr, flush=True)
    lines = "\n".join(table(outcomes))
    print(lines)
    if given.page:
        given.page.write_text(f"{given.page.read_text().partition(MARK)[0]}{MARK}\n\n{lines}\n")
    return int(any(one.counted is None for one in outcomes))


MARK = "<!-- made by python -m benchmarks.configurations -->"

if __name__ == "__main__":
    sys.exit(main())
