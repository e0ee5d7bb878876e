"""The page of a search: the best plans, how sure their order is, the Pareto front, and why the rest lose."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from echograph.profiler.page import charts
from echograph.profiler.page.frame import banner, data, document, tiles
from echograph.units import format_bytes, format_count
from echograph.workflow.report import parts
from echograph.workflow.search.branch import Candidate, SearchResult, in_words, table

_US_PER_S = 1e6


def search_page(found: SearchResult) -> str:
    """A search as HTML that loads nothing, with its JSON in it.

    Args:
        found: the search.
    """
    best = found.best
    alike = f" The first {found.alike} cannot be told apart: their intervals overlap." if found.alike > 1 else ""
    body = [
        f"<h1>{escape(found.model)} on {escape(found.cluster)}</h1>"
        f"<p>{found.considered:,} plans, {found.simulated:,} predicted; {escape(found.proof)}.</p>",
        banner("Not proven:", "the search was ended before it had looked at all plans.") if found.ended else "",
        _tiles(found, best[0]) if best else "",
        parts.section("The best", f"The best by {found.objective.name} first.{alike}", _grid(found, best)),
        _certainty(found),
        _front(found),
        _losers(found),
        parts.section(
            "This page as data", "The JSON of echosim plan is its element 'plan'.", data("plan", found.to_json())
        ),
    ]
    return document(f"{found.model}: the best plan", body)


def _tiles(found: SearchResult, best: Candidate) -> str:
    rate, what = (best.tokens_per_s, "tokens") if best.tokens_per_s else (best.samples_per_s, "samples")
    low, high = map(parts.seconds, best.interval_s)
    shown = [
        (parts.seconds(best.step_s), f"a step of the best plan; 90 % interval {low} to {high}"),
        (f"{format_count(rate)}/s", f"{what} on {best.gpus:,} GPUs"),
    ]
    shown += [] if best.mfu is None else [(parts.percent(best.mfu), f"of the peak of {found.device}")]
    if best.device_bytes:
        capacity = format_bytes(best.capacity_bytes)
        shown.append((format_bytes(best.device_bytes), f"of a device's {capacity}, all that the framework holds"))
    return tiles(shown)


def _grid(found: SearchResult, shown: Sequence[Candidate]) -> str:
    titles, rows = table(found, shown)
    return parts.grid(titles, rows, (len(titles) - 1,))


def _certainty(found: SearchResult) -> str:
    rows = []
    for one, (at, *_, words) in zip(found.best, table(found, found.best)[1], strict=True):
        step, low, high = (value * _US_PER_S for value in (one.step_s, *one.interval_s))
        rows.append((f"{at}  {words}", (low, step, step, step, high)))
    drawn = charts.ranges(rows, "us", "90 % intervals of the step, and the step") if len(rows) > 1 else ""
    return parts.section("How sure their order is", "Plans whose intervals overlap cannot be told apart.", drawn)


def _front(found: SearchResult) -> str:
    held = [one for one in found.front if one.device_bytes]
    said = f"No other of the {found.simulated:,} predicted is as fast, as small and on as few GPUs as these."
    drawn = ""
    if len(held) > 2:
        said += " In the chart, memory of a device goes to the right and the step upwards."
        named = [(in_words(one.plan), float(one.device_bytes), one.step_s * _US_PER_S) for one in held]
        drawn = charts.points(named, "bytes", "us")
    return parts.section("Step, memory and GPUs", said, drawn, _grid(found, found.front))


def _losers(found: SearchResult) -> str:
    reasons = list(found.losers.reasons())
    bars = charts.bars([(reason, [float(count)]) for count, reason in reasons], ["plans"], "plans")
    return parts.section(
        "Why the others lose",
        "A choice that is left out does not divide, so it is no plan; it counts for all plans that would have it.",
        bars if reasons else "",
    )
