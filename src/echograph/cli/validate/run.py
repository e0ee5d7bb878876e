"""Predicts the rows of a table: models are spread over processes, each captured once for all its micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from echograph.cli.compose import compile_entry, predict_plan
from echograph.cli.validate.score import Outcome
from echograph.cli.validate.setup import Setup, setup
from echograph.cli.validate.table import Row, Skip
from echograph.errors import EchoError, PlanError
from echograph.ir.graph import StepGraph
from echograph.ir.passes.micro_batch import MicroBatch

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
    for outcome in _run(sorted(groups.values(), key=_work, reverse=True), jobs):
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


def _work(group: list[tuple[Row, Setup]]) -> int:
    """About how much there is to simulate, so that no process is left alone with the longest group."""
    return sum((made.plan.global_batch or 1) * made.plan.model_ranks // made.micro_batch for _, made in group)


def _predict_group(group: list[tuple[Row, Setup]]) -> list[Outcome]:
    """Rows of one model, over its micro-batches."""
    sizes = sorted({made.micro_batch for _, made in group})
    found: list[Outcome] = []
    captured: StepGraph | None = None
    for size in sizes:
        rows = [(row, made) for row, made in group if made.micro_batch == size]
        try:
            if captured is None:
                # A capture of one sample does not show where the batch is, so it cannot be resized.
                captured = _compile(rows[0][1], size if len(sizes) == 1 else max(2, size))
            graph = _resized(captured, rows[0][1])
        except EchoError as error:
            found += [_skipped(row, str(error)) for row, _ in rows]
            continue
        found += [_predict(row, made, graph) for row, made in rows]
    return found


def _resized(captured: StepGraph, made: Setup) -> StepGraph:
    """The step with a row's micro-batch; captured anew where the batch cannot be told from other extents."""
    try:
        return MicroBatch(size=made.micro_batch)(captured)
    except PlanError:
        return _compile(made, made.micro_batch)


def _compile(made: Setup, batch_size: int) -> StepGraph:
    return compile_entry(
        made.entry, made.spec, batch_size=batch_size, seq_len=made.seq_len, attention=made.attention
    )


def _predict(row: Row, made: Setup, graph: StepGraph) -> Outcome:
    try:
        peak = row.text("peak_mem_gib")
        result, _ = predict_plan(graph, made.plan, memory=bool(peak))
    except EchoError as error:
        return _skipped(row, str(error))
    record = result.to_json()
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
