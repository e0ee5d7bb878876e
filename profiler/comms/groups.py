"""Names for process groups that are the same on all of their ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

LONGEST = 40


class TracedGroup:
    """A process group as the tracer knows it.

    Attributes:
        name: same on all its ranks.
        ranks: global ranks, in the order of the group.
        torch_name: as PyTorch numbers it.
        about: what its maker said of it.
        backend: what communicates.
        rank: this rank's number in the group.
        issued: calls so far, by channel.
    """

    __slots__ = ("about", "backend", "issued", "name", "rank", "ranks", "torch_name")

    def __init__(
        self, *, name: str, ranks: tuple[int, ...], torch_name: str, about: str, backend: str, rank: int
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.torch_name = torch_name
        self.about = about
        self.backend = backend
        self.rank = rank
        self.issued: dict[str, int] = {}


class TracedGroups:
    """The groups of this process.

    A name is the group's sorted ranks, and a number where several groups have the same ones: PyTorch asks that all
    members make groups in one order, so the k-th group of certain ranks is one group, wherever it is first used.
    PyTorch's own numbers are no help, since a rank counts only the groups whose making it takes part in.
    """

    def __init__(self) -> None:
        self._known: dict[str, TracedGroup] = {}
        self._made: Counter[str] = Counter()

    def of(self, process_group: Any) -> TracedGroup:
        """The group of a `ProcessGroup`."""
        group = self._known.get(process_group.group_name)
        return group if group is not None else self._find(process_group)

    def sweep(self) -> None:
        """Names the groups that PyTorch has made since the last look, in the order of their making."""
        from torch.distributed.distributed_c10d import ProcessGroup, _world

        for process_group, numbers in list(_world.pg_group_ranks.items()):
            # A rank that is not in a group has a number in the group's place.
            if isinstance(process_group, ProcessGroup) and process_group.group_name not in self._known:
                self._add(process_group, tuple(sorted(numbers, key=lambda rank: numbers[rank])))

    def forget(self, *torch_names: str) -> None:
        """Of groups that are destroyed, all if none is named; their names are not given again."""
        for name in torch_names or list(self._known):
            self._known.pop(name, None)

    def issued(self) -> dict[str, int]:
        """Calls so far, by channel."""
        return {channel: n for group in list(self._known.values()) for channel, n in list(group.issued.items())}

    def _find(self, process_group: Any) -> TracedGroup:
        self.sweep()
        group = self._known.get(process_group.group_name)
        # A group that PyTorch's Python side does not list: its ranks are not known, only how many.
        return group if group is not None else self._add(process_group, tuple(range(process_group.size())))

    def _add(self, process_group: Any, ranks: tuple[int, ...]) -> TracedGroup:
        shown = spell_ranks(ranks)
        self._made[shown] += 1
        group = TracedGroup(
            name=shown if self._made[shown] == 1 else f"{shown}#{self._made[shown]}",
            ranks=ranks,
            torch_name=process_group.group_name,
            about=process_group.group_desc,
            backend=process_group.name(),
            rank=process_group.rank(),
        )
        self._known[group.torch_name] = group
        return group


def spell_ranks(ranks: Sequence[int]) -> str:
    """Ranks in a word: `0-3`, `0-12:4` (every fourth), `0,1,5`; what is longer ends in a number of its own."""
    ordered = sorted(ranks)
    steps = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 2 and len(steps) == 1:
        (step,) = steps
        return f"{ordered[0]}-{ordered[-1]}" + (f":{step}" if step > 1 else "")
    word = ",".join(map(str, ordered))
    if len(word) <= LONGEST:
        return word
    return f"{ordered[0]},{ordered[1]},..{ordered[-1]}~{hashlib.sha256(word.encode()).hexdigest()[:8]}"
