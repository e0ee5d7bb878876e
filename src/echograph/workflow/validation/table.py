"""Rows of a table of measured steps, parsed and checked."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from echograph.errors import DataError, InputError, UsageError
from echograph.workflow.validation.spellings import recompute

MAX_ROWS = 100_000
REQUIRED = ("id", "model", "gpu_type", "n_gpus", "step_time_s")

PEAKS = {
    "A100": 312e12, "A800": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12,
    "B300": 2250e12, "GB200": 2500e12, "GB300": 2500e12, "V100": 125e12, "MI300X": 1307e12,
}  # fmt: skip
"""FLOP/s in 16 bit that sources divide by (the makers' data sheets, dense), by a GPU's name."""

_TOKENS = re.compile(r"([0-9.]+) ?(?:(m)(?: ?tokens)?| ?tokens)")
"""Steps whose tokens a table counts."""

_NOTHING = ("-", "n/a", "na", "nan")
"""What stands in a column that says nothing."""

CONVENTIONS = 0.1
"""How far, relatively, model FLOPs may differ by convention for a rate of them to stand for a time."""


class Skip(Exception):
    """A row that cannot be simulated, and why."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured step: a row of the table, by column."""

    columns: dict[str, str]

    @property
    def id(self) -> str:
        """Its name."""
        return self.columns["id"]

    @property
    def family(self) -> str:
        """What its name begins with."""
        return self.id.rsplit("-", 1)[0]

    @property
    def grade(self) -> str:
        """How far its source is trusted: A, B or C."""
        return self.columns.get("grade") or "A"

    def text(self, column: str) -> str:
        """A column; "" where it is empty, absent, or says that there is nothing."""
        said = (self.columns.get(column) or "").strip()
        return "" if said.lower() in _NOTHING else said

    def number(self, column: str, default: int | None = None) -> int:
        """A whole number above 0, as "4096", "1,024" or "8k", which is 8,192; 0 is what is not used.

        Raises:
            Skip: the column is empty and has no default, or holds no number.
        """
        text = self.text(column)
        if text == "0" and default is not None:
            text = ""
        if not text and default is not None:
            return default
        said = re.fullmatch(r"([0-9]+)(?:\.0+)?(k?)", text.replace(",", "").lower())
        if said is None or not int(said[1]):
            what = f"is '{text[:20]}'" if text else "is empty"
            raise Skip(f"{column} {what}")
        return int(said[1]) * (1024 if said[2] else 1)

    def real(self, column: str) -> float | None:
        """A number above 0, "843 ms" being 0.843; None where the column holds none."""
        said = re.fullmatch(r"(.+?) ?(ms|s)?", self.text(column).replace(",", ""))
        try:
            value = float(said[1]) * (1e-3 if said[2] == "ms" else 1) if said else 0.0
        except ValueError:
            return None
        return value if 0 < value < 1e15 else None

    @property
    def of_layers_alone(self) -> bool:
        """Whether its figure is of its layers alone, of a model that has more."""
        return "layer only" in self.text("notes")

    @property
    def global_batch(self) -> int:
        """Samples of a step; "4M" and "4194304 tokens" are tokens.

        Where the row leaves them out, what its rate and time make of them, or, without a pipeline, one micro-batch
        of each replica.

        Raises:
            Skip: it says too little.
        """
        tokens = _TOKENS.fullmatch(self.text("global_batch").lower())
        if tokens:
            # A million is 2^20 where that makes whole samples: sequences are powers of two.
            samples = float(tokens[1]) * (2**20 if tokens[2] else 1) / self.number("seq_len")
            return max(1, round(samples if not tokens[2] or samples.is_integer() else samples * 1e6 / 2**20))
        if self.text("global_batch"):
            return self.number("global_batch")
        seconds, rate = self.real("step_time_s"), self.real("tokens_per_s_per_gpu")
        if seconds is not None and rate is not None:
            return max(1, round(seconds * rate * self.number("n_gpus") / self.number("seq_len")))
        if seconds is None and rate is not None and self.number("pp", 1) == 1 and self.text("micro_batch"):
            model = self.number("tp", 1) * self.number("cp", 1)
            return self.number("micro_batch") * max(1, self.number("n_gpus") // model)
        return self.number("global_batch")

    @property
    def measured_s(self) -> float:
        """The measured step time, or what the measured rate of tokens makes of it.

        Raises:
            Skip: there is neither.
        """
        seconds = self.real("step_time_s")
        rate = self.real("tokens_per_s_per_gpu")
        if seconds is None and rate is not None:
            seconds = self.global_batch * self.number("seq_len") / (rate * self.number("n_gpus"))
        if seconds is None:
            seconds = self._of_utilisation()
        if seconds is None:
            raise Skip("it has no step time, nor tokens a second, nor the model FLOP/s of a model of known size")
        if not 0 < seconds < 1e9:
            raise Skip(f"a step time of {seconds} s")
        return seconds

    def _of_utilisation(self) -> float | None:
        """Seconds by model FLOPs: 6 N + 12 layers hidden sequence a token (Chowdhery et al. 2022, appendix B).

        Raises:
            Skip: the rate may count more or less than these by over `CONVENTIONS`.
        """
        billions, rate = self.real("params_B"), self._model_flop_s()
        if billions is None or rate is None:
            return None
        if self.number("ep", 1) > 1:
            raise Skip(
                "a rate of FLOPs is all it has, and its experts' share of them is not in the table's columns"
            )
        length = self.number("seq_len")
        attention = 12 * self.number("layers") * self.number("hidden") * length
        if attention / 2 > CONVENTIONS * (6e9 * billions + attention / 2):
            raise Skip(
                f"a rate of FLOPs is all it has, and at {length} tokens they differ much by whether the half of "
                "attention that is masked counts"
            )
        tokens = self.global_batch * length
        return tokens * (6e9 * billions + attention) / (rate * self.number("n_gpus"))

    def _model_flop_s(self) -> float | None:
        """FLOP/s of a GPU without what is computed again; None where the row has none."""
        share, measured = self._utilisation(), self.real("tflops_per_gpu")
        if share is not None and not re.search(r"8|4", self.text("precision")):
            peak = next((peak for gpu, peak in PEAKS.items() if self._is_gpu(gpu)), None)
            return None if peak is None else share * peak
        if measured is not None and recompute(self.text("recompute")) != "none":
            raise Skip("TFLOP/s are all it has, and do not say whether they count what is computed again")
        if measured is None and share is not None:
            raise Skip("its MFU is all it has, and does not say of which precision's peak")
        return None if measured is None else measured * 1e12

    def _utilisation(self) -> float | None:
        """MFU as a share, which some give in percent."""
        text = self.text("mfu")
        share = MeasuredStep({"mfu": text.removesuffix("%")}).real("mfu")
        if share is None or share > 100:
            return None
        return share / 100 if share > 1 or text.endswith("%") else share

    def _is_gpu(self, name: str) -> bool:
        """Whether this is what its `gpu_type` names."""
        return re.search(rf"(?<![a-z0-9]){name}(?![0-9])", self.text("gpu_type"), re.IGNORECASE) is not None


def read_measured_steps(
    path: Path, families: Sequence[str] = (), grades: Sequence[str] = ()
) -> list[MeasuredStep]:
    """The rows of a CSV table, of the families and grades asked for.

    Raises:
        InputError: the table cannot be read.
        DataError: it lacks a column, or no row is left, of all families or of one of them.
        UsageError: a family or a grade is asked for that has no name.
    """
    for asked, names in (("--family", families), ("--grade", grades)):
        if not all(names):
            raise UsageError(f"{asked}: is empty: give a value, or leave it out")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path}: has no column {missing[0]}: it is no table of measured steps")
            rows = [row for row in _rows(path, reader) if not grades or row.grade in grades]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    kept = [row for row in rows if not families or row.family in families]
    lacking = [name for name in families if name not in {row.family for row in kept}]
    if not kept or lacking:
        known = ", ".join(sorted({row.family for row in rows})) or "none"
        of = f"family {lacking[0][:40]}" if lacking and kept else "the families"
        raise DataError(f"{path}: no row of {of} and grades asked for; it has {known}")
    return kept


def _rows(path: Path, reader: Iterable[dict[str, str]]) -> Iterable[MeasuredStep]:
    for number, columns in enumerate(reader):
        if number >= MAX_ROWS:
            raise DataError(f"{path}: has over {MAX_ROWS} rows")
        if columns["id"]:
            yield MeasuredStep(columns)
