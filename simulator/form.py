"""How sure the form of the model is: what no kernel's fit knows.

A fit's error says how far a formula is off the kernels of its table. A step also runs another year's library, at
another clock, fused, overlapped and scheduled otherwise than was thought. That moves most work of it together, and
what a model leaves out lengthens a step rather than shortens it. So each side of an interval is of its own: at a
level, the logarithm of the step over its prediction lies between

    -hypot(n d_shorter, n u s, s shorter)   and   +hypot(n d_longer, n u s, s longer)

where d is the standard error that durations give it (`limits.interval`), u that of what was left unsaid, n the
half-width of that level of a normal law in standard errors, s what part of the step was modelled (`shares`), and
shorter and longer are `Form.widths`. No predicted time moves by any of this.

`form.json` holds the widths; `echosim calibrate` estimates them from predictions of published steps
(`workflow.calibration.form`). All kinds of work share them: with a spread for each, estimated by likelihood,
intervals as wide held fewer steps of families that were left out (docs/accuracy/intervals.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Bools, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Source
from echograph.simulator.clusters import Cluster
from echograph.simulator.durations import Durations
from echograph.simulator.limits import HOST, NINETY_PERCENT, OTHER_RANKS, family_of

if TYPE_CHECKING:
    from echograph.simulator.engine import StepRun

WITHIN, BETWEEN = "communication within nodes", "communication between nodes"
EXCHANGE = "all-to-all exchange"
HIDDEN, BUBBLE = "hidden communication", "bubble"
OF_PATH = ("matrix products", "attention", "other kernels", WITHIN, BETWEEN, EXCHANGE, HOST)
KINDS = (*OF_PATH, HIDDEN, BUBBLE)
"""Kinds of work that a step is parted into; convolutions are counted as matrix products. Those of `OF_PATH` are
parts of the critical path."""


class Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the model's form may be off; of intervals alone, never of a prediction.

    Attributes:
        label: what it is.
        source: what it is estimated from.
        date: of the estimate.
        steps: how many published steps that were.
        families: of how many families.
        widths: level of an interval in percent -> by how much a step may be shorter, and longer, than predicted,
            as logarithms, beyond the errors of durations.
    """

    label: str
    source: str
    date: str
    steps: int
    families: int
    widths: dict[int, tuple[float, float]]

    def interval(
        self,
        step: float,
        durations: tuple[float, float],
        work: Mapping[str, float],
        unsaid: float = 0.0,
        level: int = 90,
    ) -> tuple[float, float]:
        """Where a step lies, in the unit in which it is given.

        Args:
            step: the prediction.
            durations: its 90 % interval by the errors of durations alone.
            work: its `shares`.
            unsaid: standard error of its logarithm for what was left unsaid, if all of it is modelled.
            level: of the interval, percent; one of `widths`.
        """
        modelled, errors = modelled_part(work), standard_errors(step, durations)
        shorter, longer = (
            math.exp(math.hypot(normal_width(level) * math.hypot(error, unsaid * modelled), width * modelled))
            for error, width in zip(errors, self.widths[level], strict=True)
        )
        return step / shorter, step * longer


def modelled_part(work: Mapping[str, float]) -> float:
    """What part of a step's critical path was modelled, not measured, by its `shares`."""
    return math.fsum(work.get(kind, 0.0) for kind in OF_PATH)


@cache
def normal_width(level: int) -> float:
    """Half-width of the central interval of a normal law that holds so many percent, in standard deviations."""
    return NormalDist().inv_cdf(0.5 + level / 200)


FEWEST = 1 / 20
"""The least part of a step that its durations' errors alone are taken to leave, as its logarithm must be
finite."""


def standard_errors(step: float, durations: tuple[float, float]) -> tuple[float, float]:
    """Of the logarithm of a step, towards shorter and towards longer ones.

    Args:
        step: the prediction.
        durations: its 90 % interval by the errors of durations alone, in the same unit.
    """
    if step <= 0:
        return 0.0, 0.0
    low, high = max(durations[0] / step, FEWEST), durations[1] / step
    return -math.log(low) / NINETY_PERCENT, math.log(high) / NINETY_PERCENT


@cache
def load_form() -> Form:
    """The widths that ship.

    Raises:
        DataError: the file is broken.
    """
    path = files("echograph.simulator").joinpath("form.json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Form)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path.name}: {error}") from error


def shares(job: JobGraph, cluster: Cluster, times: Durations, step: StepRun) -> dict[str, float]:
    """What part of a step each kind of work is.

    Of kernels, exposed communication and the host it is their part of the critical path, which is the derivative
    of the step by their time (`simulator.limits`); they add up to 1 at most, as work whose duration was measured
    or imported with the job is as it is, and left out. Communication that other work hides, and the bubble, are
    parts of the step of the program that ends last: by as much it gets longer if nothing hides it, or shorter
    without it.

    Args:
        job: the job.
        cluster: where it runs; the GPUs of an NVLink domain count as one node.
        times: how long its operations take, and where that comes from.
        step: what ran, each role once.
    """
    communicates = np.isin(job.ops.kind, COMMUNICATIONS)
    known = np.isin(times.source, (Source.MEASURED, Source.IMPORTED))
    number, names = family_of(job)
    own, whole = (np.bincount(number, weights, len(names)) for weights in (step.busy * ~known, step.busy))
    modelled = dict(zip(names, np.divide(own, whole, out=np.zeros(len(names)), where=whole > 0), strict=True))
    kinds = {"convolutions": KINDS[0], **_communications(job, cluster, known)}
    found: dict[str, float] = defaultdict(float)
    path = sum(step.limits.values()) - step.limits.get(OTHER_RANKS, 0)
    for name, picoseconds in step.limits.items():
        found[kinds.get(name, name)] += float(modelled.get(name, 1.0)) * picoseconds / (path or 1)
    busy = float((step.busy_of_last * (communicates & ~known)).sum())
    hidden = busy - sum(step.breakdown.exposed_communication.values())
    found[HIDDEN] = hidden / (step.end_ps or 1)
    found[BUBBLE] = step.breakdown.bubble / (step.end_ps or 1)
    return {kind: found[kind] for kind in KINDS if found[kind] > 0}


def _communications(job: JobGraph, cluster: Cluster, known: Bools) -> dict[str, str]:
    """The kind of each family of modelled communication; of several, the last in order: within, between, exchange.

    What was measured needs no place in the cluster, and the ranks of a trace may have none.
    """
    modelled = set(distinct(job.ops.group[np.isin(job.ops.kind, COMMUNICATIONS) & ~known]).tolist())
    to_all = (job.ops.kind == OpKind.COLLECTIVE) & (job.ops.variant == CollectiveKind.ALL_TO_ALL)
    exchanging = set(distinct(job.ops.group[to_all]).tolist())
    kinds: dict[str, str] = {}
    for number, group in enumerate(job.groups):
        name = f"{group.label} communication"
        if number not in modelled:
            continue
        far = cluster.place(job.group_ranks(group)).domains > 1
        kind = EXCHANGE if number in exchanging else BETWEEN if far else WITHIN
        kinds[name] = max(kind, kinds.get(name, kind), key=(WITHIN, BETWEEN, EXCHANGE).index)
    return kinds
