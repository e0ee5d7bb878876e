"""How far the model's form may be off (`simulator.form`), estimated from predictions of published steps.

Of the logarithm r of measured over predicted time of a step, the errors of durations and what was left unsaid, of
standard error d, explain n d at a level (n: half-width of a normal law). What is left for the form,

    z = sign(r) sqrt(max(0, r^2 - (n d)^2)) / s          s: what part of the step was modelled

has no law taken for granted: the widths of a level are quantiles of z. The one to the shorter side leaves half of
what the level leaves; the one to the longer side is the least with which both hold the level. Every family has the
same weight, however many steps it has: these share machines, software and authors, and are one witness rather than
many (quantiles by groups as in Dunn, Wasserman and Ramdas, "Distribution-free prediction sets for two-layer
hierarchical models", JASA 118, 2023). Two numbers a level are all that is estimated: a dozen families say no more.

To judge them, `leave_one_out` estimates them anew for each family, from the others alone. What ships is of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Float64
from echograph.ir.files import read_whole
from echograph.ir.tables import text_table
from echograph.simulator.form import Form, modelled_part, normal_width, standard_errors

LABEL = "of the model's form, estimated from published steps; widths of intervals, in no prediction"
LEVELS = (50, 80, 90)
"""Intervals, percent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepErrors:
    """Predictions of published steps beside what was measured.

    Attributes:
        family: of each step.
        log_error: float64 [steps], logarithm of measured over predicted time.
        known: float64 [steps, 2], standard errors of that by durations and by what was assumed, towards shorter
            and towards longer steps.
        modelled: float64 [steps], what part of the step was modelled, above 0.
    """

    family: np.ndarray
    log_error: Float64
    known: Float64
    modelled: Float64

    def of(self, chosen: np.ndarray) -> StepErrors:
        """Some of the steps."""
        return StepErrors(
            family=self.family[chosen],
            log_error=self.log_error[chosen],
            known=self.known[chosen],
            modelled=self.modelled[chosen],
        )

    @property
    def weights(self) -> Float64:
        """float64 [steps]: those of one family add up to 1."""
        _, family, count = np.unique(self.family, return_inverse=True, return_counts=True)
        return 1.0 / count[family]

    def left(self, level: int) -> Float64:
        """float64 [steps]: what of the errors is left for the form at a level, of a step modelled as a whole."""
        side = np.where(self.log_error < 0, self.known[:, 0], self.known[:, 1])
        beyond = self.log_error**2 - (normal_width(level) * side) ** 2
        found: Float64 = np.sign(self.log_error) * np.sqrt(np.maximum(0.0, beyond)) / self.modelled
        return found

    def bounds(self, form: Form, level: int) -> Float64:
        """float64 [2, steps]: between which logarithms of measured over predicted time an interval lies."""
        widths = np.array(form.widths[level]) * self.modelled[:, None]
        found: Float64 = np.hypot(normal_width(level) * self.known, widths).T * np.array([[-1.0], [1.0]])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSteps:
    """What intervals hold of a family that had no part in them.

    Attributes:
        family: its name.
        steps: how many.
        held: level in percent -> share of the measured steps in intervals of that level.
        half_width: median of half of the width of 90 % intervals, relative to the prediction.
    """

    family: str
    steps: int
    held: dict[int, float]
    half_width: float

    def to_json(self) -> dict[str, Any]:
        """Its record in that of `echosim calibrate --json`."""
        return {
            "steps": self.steps,
            "held": {str(level): share for level, share in self.held.items()},
            "half_width": self.half_width,
        }


_Seconds = Annotated[float, msgspec.Meta(gt=1e-12, lt=1e12)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1e3)]
MAX_BYTES = 2**30


class PredictedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a row of `echosim validate --json`; `workflow.validation.score.Outcome` says what it is."""

    id: str
    family: str
    measured_s: _Seconds | None = None
    predicted_s: _Seconds | None = None
    durations_interval_s: tuple[Annotated[float, msgspec.Meta(ge=0, lt=1e12)], _Seconds] | None = None
    work: dict[str, _Share] = {}
    unsaid: _Share = 0.0
    computed: bool = False


class _Result(msgspec.Struct):
    rows: list[PredictedStep]


def read_errors(results: Iterable[str | Path]) -> StepErrors:
    """The predicted rows of what `echosim validate -o` wrote; of a row in several files, that of the last counts.

    Rows whose step was computed by somebody rather than measured have no part.

    Raises:
        InputError: a file cannot be read.
        DataError: it is no such result, or no row of it has a prediction.
    """
    rows: dict[str, PredictedStep] = {}
    for path in map(Path, results):
        try:
            data = read_whole(path, "give what echosim validate -o wrote", MAX_BYTES)
            rows |= {row.id: row for row in msgspec.json.decode(data, type=_Result).rows}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{path}: is no result of echosim validate -o: {error}") from None
    found = step_errors(rows.values())
    if not len(found.family):
        raise DataError("no row with a prediction: give what echosim validate -o wrote")
    return found


def step_errors(rows: Iterable[PredictedStep]) -> StepErrors:
    """Rows of `echosim validate --json` that were measured, and are predicted and modelled, as columns."""
    family, error, known, modelled = [], [], [], []
    for row in rows:
        part = 0.0 if row.computed else modelled_part(row.work)
        if row.predicted_s is None or row.measured_s is None or row.durations_interval_s is None or not part:
            continue
        sides = standard_errors(row.predicted_s, row.durations_interval_s)
        family.append(row.family)
        error.append(math.log(row.measured_s / row.predicted_s))
        known.append([math.hypot(side, row.unsaid * part) for side in sides])
        modelled.append(part)
    return StepErrors(
        family=np.array(family),
        log_error=np.array(error),
        known=np.array(known).reshape(-1, 2),
        modelled=np.array(modelled),
    )


def estimate_form(errors: StepErrors, source: str = "", date: str = "") -> Form:
    """The widths for a family like these.

    Args:
        errors: of published steps.
        source: where their predictions are from.
        date: of the estimate.
    """
    return Form(
        label=LABEL,
        source=source,
        date=date,
        steps=len(errors.family),
        families=len(np.unique(errors.family)),
        widths={level: _widths(errors.left(level), errors.weights, level / 100) for level in LEVELS},
    )


def _widths(left: Float64, weights: Float64, level: float) -> tuple[float, float]:
    """What holds this share of the weight, towards shorter and towards longer steps; both at least 0."""
    shorter = max(0.0, _quantile(-left, weights, (1 + level) / 2))
    longer = max(0.0, _quantile(np.where(left < -shorter, np.inf, left), weights, level))
    return _up(shorter), _up(longer)


def _up(width: float) -> float:
    """With four digits, and no less."""
    return math.ceil(width * 1e4) / 1e4


def _quantile(values: Float64, weights: Float64, level: float) -> float:
    """The least value up to which there is this share of the weight."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, level - 1e-12)), len(values) - 1)])


def held(name: str, steps: Sequence[tuple[StepErrors, Form]], weights: Float64 | None = None) -> HeldSteps:
    """What intervals hold of some steps.

    Args:
        name: what they are called.
        steps: theirs, in parts, each with the form that judges it.
        weights: float64 [steps], of the parts in order; none: all alike.
    """
    inside = {}
    for level in LEVELS:
        bounds = np.hstack([errors.bounds(form, level) for errors, form in steps])
        measured = np.hstack([errors.log_error for errors, _ in steps])
        inside[level] = (bounds[0] <= measured) & (measured <= bounds[1])
    if weights is None:
        weights = np.ones(len(measured))
    low, high = np.exp(bounds)
    return HeldSteps(
        family=name,
        steps=len(measured),
        held={level: float(np.average(inside[level], weights=weights)) for level in LEVELS},
        half_width=_quantile((high - low) / 2, weights, 0.5),
    )


def leave_one_out(errors: StepErrors) -> dict[str, Form]:
    """For each family the widths that the others give.

    Raises:
        DataError: there is one family only.
    """
    families = list(dict.fromkeys(errors.family.tolist()))
    if len(families) < 2:
        raise DataError(f"only the family '{families[0]}' has predictions: no other judges it")
    return {family: estimate_form(errors.of(errors.family != family)) for family in families}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCalibration:
    """How sure the form of the model is.

    Attributes:
        form: estimated from all families.
        left_out: estimated for each family from the others.
        families: what the intervals of `left_out` hold of each, then of all steps alike and of all families alike.
        shipped: the same of `form`, which has seen them.
    """

    form: Form
    left_out: dict[str, Form]
    families: tuple[HeldSteps, ...]
    shipped: tuple[HeldSteps, ...]

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim calibrate --json`."""
        return {
            "form": msgspec.to_builtins(self.form),
            "leave_one_family_out": {one.family: one.to_json() for one in self.families},
            "shipped": {one.family: one.to_json() for one in self.shipped},
        }

    def __str__(self) -> str:
        """What intervals hold of families left out, and the widths."""
        rows = [
            (
                *(one.family, str(one.steps), *(f"{one.held[n]:.0%}" for n in LEVELS), f"{one.half_width:.1%}"),
                *(f"{ships.held[LEVELS[-1]]:.0%}", f"{ships.half_width:.1%}"),
            )
            for one, ships in zip(self.families, self.shipped, strict=True)
        ]
        head = (
            *("family left out", "steps", *(f"held by {n} %" for n in LEVELS), f"half-width of {LEVELS[-1]} %"),
            *(f"held by {LEVELS[-1]} % from all families", "half-width"),
        )
        widths = ", ".join(f"{level} % -{a:.3f} +{b:.3f}" for level, (a, b) in self.form.widths.items())
        return f"{text_table(head, rows)}\nwidths, as logarithms: {widths}"


def calibrate(results: Iterable[str | Path], *, source: str = "", date: str = "") -> FormCalibration:
    """Estimates how sure the form of the model is, and judges the estimate on families left out of it.

    Args:
        results: what `echosim validate -o` wrote.
        source: which steps these are.
        date: of the estimate.

    Raises:
        InputError: a file cannot be read.
        DataError: it is no such result, or there are fewer than two families.
    """
    errors = read_errors(results)
    left_out, form = leave_one_out(errors), estimate_form(errors, source, date)
    parts = {name: errors.of(errors.family == name) for name in left_out}
    return FormCalibration(
        form=form,
        left_out=left_out,
        families=_judged(parts, left_out),
        shipped=_judged(parts, dict.fromkeys(parts, form)),
    )


def _judged(parts: Mapping[str, StepErrors], forms: Mapping[str, Form]) -> tuple[HeldSteps, ...]:
    """What intervals hold of each family, of all steps and of all families."""
    steps = [(parts[name], forms[name]) for name in parts]
    alike = np.hstack([part.weights for part in parts.values()])
    families = (held(name, [(parts[name], forms[name])]) for name in parts)
    return (*families, held("all steps", steps), held("all families", steps, alike))
