"""Spreads of the model's form (`simulator.form`), estimated from predictions of published steps.

The logarithm r_i of measured over predicted time of step i has, by `simulator.form`, the variance

    v_i = d_i^2 + u_i^2 + sum_k s_ik^2 spread_k^2

in which only the spreads are unknown: a model of variance components, one for each kind of work.

1. The spreads are those of the greatest likelihood. Some published steps are broken, and under a normal law
   these few would decide, so r_i / sqrt(v_i) is taken for Student's t with `FREEDOM` degrees of freedom. Every
   family has the same weight, however many steps it has: they share machines, software and authors, and are one
   witness rather than many. The maximum is found by the multiplicative steps of Zhou, Hu, Qiao and Lange ("MM
   algorithms for variance components models", Journal of Computational and Graphical Statistics 28, 2019), which
   keep variances positive and never make the likelihood less; t's weights enter as in Lange, Little and Taylor
   ("Robust statistical modeling using the t distribution", JASA 84, 1989). Each kind is held by `PRIOR`
   families' weight to the one spread that fits best where all kinds have the same, so a kind of which the
   families say little stays near it.
2. The quantiles are those of |r_i| / sqrt(v_i), families weighted alike, where v_i is by spreads that the
   families other than that of step i give: the jackknife+ of Barber, Candes, Ramdas and Tibshirani ("Predictive
   inference with the jackknife+", Annals of Statistics 49, 2021), by families as in Dunn, Wasserman and Ramdas
   ("Distribution-free prediction sets for two-layer hierarchical models", JASA 118, 2023). So what an interval
   holds does not hang on the law that the first step takes for granted, and is said of a family that nobody has
   seen.

To judge all that, `leave_one_out` does both steps anew for each family, from the others alone. What ships is of
them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import Float64
from echograph.ir.files import read_whole
from echograph.ir.tables import text_table
from echograph.simulator.form import KINDS, OF_PATH, Form, standard_errors

LABEL = "of the model's form, estimated from published steps; a spread of intervals, in no prediction"
LEVELS = (50, 80, 90)
"""Intervals, percent."""

FREEDOM = 4.0
"""Degrees of freedom of Student's t, as usual where outliers are to weigh little."""

PRIOR = 0.3
"""Weight of the common spread for each kind, in families: a guess; between 0.1 and 1 little changes."""

LEAST = 1e-8
"""Variance that every step has: that of its clock."""

ROUNDS, CLOSE = 500, 1e-4
"""Steps towards the maximum at most, and the relative change of a variance with which they end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepErrors:
    """Predictions of published steps beside what was measured.

    Attributes:
        family: of each step.
        log_error: float64 [steps], logarithm of measured over predicted time.
        known: float64 [steps], variance of that by durations, on the side of the error, and by what was assumed.
        shares: float64 [steps, kinds], what part of the step each of `KINDS` is.
        half_width: float64 [steps, 2], standard errors of durations and assumptions towards shorter and longer.
    """

    family: np.ndarray
    log_error: Float64
    known: Float64
    shares: Float64
    half_width: Float64

    def of(self, chosen: np.ndarray) -> StepErrors:
        """Some of the steps."""
        return StepErrors(
            family=self.family[chosen],
            log_error=self.log_error[chosen],
            known=self.known[chosen],
            shares=self.shares[chosen],
            half_width=self.half_width[chosen],
        )

    @property
    def weights(self) -> Float64:
        """float64 [steps]: those of one family add up to 1."""
        _, family, count = np.unique(self.family, return_inverse=True, return_counts=True)
        return 1.0 / count[family]

    def deviations(self, spread: Mapping[str, float]) -> Float64:
        """float64 [steps]: errors in standard errors, for spreads of kinds of work."""
        return np.abs(self.log_error) / np.sqrt(self.known + self.by_form(spread) + LEAST)

    def by_form(self, spread: Mapping[str, float]) -> Float64:
        """float64 [steps]: variance by the form of the model."""
        found: Float64 = self.shares**2 @ np.array([spread.get(kind, 0.0) ** 2 for kind in KINDS])
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


class _Result(msgspec.Struct):
    rows: list[PredictedStep]


def read_errors(results: Iterable[str | Path]) -> StepErrors:
    """The predicted rows of what `echosim validate -o` wrote; of a row in several files, that of the last counts.

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
    """Rows of `echosim validate --json`, those that are predicted, as columns."""
    family, error, widths, shares = [], [], [], []
    for row in rows:
        if row.predicted_s is None or row.measured_s is None or row.durations_interval_s is None:
            continue
        unsaid = row.unsaid * math.fsum(row.work.get(kind, 0.0) for kind in OF_PATH)
        sides = standard_errors(row.predicted_s, row.durations_interval_s)
        family.append(row.family)
        error.append(math.log(row.measured_s / row.predicted_s))
        widths.append([math.hypot(side, unsaid) for side in sides])
        shares.append([row.work.get(kind, 0.0) for kind in KINDS])
    log_error, width = np.array(error), np.array(widths).reshape(-1, 2)
    return StepErrors(
        family=np.array(family),
        log_error=log_error,
        known=np.where(log_error < 0, width[:, 0], width[:, 1]) ** 2,
        shares=np.array(shares).reshape(-1, len(KINDS)),
        half_width=width,
    )


def estimate(errors: StepErrors, source: str = "", date: str = "") -> Form:
    """Spreads and quantiles for a family like these.

    Args:
        errors: of published steps.
        source: where their predictions are from.
        date: of the estimate.
    """
    deviations = np.zeros(len(errors.family))
    families = np.unique(errors.family)
    for family in families:
        mine = errors.family == family
        # A single family has no others.
        others = errors.of(~mine) if len(families) > 1 else errors
        deviations[mine] = errors.of(mine).deviations(spreads(others))
    return Form(
        label=LABEL,
        source=source,
        date=date,
        steps=len(errors.family),
        families=len(families),
        spread=spreads(errors),
        quantile={level: round(_quantile(deviations, errors.weights, level / 100), 4) for level in LEVELS},
    )


def spreads(errors: StepErrors) -> dict[str, float]:
    """The spread of each kind of work that makes errors likeliest."""
    squares, weights = errors.shares**2, errors.weights
    common = _maximum(errors, squares.sum(axis=1, keepdims=True), weights, np.zeros(1))
    variance = _maximum(errors, squares, weights, np.full(len(KINDS), common[0]))
    return {kind: round(math.sqrt(value), 4) for kind, value in zip(KINDS, variance.tolist(), strict=True)}


def _maximum(errors: StepErrors, squares: Float64, weights: Float64, prior: Float64) -> Float64:
    """The variances of kinds that make errors likeliest.

    Args:
        errors: of published steps.
        squares: float64 [steps, kinds], squared shares.
        weights: float64 [steps].
        prior: float64 [kinds], the variance that each kind is held to by `PRIOR` of a family; 0: by none.
    """
    theta = np.where(prior > 0, prior, 0.01)
    held = np.where(prior > 0, PRIOR, 0.0)
    for _ in range(ROUNDS):
        variance = errors.known + squares @ theta + LEAST
        # Student's t of this variance has a scale that is less.
        square = errors.log_error**2 / variance * FREEDOM / (FREEDOM - 2)
        robust = weights * (FREEDOM + 1) / (FREEDOM + square)
        rise = (robust * square / variance) @ squares + held * prior / theta**2
        fall = (weights / variance) @ squares + held / theta
        step = np.sqrt(np.divide(rise, fall, out=np.ones_like(rise), where=fall > 0))
        theta = theta * step
        if np.abs(step - 1).max() < CLOSE:
            break
    return theta


def _quantile(values: Float64, weights: Float64, level: float) -> float:
    """The least value up to which there is this share of the weight."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, level - 1e-12)), len(values) - 1)])


def held(family: str, errors: StepErrors, form: Form) -> HeldSteps:
    """What the intervals of a form hold of some steps.

    Args:
        family: what they are called.
        errors: theirs.
        form: spreads and quantiles.
    """
    deviations = errors.deviations(form.spread)
    spread = np.sqrt(errors.half_width**2 + errors.by_form(form.spread)[:, None])
    width = np.exp(form.quantile[LEVELS[-1]] * spread)
    return HeldSteps(
        family=family,
        steps=len(deviations),
        held={level: float((deviations <= form.quantile[level]).mean()) for level in LEVELS},
        half_width=float(np.median((width[:, 1] - 1 / width[:, 0]) / 2)),
    )


def leave_one_out(errors: StepErrors) -> dict[str, Form]:
    """For each family the spreads and quantiles that the others give.

    Raises:
        DataError: there is one family only.
    """
    families = list(dict.fromkeys(errors.family.tolist()))
    if len(families) < 2:
        raise DataError(f"only the family '{families[0]}' has predictions: no other judges it")
    return {family: estimate(errors.of(errors.family != family)) for family in families}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCalibration:
    """How sure the form of the model is.

    Attributes:
        form: estimated from all families.
        left_out: estimated for each family from the others.
        families: what the intervals of `left_out` hold of each.
    """

    form: Form
    left_out: dict[str, Form]
    families: tuple[HeldSteps, ...]

    @property
    def overall(self) -> dict[str, HeldSteps]:
        """All families together: each step alike, and each family alike."""
        weights = {"all steps": [one.steps for one in self.families], "all families": [1] * len(self.families)}
        return {
            name: HeldSteps(
                family=name,
                steps=sum(one.steps for one in self.families),
                held={n: float(np.average([one.held[n] for one in self.families], weights=by)) for n in LEVELS},
                half_width=_quantile(np.array([f.half_width for f in self.families]), np.array(by, float), 0.5),
            )
            for name, by in weights.items()
        }

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim calibrate --json`."""
        rows = {one.family: one for one in self.families} | self.overall
        return {
            "form": msgspec.to_builtins(self.form),
            "leave_one_family_out": {
                name: {
                    "steps": one.steps,
                    "held": {str(n): one.held[n] for n in LEVELS},
                    "half_width": one.half_width,
                }
                for name, one in rows.items()
            },
        }

    def __str__(self) -> str:
        """What intervals hold of families left out, and the spreads."""
        rows = [
            (one.family, str(one.steps), *(f"{one.held[n]:.0%}" for n in LEVELS), f"{one.half_width:.0%}")
            for one in (*self.families, *self.overall.values())
        ]
        head = ("family left out", "steps", *(f"held by {n} %" for n in LEVELS), f"half-width of {LEVELS[-1]} %")
        spreads = ", ".join(f"{kind} {value:.3f}" for kind, value in self.form.spread.items())
        quantiles = ", ".join(f"{level} % {value:.2f}" for level, value in self.form.quantile.items())
        return f"{text_table(head, rows)}\nspreads {spreads}\nquantiles {quantiles} standard errors"


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
    left_out = leave_one_out(errors)
    judged = (held(name, errors.of(errors.family == name), form) for name, form in left_out.items())
    return FormCalibration(form=estimate(errors, source, date), left_out=left_out, families=tuple(judged))
