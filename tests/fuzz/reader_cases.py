"""Runs commands on damaged files, in this process, and says what they did wrong."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NamedTuple

from damage import damage
from reader_targets import OUT, STEP, Files, Target

from echograph.cli import output

SECONDS = 20
MEMORY_BYTES = 2**30
LINE = 500
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
COUNTED = (
    "bytes",
    "flops",
    "_s",
    "_us",
    "_ms",
    "ops",
    "tasks",
    "calls",
    "samples",
    "tokens",
    "parameters",
    "ranks",
)
SEED = 0
FALSE_NUMBERS = re.compile(rb"(?<![\w\"'.-])(?:NaN|-?Infinity)(?![\w\"'])")


class Outcome(NamedTuple):
    """What a command left behind."""

    status: int | None
    out: str
    err: str


class TooLong(BaseException):
    """The time of a case is over; nothing but `run` catches it."""


def run_command(*arguments: object) -> Outcome:
    """Runs a command as its console script would."""
    from echograph.cli.app import run

    name, *rest = map(str, arguments)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before, sys.argv = sys.argv, [name, *rest]
    status: int | str | None = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run(import_module(f"echograph.cli.{name}").app, name)
    except SystemExit as stop:
        status = stop.code
    finally:
        sys.argv = before
    texts = (stream.buffer.getvalue().decode(errors="surrogateescape") for stream in (out, err))  # type: ignore[attr-defined]
    return Outcome(status if isinstance(status, int) else None, *texts)


@functools.cache
def seeds_of(target: Target) -> list[Files]:
    """The valid files of a reader, made once."""
    return target.seeds()


class Case:
    """One damaged file and the command that reads it: a function of the reader, the seed and the number."""

    def __init__(self, target: Target, seed: int, number: int, *, whole: bool = False) -> None:
        chance = Random(f"{seed} {target.name} {number}")
        self.target, self.number, self.seed = target, number, seed
        seeds = seeds_of(target)
        self.files = dict(seeds[number % len(seeds)])
        self.victim = chance.choice([name for name in self.files if name.endswith(target.damaged)])
        self.command = target.commands[number // len(seeds) % len(target.commands)]
        data = self.files[self.victim]
        if whole and self.victim.endswith(".pickle"):
            from damage import pickled

            self.files[self.victim] = pickled(json.loads(data))
        elif not whole:
            self.files[self.victim] = damage(self.victim, data, chance)

    def words(self, folder: Path) -> list[str]:
        """The command line."""
        names = sorted(self.files)
        found = {"{file}": folder / self.victim, "{folder}": folder, "{step}": STEP}
        found |= {f"{{seed:{name}}}": folder / name for name in names}
        found |= {f"{{seed:{at}}}": folder / name for at, name in enumerate(names)}
        words = [word.replace(OUT, f"{folder}.out") for word in self.command]
        for mark, path in found.items():
            words = [word.replace(mark, str(path)) for word in words]
        return words

    def write(self, folder: Path) -> None:
        """Puts the files into a folder."""
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

    def fault(self, work: Path) -> str | None:
        """What the command did wrong; None where it did right."""
        folder = work / "in"
        folder.mkdir(parents=True)
        self.write(folder)
        before = {path for path in work.rglob("*") if path.is_file()}
        try:
            with contextlib.chdir(folder), limited():
                outcome = run_command(*self.words(folder))
        except TooLong:
            return f"no answer in {SECONDS} s"
        except BaseException as error:
            return f"{type(error).__name__} out of the command: {error}"[:300]
        new = [path for path in work.rglob("*") if path.is_file() and path not in before]
        return judge(outcome, self.command, Path(f"{folder}.out"), new)


def judge(outcome: Outcome, command: tuple[str, ...], out: Path, new: list[Path]) -> str | None:
    """What is wrong with what a command left behind."""
    said = outcome.out + outcome.err
    if (
        "internal error" in outcome.err
        or "Traceback" in said
        or "Warning: " in outcome.err
        or outcome.status not in (0, 1, 2)
    ):
        return outcome.err[-300:] or f"exit status {outcome.status}"
    if "out of memory" in outcome.err:
        return f"more than {MEMORY_BYTES >> 20} MiB: {outcome.err[:200]}"
    if found := CONTROLS.search(said.replace("\r\n", "\n")):
        return f"character {found[0]!r} on the terminal: {said[max(0, found.start() - 80) : found.end() + 20]!r}"
    if outcome.status:
        # What is found in a set of traces is the result of checking it.
        return None if "check" in command and outcome.out and not outcome.err else _judge_failure(outcome, new)
    return _judge_success(outcome, command, out)


def _judge_failure(outcome: Outcome, new: list[Path]) -> str | None:
    if outcome.err.count("\n") != 1:
        return f"{outcome.err.count(chr(10))} lines for an error: {outcome.err[:300]}"
    if len(outcome.err) > LINE + 1:
        return f"a line of {len(outcome.err)} characters: {outcome.err[:300]}"
    return f"left behind by a failure: {new[0].name}; {outcome.err[:200]}" if new else None


def _judge_success(outcome: Outcome, command: tuple[str, ...], out: Path) -> str | None:
    if "--json" in command:
        try:
            said = json.loads(outcome.out, parse_constant=_refuse)
        except ValueError as error:
            return f"its JSON is none: {error}"
        # A comparison tells differences under the names of what differs.
        if "compare" not in command and (found := next(_negative(said), None)):
            return f"less than nothing: {found}"
    if OUT not in command:
        return None
    if not out.exists():
        return "success, and no output"
    if "import" in command or "lower" in command or "annotate" in command:
        checked = run_command("echoc", "check", out)
        return f"a graph that echoc check refuses: {checked.err[:200]}" if checked.status else None
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    number = next((m for path in files if (m := FALSE_NUMBERS.search(path.read_bytes()))), None)
    return f"{number[0].decode()} in what it wrote" if number else None


def _negative(value: Any, name: str = "") -> Iterator[str]:
    """What is counted and yet below zero, as a sum is that 64 bits do not hold."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else ((name, item) for item in value):
            yield from _negative(item, name if name.endswith(COUNTED) else str(key))
    elif isinstance(value, int | float) and value < 0 and name.endswith(COUNTED):
        yield f"{name} {value}"


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """What runs within has so many seconds of the processor, and so much memory above what is in use."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise TooLong

    usual = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, usual[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, usual)


def prepare(target: Target) -> str | None:
    """Runs each command on what is whole; what is imported on first use is no case's memory.

    Returns:
        A command that no whole file passes, or a file that passes none; None where there is none.
    """
    os.environ.update(HF_HUB_OFFLINE="1", COLUMNS="120")
    output.QUIET_S = 3600.0  # a loaded machine makes a command slow, which then says what it is at
    # A process says a warning once for each line, and a command is a process of its own.
    warnings.simplefilter("always")
    seeds = seeds_of(target)
    failed: dict[int | tuple[str, ...], str] = {}
    passed: set[int | tuple[str, ...]] = set()
    for number in range(len(seeds) * len(target.commands)):
        case = Case(target, SEED, number, whole=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "in"
            folder.mkdir()
            case.write(folder)
            with contextlib.chdir(folder):
                outcome = run_command(*case.words(folder))
            both = (number % len(seeds), case.command)
            if outcome.status:
                failed |= dict.fromkeys(both, f"{target.name}: {' '.join(case.command)}: {outcome.err[-500:]}")
            else:
                passed |= set(both)
    return next((said for what, said in failed.items() if what not in passed), None)


def run_cases(target: Target, seed: int, numbers: range) -> Iterator[tuple[int, str | None]]:
    """The cases of a reader, one after the other, each with what went wrong."""
    work = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        for number in numbers:
            with tempfile.TemporaryDirectory(dir=work) as name:
                yield number, Case(target, seed, number).fault(Path(name))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def reproducer(target: Target, seed: int, number: int) -> str:
    """The command line that runs one case again."""
    return f"python tests/fuzz/fuzz_readers.py --reader '{target.name}' --seed {seed} --case {number}"
