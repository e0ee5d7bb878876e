"""The dependencies of a job's traces, ready to be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echograph.profiler.byteprofile.dag import Dag, LongestPath


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """The graphs of a folder of traces.

    Attributes:
        names: of the GPUs, by their numbers.
        dags: each GPU's own.
        all: of all GPUs together.
        parallelism: the most operators that ran at once, by the GPU's name; empty where nobody looked.
        notes: what is missing, one line each.
    """

    names: dict[int, str]
    dags: list[Dag]
    all: Dag
    parallelism: dict[str, int]
    notes: tuple[str, ...]

    def paths(self) -> list[tuple[str, LongestPath]]:
        """The longest path of each GPU, then of all."""
        own = [(self.names[number], dag.longest_path()) for number, dag in enumerate(self.dags)]
        return [*own, ("all", self.all.longest_path())]


def prepare(path: Path, *, queues: bool, run_time: bool) -> Prepared:
    """Reads a folder of traces with their dependencies.

    Args:
        path: the folder.
        queues: take communications apart.
        run_time: operators in the order in which they ran.
    """
    from echograph.profiler.byteprofile import dependencies
    from echograph.profiler.byteprofile.compose import coupled
    from echograph.profiler.byteprofile.layout import find_job

    job = find_job(path)
    found = dependencies.dependencies(job, queues=queues)
    names = {one.number: job.title(one.gpu) for one in found}
    swept = [dependencies.run_time(one) for one in found] if run_time else []
    dags = [one.dag for one in swept or found]
    return Prepared(
        names=names,
        dags=dags,
        all=coupled(job, found, dags),
        parallelism={names[number]: one.parallelism for number, one in enumerate(swept)},
        notes=tuple(dict.fromkeys(note for one in found for note in one.events.notes)),
    )
