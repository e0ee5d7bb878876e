"""Answers of a search on the disk: one that is lost, killed or interrupted goes on from them, wherever it ran.

The file is a journal as that of a sweep (`sweep.store`). An answer is found by what was asked: the plan on this
graph, system and scenario, for this objective; so a search of another space over the same file repeats no plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echograph import __version__
from echograph.errors import DataError
from echograph.options import given
from echograph.workflow.search.branch import Candidate, PlanAnswer, PlanPoint, Question, TooLarge
from echograph.workflow.search.step_cost import StepCost
from echograph.workflow.sweep.run import graph_digest, system_digest
from echograph.workflow.sweep.store import Journal, journal, read_journal
from echograph.workflow.workers import Workers

_Answer = Candidate | TooLarge | float | str
"""What is kept: no bounds, which are quick to find again."""


@contextmanager
def kept_answers(at: Workers, question: Question, path: Path) -> Iterator[Workers]:
    """Workers whose answers are written down as they come, and not asked for again.

    Args:
        at: who answers what is not known.
        question: what all points have in common.
        path: the journal.

    Raises:
        DataError: the file holds something else.
        OutputError: it cannot be written.
    """
    known = read_journal(path)
    with journal(path) as kept:
        yield _Kept(at, question, known, kept)


class _Kept:
    def __init__(self, at: Workers, question: Question, known: Mapping[str, Any], kept: Journal) -> None:
        self.at, self.known, self.kept = at, known, kept
        said = [
            __version__, graph_digest(question.graph), system_digest(question.system), given(question.scenario),
            question.objective, question.most_step_s,
        ]  # fmt: skip
        self.common = json.dumps(said, sort_keys=True, default=str)
        self.ready: list[tuple[PlanPoint, PlanAnswer]] = []

    @property
    def free(self) -> bool:
        # What is known is taken first: it may decide what is asked next.
        return self.at.free and not self.ready

    @property
    def busy(self) -> int:
        return self.at.busy + len(self.ready)

    def give(self, point: PlanPoint) -> None:
        record = None if point[2] == "bound" else self.known.get(self._key(point))
        if record is None:
            self.at.give(point)
        else:
            self.ready.append((point, _answer(record, point)))

    def take(self, timeout_s: float | None = None) -> list[tuple[PlanPoint, PlanAnswer]]:
        if self.ready:
            ready, self.ready = self.ready, []
            return ready
        answers = self.at.take(timeout_s)
        for point, answer in answers:
            if not isinstance(answer, StepCost) and point[2] != "bound":
                self.kept.add(self._key(point), _record(answer))
        return answers

    def _key(self, point: PlanPoint) -> str:
        _, plan, asked = point
        text = json.dumps([self.common, given(plan), asked == "whole"], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _record(answer: _Answer) -> dict[str, Any]:
    if isinstance(answer, Candidate):
        return {"candidate": {name: value for name, value in asdict(answer).items() if name not in _OF_POINT}}
    if isinstance(answer, TooLarge):
        return {"needs_bytes": answer.least_bytes}
    return {"refused": answer} if isinstance(answer, str) else {"step_s": answer}


_OF_POINT = ("number", "plan")


def _answer(record: Mapping[str, Any], point: PlanPoint) -> _Answer:
    """What `_record` wrote.

    Raises:
        DataError: it is not of a search.
    """
    number, plan, _ = point
    try:
        if "candidate" in record:
            low, high = record["candidate"]["interval_s"]
            return Candidate(**{**record["candidate"], "interval_s": (low, high)}, number=number, plan=plan)
        if "needs_bytes" in record:
            return TooLarge(int(record["needs_bytes"]))
        return str(record["refused"]) if "refused" in record else float(record["step_s"])
    except (KeyError, TypeError, ValueError):
        raise DataError("--journal: it holds answers of something else than a search: give another file") from None
