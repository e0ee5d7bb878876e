"""Which rank each process of a trace is of, where a tool has put the traces of several ranks into one file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# What merging tools write into the number or the name of a process: TraceLens' "RANK 3 - GPU", "rank3_4711",
# "Rank 3: python"; and SGLang's "[TP03-PP01] 4711", one of several axes.
_RANK = re.compile(r"\brank[ _:#-]*(\d{1,9})(?!\d)", re.IGNORECASE)
_AXES = re.compile(r"\[((?:(?:TP|DP|PP|EP|CP|R)-?\d{1,6}[-_, ]?)+)\]")
_NUMBER = re.compile(r"\d+")


class MergedRanks(NamedTuple):
    """The ranks of a file.

    Attributes:
        ranks: rank of each process, by its number or text.
        labels: of the ranks where they are places on axes, in the order of the ranks; else empty.
        unnamed: how many processes are of no rank.
    """

    ranks: dict[str, int]
    labels: tuple[str, ...]
    unnamed: int

    def __str__(self) -> str:
        count = len(set(self.ranks.values()))
        line = f"the traces of {count} ranks in one file, told apart by the names of their processes"
        if self.labels:
            line += f"; their numbers are the order of {self.labels[0]} to {self.labels[-1]}"
        return line + (f"; {self.unnamed} processes of no rank are left out" if self.unnamed else "")


def merged_ranks(said: Mapping[str, Sequence[str]]) -> MergedRanks | None:
    """The ranks of processes; None where they do not name two at least.

    Args:
        said: by process, as text: texts that may name its rank.
    """
    named = {pid: rank for pid, texts in said.items() if (rank := _first(_RANK, texts)) is not None}
    if len(set(named.values())) > 1:
        return MergedRanks({pid: int(rank) for pid, rank in named.items()}, (), len(said) - len(named))
    placed = {
        pid: label.strip("-_, ") for pid, texts in said.items() if (label := _first(_AXES, texts)) is not None
    }
    labels = sorted(set(placed.values()), key=lambda label: [*map(int, _NUMBER.findall(label))])
    if len(labels) < 2:
        return None
    ranks = {pid: labels.index(label) for pid, label in placed.items()}
    return MergedRanks(ranks, tuple(labels), len(said) - len(placed))


def _first(pattern: re.Pattern[str], texts: Sequence[str]) -> str | None:
    return next((found[1] for text in texts if (found := pattern.search(text))), None)
