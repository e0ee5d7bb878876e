"""The points of a sweep: what is asked, with one value of each axis.

An axis is a field of the plan, of the system's options or of the scenario, or a key of the cluster's file, as
`cluster.network.nic_GBps`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, get_origin

from echograph import __version__
from echograph.errors import UnknownNameError, UsageError
from echograph.options import field_types, given
from echograph.workflow.plan import Plan
from echograph.workflow.scenario import Scenario
from echograph.workflow.search.space import typed, words
from echograph.workflow.system import SystemOptions

MOST_POINTS = 1_000_000
OF_CLUSTER = "cluster."


@dataclass(frozen=True, slots=True, kw_only=True)
class GridAxis:
    """One axis: its name, as rows have it, and its values."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """What is asked at one point.

    Attributes:
        at: the value of each axis, by its name.
        plan: how the step is spread.
        options: what is otherwise than the cluster's file says.
        scenario: what is asked beyond that.
    """

    at: Mapping[str, Any]
    plan: Plan
    options: SystemOptions
    scenario: Scenario

    def key(self, graph: str, system: str) -> str:
        """What tells it from all points that have another answer.

        Args:
            graph: what tells the graph from others.
            system: what tells the system from others, whatever options made it.
        """
        said = [given(replace(self.plan, cluster=Plan().cluster)), given(self.scenario)]
        text = json.dumps([__version__, graph, system, *said], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class WrongPoint:
    """A place in a grid at which nothing can be asked, and why."""

    at: Mapping[str, Any]
    why: str


def parse_grid_axis(option: str, text: str) -> GridAxis:
    """An axis of "gpus=8..16384:x2", "cluster=dgx-h100,dgx-b200" or "cluster.network.nic_GBps=25,50".

    Args:
        option: how the option is called.
        text: what was given.

    Raises:
        UsageError: it is no axis with values, or one of another type than the field's.
        UnknownNameError: there is no such option.
    """
    key, separator, values = text.partition("=")
    key = key.strip().removeprefix("--")
    if not separator or not values.strip():
        raise UsageError(
            f"{option} {text[:60]}: give NAME=VALUE,VALUE as gpus=8..1024:x2 or cluster=dgx-h100,dgx-b200"
        )
    found = words(option, values)
    if key.startswith(OF_CLUSTER):
        return GridAxis(name=key, values=tuple(found))
    name = key.replace("-", "_")
    _, kind = _field(option, name, key)
    return GridAxis(name=name, values=tuple(typed(option, name, word, kind) for word in found))


def _field(option: str, name: str, key: str) -> tuple[type, Any]:
    """Whose field a name is, and its type."""
    known = {}
    for group in (Plan, SystemOptions, Scenario):
        for field_name, kind in field_types(group).items():
            known[field_name] = (group, str if get_origin(kind) is tuple else kind)
    if name not in known or name == "set":
        raise UnknownNameError(
            f"word in {option}:", key, [n.replace("_", "-") for n in known if n != "set"], hint="or cluster.KEY"
        )
    return known[name]


def grid_points(
    plan: Plan, options: SystemOptions, scenario: Scenario, axes: Sequence[GridAxis]
) -> Iterator[SweepPoint | WrongPoint]:
    """Every point of a grid, the last axis changing fastest; where there is none, its place and why.

    Raises:
        UsageError: an axis stands twice, what it varies is given as well, or there are too many points.
    """
    count = prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        raise UsageError(f"--over: a grid of {count:,} points: give {MOST_POINTS:,} at most")
    for name in (names := [axis.name for axis in axes]):
        if names.count(name) > 1:
            raise UsageError(f"--over {name}: stands twice: give all its values at once")
        for group in (plan, options, scenario):
            if name in given(group):
                raise UsageError(f"--over {name}: is given as an option, too: leave one of them out")
    for values in itertools.product(*(axis.values for axis in axes)):
        at = dict(zip(names, values, strict=True))
        try:
            yield _point(at, plan, options, scenario)
        except UsageError as error:
            yield WrongPoint(at, str(error))


def _point(at: Mapping[str, Any], plan: Plan, options: SystemOptions, scenario: Scenario) -> SweepPoint:
    asked: dict[type, dict[str, Any]] = {Plan: {}, SystemOptions: {}, Scenario: {}}
    for name, value in at.items():
        if name.startswith(OF_CLUSTER):
            settings = asked[SystemOptions].setdefault("set", options.set)
            asked[SystemOptions]["set"] = (*settings, f"{name}={value}")
            continue
        group, _ = _field("--over", name, name)
        several = get_origin(field_types(group)[name]) is tuple
        asked[group][name] = (value,) if several else value
    return SweepPoint(
        at=at,
        plan=replace(plan, **asked[Plan]),
        options=replace(options, **asked[SystemOptions]),
        scenario=replace(scenario, **asked[Scenario]),
    )
