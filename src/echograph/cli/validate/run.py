"""Predicts the rows of a table: each model compiled once, models spread over processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from echograph.cli.compose import compile_entry, predict_plan
from echograph.cli.validate.score import Outcome
from echograph.cli.validate.setup import Setup, setup
from echograph.cli.validate.table import Row, Skip
from echograph.errors import EchoError
from echograph.ir.graph import StepGraph

GIB = 2**30


def validate(rows: Sequence[Row], jobs: int = 1, say: Callable[[str], None] = lambda _: None) -> list[Outcome]:
    """A prediction for every row that can be simulated, in the order of the rows.

    Args:
        rows: measured steps.
        jobs: processes.
        say: told how far it is.
    """
    groups: dict[object, list[tuple[Row, Setup]]] = defaultdict(list)
    done: dict[str, Outcome] = {}
    for row in rows:
        try:
            row.measured_s  # noqa: B018 - a row without is skipped before anything is compiled
            made = setup(row)
            groups[made.key].append((row, made))
        except (Skip, EchoError) as why:
            done[row.id] = _skipped(row, str(why))
    for outcome in _run(sorted(groups.values(), key=len, reverse=True), jobs):
        done[outcome.id] = outcome
        say(f"{len(done)} of {len(rows)} rows")
    return [done[row.id] for row in rows]


def _run(groups: list[list[tuple[Row, Setup]]], jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        for group in groups:
            yield from _predict_group(group)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        for future in as_completed([pool.submit(_predict_group, group) for group in groups]):
            yield from future.result()


def _predict_group(group: list[tuple[Row, Setup]]) -> list[Outcome]:
    """Rows of one model and micro-batch."""
    try:
        graph = _compile(group[0][1])
    except EchoError as error:
        return [_skipped(row, str(error)) for row, _ in group]
    return [_predict(row, made, graph) for row, made in group]


def _compile(made: Setup) -> StepGraph:
    return compile_entry(
        made.entry, made.spec, batch_size=made.plan.micro_batch, seq_len=made.seq_len, attention=made.attention
    )


def _predict(row: Row, made: Setup, graph: StepGraph) -> Outcome:
    try:
        result, _ = predict_plan(graph, made.plan)
    except EchoError as error:
        return _skipped(row, str(error))
    record = result.to_json()
    peak = row.text("peak_mem_gib")
    return Outcome(
        id=row.id,
        family=row.family,
        measured_s=row.measured_s,
        predicted_s=record["step_time_s"],
        tokens_per_s=record["tokens_per_s"],
        peak_bytes=record["memory"]["peak_bytes"] if record["memory"] else None,
        measured_peak_bytes=round(float(peak) * GIB) if peak else None,
        assumed=made.assumed,
    )


def _skipped(row: Row, why: str) -> Outcome:
    return Outcome(id=row.id, family=row.family, skipped=" ".join(why.split()))
