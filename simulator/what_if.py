"""What if: durations of a job made longer or shorter, by what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind

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
