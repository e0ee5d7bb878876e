"""What an analysis answers: named columns of equal length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from echograph.errors import MissingExtraError
from echograph.ir.tables import MOST_SHOWN, csv_text, html_table, text_table

WIDEST = 72
"""Characters of a text that a column shows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerTable:
    """Columns by name, and what is missing from them.

    Attributes:
        columns: values of each column, top to bottom; all have the same length.
        notes: what is missing from the answer, one line each.
    """

    columns: Mapping[str, Sequence[Any] | np.ndarray[Any, Any]]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows as plain Python values; None for what is not a number."""
        return zip(*(map(_plain, _list(column)) for column in self.columns.values()), strict=True)

    def records(self) -> list[dict[str, Any]]:
        """The rows by column name, as JSON holds them."""
        names = list(self.columns)
        return [dict(zip(names, row, strict=True)) for row in self.rows()]

    def first(self, most: int, name: str) -> AnswerTable:
        """The first rows; a note says of how many, and of what."""
        if len(self) <= most:
            return self
        rest = f"{name}: the first {most} of {len(self):,} rows; name it to see all"
        columns = {title: column[:most] for title, column in self.columns.items()}
        return AnswerTable(columns=columns, notes=(*self.notes, rest))

    def csv(self) -> str:
        """The table as comma-separated values with a line of titles; what is not a number is empty."""
        return csv_text(list(self.columns), self.rows())

    def text(self, number: Callable[[float], object] = lambda value: round(value, 3)) -> str:
        """The table as aligned columns; names of kernels, templates of hundreds of characters, are cut.

        Args:
            number: what is shown of a number that is not whole.
        """
        return text_table(list(self.columns), ([_short(value, number) for value in row] for row in self.rows()))

    def __str__(self) -> str:
        return "\n".join((self.text(), *(f"note: {note}" for note in self.notes)))

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", "notebook", "a table as a DataFrame") from None
        return pandas.DataFrame({name: _list(column) for name, column in self.columns.items()})

    def _repr_html_(self) -> str:
        """The table in a notebook, as far as one looks at it; the notes below it."""
        return html_table(list(self.columns), islice(self.rows(), MOST_SHOWN), len(self), self.notes)


def from_rows(titles: Sequence[str], rows: Iterable[Sequence[Any]], notes: Iterable[str] = ()) -> AnswerTable:
    """A table from its rows."""
    found = list(rows)
    columns = {title: [row[i] for row in found] for i, title in enumerate(titles)}
    return AnswerTable(columns=columns, notes=tuple(notes))


def stacked(parts: Sequence[Mapping[str, Any]], titles: Sequence[str], notes: Iterable[str] = ()) -> AnswerTable:
    """A table from one set of columns a rank, one below the other."""
    columns: dict[str, Any] = {}
    for title in titles:
        pieces = [part[title] for part in parts]
        numbers = all(isinstance(piece, np.ndarray) for piece in pieces)
        columns[title] = np.concatenate(pieces) if pieces and numbers else [v for piece in pieces for v in piece]
    return AnswerTable(columns=columns, notes=tuple(notes))


def _list(column: Sequence[Any] | np.ndarray[Any, Any]) -> list[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: object, number: Callable[[float], object]) -> object:
    if isinstance(value, str) and len(value) > WIDEST:
        return value[: WIDEST - 3] + "..."
    return number(value) if isinstance(value, float) else value
