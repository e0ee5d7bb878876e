"""What limits a step, how sure it is, and what if: how long it takes where one kind of work takes another time.

The tasks of the critical path follow each other without a gap, from the start of the step to its end. Making one
kind of work faster by a small fraction shortens the step by that fraction of its time on the path: the parts of
the path are the derivatives of the step time. (Of several paths of one length the engine reports one; then the
derivative is that of making the work slower.) Where every rank is simulated, the path of one rank ends where
another one is waited for; `ranks.rank_path` follows it there. What lies before all that it has looked at is put to
`OTHER_RANKS`.

Its `interval` is what the errors of durations do to it. Each *family* (one fit: matrix products, attention, ...)
is made longer, and then shorter, by its own standard error, and the step simulated again: errors inside a family
move together, families apart; of fitted products, whose errors cancel in part, by what is left of them together
(`averaged`). Kernels of a device without any table are one family, as one relative's tables and
one datasheet stand for all of them. The longer steps make the upper half of the interval, the shorter ones the
lower: a host that is slower than thought may bind the step, one that is faster changes nothing.

A `Scale` makes the durations of one kind of work longer or shorter by any factor, after which another path may be
the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from echograph.errors import UsageError
from echograph.ir.columns import NONE, Float64, Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, Attention, CollectiveKind, Convolution, Gemm, OpKind, Source

if TYPE_CHECKING:
    from echograph.simulator.durations import Durations
    from echograph.simulator.engine import Roles, StepRun
    from echograph.simulator.host import IssueTimes

OTHER_RANKS = "other ranks"


def limits(job: JobGraph, timeline: Timeline) -> dict[str, int]:
    """Picoseconds of each family on the critical path, the largest first; they add up to the step time."""
    path = timeline.critical_path()
    side = (timeline.lane[path] != Lane.HOST).astype(np.int64)
    number = families(job)[side, timeline.op[path]]
    total = np.bincount(number, weights=timeline.duration[path].astype(np.float64))
    return largest_first(job, total, timeline.makespan if len(path) else 0)


def families(job: JobGraph) -> Int64:
    """Int64 [2, rows]: the family of every row's task on the host, which is the last one, and on the device."""
    family, names = family_of(job)
    return np.stack([np.full(len(family), len(names)), family])


def largest_first(job: JobGraph, total: npt.NDArray[Any], step_ps: int) -> dict[str, int]:
    """The parts of a critical path by name.

    Args:
        job: the job.
        total: picoseconds by number of the family, as of `families`.
        step_ps: the step; what the parts leave of it is put to `OTHER_RANKS`.
    """
    names = (*family_of(job)[1], HOST)
    before = step_ps - int(total.sum())
    found = {OTHER_RANKS: before} if before > 0 else {}
    found |= {name: round(value) for name, value in zip(names, total.tolist(), strict=False) if value > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


HOST = "host"
KERNELS = ("matrix products", "attention", "convolutions", "other kernels")
_KINDS = (Gemm, Attention, Convolution)


def family_of(job: JobGraph) -> tuple[Int64, tuple[str, ...]]:
    """Family of every row of the operation table, and the names of the families.

    Kernels fall into matrix products, attention, convolutions and others; communications into one family for the
    axes of their group ("tp communication"). What the host issues is no row: its family is `HOST`.
    """
    ops = job.ops
    of_attribute = [next((i for i, k in enumerate(_KINDS) if isinstance(a, k)), 3) for a in ops.attribute_values]
    family = np.array([*of_attribute, 3])[ops.attributes].astype(np.int64)
    communicates = np.isin(ops.kind, COMMUNICATIONS)
    names = [group.label for group in job.groups]
    labels = tuple(dict.fromkeys(names))
    number = np.array([labels.index(name) for name in names] or [0])
    family[communicates] = len(KERNELS) + number[ops.group[communicates]]
    return family, (*KERNELS, *(f"{label} communication" for label in labels))


# -- how sure --------------------------------------------------------------------------------------------------


NINETY_PERCENT = 1.645
"""Half-width of the central 90 % of a normal distribution, in standard deviations."""


def interval(roles: Roles, step: StepRun) -> tuple[int, int]:
    """The central 90 % of the step time, picoseconds.

    Args:
        roles: durations with their relative standard errors, and the host with its own.
        step: with the durations as they are.
    """
    ends = step.scenario_ends
    if ends is None or len(ends) < roles.factor.shape[1] - 1:
        path = step.write().critical_path()
        errors = _families(roles.job, roles.times, roles.host)[:, roles.columns.kind[path]]
        longer = shorter = float(((errors @ roles.tasks.duration[path]) ** 2).sum())
    else:
        moves = (ends - step.end_ps).reshape(2, -1).astype(np.float64)
        longer = float((np.maximum(0.0, moves[0]) ** 2).sum())
        shorter = float((np.maximum(0.0, -moves[1]) ** 2).sum())
    below, above = (round(NINETY_PERCENT * sqrt(variance)) for variance in (shorter, longer))
    return max(0, step.end_ps - below), step.end_ps + above


def scenarios(job: JobGraph, times: Durations, host: IssueTimes) -> Float64:
    """Factors on durations, the step's own, then those of families that take longer, then shorter.

    Returns:
        float64 [rows + 1, 1 + scenarios], the last row the host.
    """
    errors = _families(job, times, host)
    factors: Float64 = np.maximum(0.0, 1.0 + np.concatenate([np.zeros((1, errors.shape[1])), errors, -errors]).T)
    return factors


PRODUCTS_CORRELATION = 0.4
"""Of the errors that a fit makes of two products: 0.16 to 0.39 on five devices (`benchmarks.products`)."""


def averaged(picoseconds: Int64, runs: Int64) -> float:
    """How much of one product's standard error the time of several has, relatively: less where they are unlike.

    Args:
        picoseconds: of each, above 0; those that take as long are taken for one and the same.
        runs: how often each runs, once at least.
    """
    _, which = np.unique(picoseconds, return_inverse=True)
    time = picoseconds.astype(np.float64) * runs
    part = np.bincount(which, time) / time.sum()
    return sqrt(PRODUCTS_CORRELATION + (1.0 - PRODUCTS_CORRELATION) * float((part**2).sum()))


def _families(job: JobGraph, times: Durations, host: IssueTimes) -> np.ndarray:
    """For each family, the relative error of every operation and of the host, 0 for those of other families."""
    family = np.append(family_of(job)[0], NONE)
    spread = np.append(np.where(times.picoseconds > 0, times.spread, 0.0), 0.0)
    kernels = (family[:-1] < len(KERNELS)) & (spread[:-1] > 0)
    products = kernels & (family[:-1] == 0) & (times.source == Source.FITTED)
    runs = job.run_counts()
    products &= runs > 0
    if products.any():
        spread[:-1][products] *= averaged(times.picoseconds[products], runs[products])
    if np.all(times.source[kernels] == Source.ANALYTICAL):
        family[:-1][kernels] = 0
    errors = [np.where(family == which, spread, 0.0) for which in distinct(family[spread > 0])]
    if host.spread and host.op_ps:
        errors.append(np.where(family == NONE, host.spread, 0.0))
    return np.array(errors).reshape(-1, len(family))


# -- what if ------------- --------------------------------------------------------------------------------------


Mask = npt.NDArray[np.bool_]
MAX_FACTOR = 1e6
_FORMS = "compute, comm, comm.AXIS, host, op:PATTERN, module:PATTERN, or collective:KIND"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One kind of work with another duration.

    Attributes:
        selector: what it is: "compute", "comm" (all communication), "comm.tp" (that of one axis), "host"
            (issuing), "op:aten.mm*" or "module:*.mlp.*" (patterns as of `fnmatch`), or "collective:all_gather".
        factor: new duration over the old; 0 leaves it out.
    """

    selector: str
    factor: float


def parse_scale(text: str) -> Scale:
    """A scale as the command line spells it: "comm.dp=2".

    Raises:
        UsageError: it is no selector and factor.
    """
    selector, _, value = text.rpartition("=")
    try:
        factor = float(value)
    except ValueError:
        factor = -1.0
    if not selector or not 0 <= factor <= MAX_FACTOR:
        raise UsageError(f"--scale {text[:60]}: give WHAT=FACTOR, as comm.dp=2 (WHAT: {_FORMS})")
    return Scale(selector=selector, factor=factor)


def factors(job: JobGraph, scales: Sequence[Scale]) -> tuple[npt.NDArray[np.float64], float]:
    """For every row of the operation table the factor on its duration; and the one on the host's.

    Raises:
        UsageError: a selector is unknown or selects nothing; names what there is.
    """
    rows, host = np.ones(len(job.ops)), 1.0
    for scale in scales:
        if scale.selector == "host":
            host *= scale.factor
        else:
            rows[_selected(job, scale.selector)] *= scale.factor
    return rows, host


def _selected(job: JobGraph, selector: str) -> Mask:
    ops = job.ops
    communicates = np.isin(ops.kind, COMMUNICATIONS)
    kind, _, name = selector.partition(":")
    axes = sorted({group.label for group in job.groups})
    if selector == "compute":
        return np.asarray(ops.kind == OpKind.COMPUTE)
    if selector == "comm":
        return communicates
    if selector.startswith("comm."):
        mine = [g.label == selector[5:] or selector[5:] in g.axes for g in job.groups]
        chosen = communicates & np.array([*mine, False])[ops.group]
        return _some(chosen, selector, ", ".join(f"comm.{axis}" for axis in axes))
    if kind == "collective" and name:
        kinds = {k.name.lower(): k for k in CollectiveKind}
        present = sorted({CollectiveKind(int(v)).name.lower() for v in ops.variant[ops.kind == OpKind.COLLECTIVE]})
        chosen = (ops.kind == OpKind.COLLECTIVE) & (ops.variant == kinds.get(name, -1))
        return _some(chosen, selector, ", ".join(f"collective:{k}" for k in present))
    if kind in ("op", "module") and name:
        column = ops.name if kind == "op" else ops.module
        fits = np.array([fnmatchcase(text, name) for text in job.strings])
        return _some(fits[column], selector, "see echoc text for the names")
    raise UsageError(f"--scale {selector[:60]}: unknown: give {_FORMS}")


def _some(chosen: Mask, selector: str, present: str) -> Mask:
    if not chosen.any():
        raise UsageError(f"--scale {selector[:60]}: selects nothing in this job: it has {present or 'none'}")
    return chosen
