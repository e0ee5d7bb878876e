"""When and with which arguments Megatron-LM's tests were measured, and how often, from the history of a clone.

A test's times are kept for years, and are written anew when its losses change: of the files of one checkout some
are of this month's code, others of code and containers of two years before. Arguments change meanwhile: until
October 2025 nearly all tests had `--timing-log-level 2`, which synchronizes the device around each part of a step.
What a test took with the same arguments at other times is in older versions of its file.

Times on H100 are of two kinds of machines, and are written to the same files: DGX H100 of NVIDIA's own CI, and,
since 2026, instances of AWS, on which GitHub's CI runs (`of_github`).

Some files are copies: of the same iterations, to the last digit, as a file of another GPU. Which of them ran is
not said, so that such times are of neither.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
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
        spread: what nine of ten iterations took less than, over the shortest one.
        on_github: whether a runner of GitHub's CI took it, an instance of AWS.
    """

    date: str
    seconds: float
    spread: float = 1.0
    on_github: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a file of times.

    Attributes:
        arguments: of the script, when it was measured last; None: not known.
        runs: all that was measured with these, oldest first; without copies.
        copied: whether what it holds is what a file of another GPU holds, or held.
    """

    arguments: Mapping[str, Any] | None
    runs: tuple[Measured, ...]
    copied: bool = False


@dataclass(frozen=True, slots=True)
class _Found:
    """A measurement, its iterations, its commit, and the arguments of its test then."""

    run: Measured
    iterations: tuple[float, ...]
    commit: str
    told: Mapping[str, Any] | None


@dataclass(slots=True)
class _File:
    """Iterations of a file of times as it is, and its measurements, oldest first."""

    times: Mapping[int, float]
    found: list[_Found]


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
        for version, date, changes in _commits(clone, commit):
            for state, blob, _, path in changes:
                if state != "D" and path.endswith("/model_config.yaml"):
                    settings[path] = _arguments(blobs.text(blob))
            for state, blob, before, path in changes:
                if state != "D" and "/golden_values" in path:
                    known = None if state == "A" else files.get(before)
                    told = settings.get(str(PurePosixPath(path).parent / "model_config.yaml"))
                    files[path] = _added(known, _times(blobs.text(blob)), date, version, told)
        times = {path: [(f.commit, f.run) for f in file.found] for path, file in files.items() if _H100 in path}
        github = of_github(times, lambda version: _runs_on_github(blobs, clone, version))
    copies = _copies(files)
    return {path: _known(file, alike, github if _H100 in path else set(), copies) for path, file in files.items()}


_H100 = "h100"
_GPU = re.compile("gb200|h100|a100")
"""GPUs in names of files of times; the oldest have none."""


def _copies(files: Mapping[str, _File]) -> set[tuple[float, ...]]:
    """Iterations that files of several GPUs have, or had."""
    gpus: dict[tuple[float, ...], set[str]] = {}
    for path, file in files.items():
        if of := _GPU.search(PurePosixPath(path).name):
            for found in file.found:
                gpus.setdefault(found.iterations, set()).add(of[0])
    return {iterations for iterations, of in gpus.items() if len(of) > 1}


def _known(
    file: _File, alike: Callable[[Mapping[str, Any]], Any], github: set[str], copies: set[tuple[float, ...]]
) -> Known:
    last = file.found[-1] if file.found else None
    if last is None or last.told is None:
        return Known(None, ())
    same = (found for found in file.found if found.told is not None and alike(found.told) == alike(last.told))
    own = (found for found in same if found.iterations not in copies)
    runs = tuple(replace(found.run, on_github=found.commit in github) for found in own)
    return Known(last.told, runs, copied=last.iterations in copies)


SLOWER = 1.2
"""Times as long as on a DGX H100, from which on a commit's times are of another machine. Of fifteen commits whose
tests both run, four are 1.41 to 1.51 times (43 tests), one of two tests of Muon 2.7, with arguments that have
changed since, and ten at most 1.15."""


def of_github(
    times: Mapping[str, Sequence[tuple[str, Measured]]], runs_there: Callable[[str], Mapping[str, bool]]
) -> set[str]:
    """Commits whose times are of GitHub's runners.

    Recipes say which tests GitHub's CI runs. A commit that has times of one that it does not run is of NVIDIA's
    own CI, all of it, since one run wrote it. Of a commit whose tests both run, times tell: against those that
    the same tests took in commits that are NVIDIA's, of the same year.

    Args:
        times: of files: commits and what they measured.
        runs_there: of a commit, whether GitHub's CI runs a test, by its name; of what is in no recipe, nothing.
    """
    by_commit: dict[str, list[tuple[str, Measured]]] = {}
    for path, found in times.items():
        for commit, run in found:
            by_commit.setdefault(commit, []).append((path, run))
    told = {commit: runs_there(commit) for commit in by_commit}
    kinds = {
        commit: {told[commit].get(PurePosixPath(path).parent.name) for path, _ in found} - {None}
        for commit, found in by_commit.items()
    }

    def slower(commit: str) -> list[float]:
        return [
            run.seconds / median(others)
            for path, run in by_commit[commit]
            if (others := [o.seconds for c, o in times[path] if False in kinds[c] and o.date[:4] == run.date[:4]])
        ]

    return {
        commit
        for commit, kind in kinds.items()
        if kind == {True} and (ratios := slower(commit)) and median(ratios) > SLOWER
    }


_RECIPES = "tests/test_utils/recipes"


def _runs_on_github(blobs: _Blobs, clone: Path, commit: str) -> dict[str, bool]:
    """Whether GitHub's CI runs tests on H100, by their names, as the recipes of a commit say."""
    listed = _git(clone, "ls-tree", "-r", commit, "--", _RECIPES)
    found: dict[str, bool] = {}
    for line in listed.splitlines():
        if line.endswith(".yaml"):
            for test, scope in _scopes(blobs, line.split()[2]):
                found[test] = found.get(test, False) or scope.startswith("mr-github")
    return found


def _scopes(blobs: _Blobs, blob: str) -> Sequence[tuple[str, str]]:
    """Tests of a file of recipes with each scope in which they run on H100."""
    if blob not in blobs.scopes:
        try:
            told = yaml.load(blobs.text(blob), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError:
            told = None
        blobs.scopes[blob] = [
            (str(test), str(scope))
            for product in (told or {}).get("products") or ()
            for test in product.get("test_case") or ()
            for run in product.get("products") or ()
            if any(_H100 in str(platform) for platform in run.get("platforms") or ())
            for scope in run.get("scope") or ()
        ]
    return blobs.scopes[blob]


def _added(known: _File | None, times: Mapping[int, float], date: str, commit: str, told: Any) -> _File:
    """A file with its new version, which is no measurement where its iterations are those of the one before."""
    found = list(known.found) if known else []
    common = times.keys() & known.times.keys() if known else ()
    same = bool(common) and all(times[step] == known.times[step] for step in common) if known else False
    if len(times) >= LEAST and not same:
        _, *taken = every = tuple(times[step] for step in sorted(times))
        spread = sorted(taken)[9 * len(taken) // 10] / min(taken)
        found.append(_Found(Measured(date, median(taken), spread), every, commit, told))
    return _File(times or (known.times if known else {}), found)


def _commits(clone: Path, commit: str) -> Iterator[tuple[str, str, list[tuple[str, str, str, str]]]]:
    """Each commit of the main line, its date and changes, oldest first: state, blob, path before, path."""
    log = ["log", "--first-parent", "-m", "--reverse", "--raw", "--no-abbrev", "-M80%", "--format=%x00%H %ad"]
    text = _git(clone, *log, "--date=short", commit, "--", CASES)
    for part in text.split("\0")[1:]:
        head, *lines = part.strip().splitlines()
        version, date = head.split()
        changes = []
        for line in filter(None, lines):
            state_of, *paths = line.split("\t")
            _, _, _, blob, state = state_of.split()
            changes.append((state[0], blob, paths[0], paths[-1]))
        yield version, date, changes


def _git(clone: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(clone), *words], capture_output=True, text=True, check=True).stdout


class _Blobs:
    """Contents of a repository's files, by their hashes."""

    def __init__(self, clone: Path) -> None:
        command = ["git", "-C", str(clone), "cat-file", "--batch"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.scopes: dict[str, Sequence[tuple[str, str]]] = {}

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
