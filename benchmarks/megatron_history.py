"""When and with which arguments Megatron-LM's tests were measured, and how often, from the history of a clone.

A test's times are kept for years, and are written anew when its losses change: of the files of one checkout some
are of this month's code, others of code and containers of two years before. Arguments change meanwhile: until
October 2025 nearly all tests had `--timing-log-level 2`, which synchronizes the device around each part of a step.
What a test took with the same arguments at other times is in older versions of its file.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any

import yaml

CASES = "tests/functional_tests/test_cases"
LEAST = 3
"""Iterations of a measurement, at least; of one alone it is not known whether it was the first."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement of a test.

    Attributes:
        date: of the commit that has it first, as 2026-05-14.
        seconds: median of its iterations without the first one.
    """

    date: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a file of times.

    Attributes:
        arguments: of the script, when it was measured last; None: not known.
        runs: all that was measured with these, oldest first.
    """

    arguments: Mapping[str, Any] | None
    runs: tuple[Measured, ...]


@dataclass(slots=True)
class _File:
    """Iterations of a file of times as it is, and measurements with their arguments, oldest first."""

    times: Mapping[int, float]
    found: list[tuple[Measured, Mapping[str, Any] | None]]


def history(clone: Path, commit: str, alike: Callable[[Mapping[str, Any]], Any]) -> dict[str, Known]:
    """What is known of each file of times, by its path.

    Args:
        clone: a repository of Megatron-LM with its history.
        commit: the newest one that counts.
        alike: of arguments, what those have in common that take the same time.

    Raises:
        subprocess.CalledProcessError: git knows no such commit there.
    """
    files: dict[str, _File] = {}
    settings: dict[str, Mapping[str, Any] | None] = {}
    with closing(_Blobs(clone)) as blobs:
        for date, changes in _commits(clone, commit):
            for state, blob, _, path in changes:
                if state != "D" and path.endswith("/model_config.yaml"):
                    settings[path] = _arguments(blobs.text(blob))
            for state, blob, before, path in changes:
                if state != "D" and "/golden_values" in path:
                    known = None if state == "A" else files.get(before)
                    told = settings.get(str(PurePosixPath(path).parent / "model_config.yaml"))
                    files[path] = _added(known, _times(blobs.text(blob)), date, told)
    return {path: _known(file, alike) for path, file in files.items()}


def _known(file: _File, alike: Callable[[Mapping[str, Any]], Any]) -> Known:
    last = file.found[-1][1] if file.found else None
    if last is None:
        return Known(None, ())
    same = (run for run, told in file.found if told is not None and alike(told) == alike(last))
    return Known(last, tuple(same))


def _added(known: _File | None, times: Mapping[int, float], date: str, told: Any) -> _File:
    """A file with its new version, which is no measurement where its iterations are those of the one before."""
    found = list(known.found) if known else []
    common = times.keys() & known.times.keys() if known else ()
    same = bool(common) and all(times[step] == known.times[step] for step in common) if known else False
    if len(times) >= LEAST and not same:
        found.append((Measured(date, median([times[step] for step in sorted(times)][1:])), told))
    return _File(times or (known.times if known else {}), found)


def _commits(clone: Path, commit: str) -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Date and changes of each commit of the main line, oldest first: state, blob, path before, path."""
    log = ["log", "--first-parent", "-m", "--reverse", "--raw", "--no-abbrev", "-M80%", "--format=%x00%ad"]
    text = _git(clone, *log, "--date=short", commit, "--", CASES)
    for part in text.split("\0")[1:]:
        date, *lines = part.strip().splitlines()
        changes = []
        for line in filter(None, lines):
            head, *paths = line.split("\t")
            _, _, _, blob, state = head.split()
            changes.append((state[0], blob, paths[0], paths[-1]))
        yield date, changes


def _git(clone: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(clone), *words], capture_output=True, text=True, check=True).stdout


class _Blobs:
    """Contents of a repository's files, by their hashes."""

    def __init__(self, clone: Path) -> None:
        command = ["git", "-C", str(clone), "cat-file", "--batch"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def text(self, blob: str) -> str:
        """Of one file; "" of one that is not there."""
        given, taken = self._process.stdin, self._process.stdout
        assert given is not None and taken is not None
        given.write(f"{blob}\n".encode())
        given.flush()
        head = taken.readline().split()
        return taken.read(int(head[2]) + 1).decode() if len(head) == 3 else ""

    def close(self) -> None:
        """Ends the process behind it."""
        self._process.communicate()


def _times(text: str) -> dict[int, float]:
    """Seconds of iterations, by their numbers, of a file of times; older ones have a list of them."""
    try:
        told = json.loads(text)["iteration-time"]["values"]
    except (ValueError, KeyError, TypeError):
        return {}
    numbered = told.items() if isinstance(told, dict) else enumerate(told)
    return {int(step): value for step, value in numbered if isinstance(value, float) and value == value}


def _arguments(text: str) -> Mapping[str, Any] | None:
    """Of a test's file; older ones are not all YAML that can be read."""
    try:
        return {str(name): value for name, value in yaml.safe_load(text)["MODEL_ARGS"].items()}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None
