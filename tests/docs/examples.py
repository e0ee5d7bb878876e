"""Reads the examples out of Markdown pages, runs them, and writes their present output back.

    python tests/docs/examples.py docs/how-it-works.md ...

A page is one session: its blocks run in their order, in one folder, its Python blocks in one namespace.

    ```console            lines after `$ ` are commands, the others what they print
    ```python             runs; a ```text block that follows at once is what it prints
    ```LANGUAGE file=NAME is not run but written to NAME
    <!-- not run: why --> above a block: it is left out
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

FENCE = re.compile(r"```(\w+)\s*(?:file=(\S+))?\s*$")
NOT_RUN = re.compile(r"<!-- not run: \S.* -->$")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
COMMAND = "$ "
TIMEOUT_S = 600


class ExampleError(Exception):
    """An example that does not do what its page says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A fenced block.

    Attributes:
        page: the file it stands in.
        line: its first line in the file, from 0.
        language: what follows the fence.
        file: where it is written to; "" if it is run.
        lines: its content.
        shown: first and last line (exclusive) of the block that shows what a Python block prints.
    """

    page: Path
    line: int
    language: str
    file: str
    lines: list[str]
    shown: tuple[int, int] | None = None


@dataclass(slots=True)
class Session:
    """The folder and the namespace that a page's examples run in, and where its commands are."""

    folder: Path
    programs: Path = Path(sys.executable).parent
    module: ModuleType = field(default_factory=lambda: ModuleType("page"))

    def run(self, example: Example) -> list[str]:
        """Runs one example; the lines that it should now consist of (or, for Python, print).

        Raises:
            ExampleError: a command fails.
        """
        if example.file:
            path = self.folder / example.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(example.lines) + "\n", encoding="utf-8")
            return example.lines
        if example.language == "python":
            return self._python(example)
        return [line for command in _commands(example) for line in (*command, *self._shell(example, command))]

    def _python(self, example: Example) -> list[str]:
        # Blank lines in front, so that a traceback names the page's own line.
        code = compile("\n" * example.line + "\n".join(example.lines), str(example.page), "exec")
        sys.modules[self.module.__name__] = self.module
        printed = io.StringIO()
        importlib.invalidate_caches()
        sys.path.insert(0, str(self.folder))
        try:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
                exec(code, self.module.__dict__)  # noqa: S102 - the pages are our own
        finally:
            sys.path.remove(str(self.folder))
        return printed.getvalue().splitlines()

    def _shell(self, example: Example, command: list[str]) -> list[str]:
        line = "\n".join(command).removeprefix(COMMAND)
        path = os.pathsep.join([str(self.programs), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            where = f"{example.page.name}:{example.line}"
            raise ExampleError(f"{where}: '{line}' exits with {done.returncode}: {done.stderr}")
        # On a busy machine a command says its stages, which depend on the machine.
        said = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]
        return done.stdout.splitlines() + said


def _commands(example: Example) -> Iterator[list[str]]:
    """The commands of a console block, each with its continuation lines."""
    lines = iter(example.lines)
    for line in lines:
        if line.startswith(COMMAND):
            command = [line]
            while command[-1].endswith("\\"):
                command.append(next(lines))
            yield command


def examples(page: Path) -> list[Example]:
    """All blocks of a page that are run or written.

    Raises:
        ExampleError: a block does not end.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Example] = []
    at, before = 0, ""
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is None:
            before, at = lines[at] or before, at + 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i] == "```"), None)
        if end is None:
            raise ExampleError(f"{page}:{at + 1}: the block does not end")
        language, file = opening[1], opening[2] or ""
        runs = file or language in ("python", "console")
        if runs and not NOT_RUN.match(before):
            shown = _shown(lines, end + 1) if language == "python" and not file else None
            body = lines[at + 1 : end]
            found.append(Example(page=page, line=at + 1, language=language, file=file, lines=body, shown=shown))
        before, at = "", end + 1
    return found


def _shown(lines: list[str], at: int) -> tuple[int, int] | None:
    while at < len(lines) and not lines[at]:
        at += 1
    if at < len(lines) and lines[at] == "```text":
        return at + 1, lines.index("```", at)
    return None


def expected(example: Example) -> list[str] | None:
    """The lines that the page shows for an example; None where it shows nothing."""
    if example.language != "python":
        return example.lines
    if example.shown is None:
        return None
    return example.page.read_text(encoding="utf-8").splitlines()[slice(*example.shown)]


def words(lines: list[str]) -> list[str]:
    """Lines without what a new fit or a faster machine changes: numbers, bars and alignment."""
    masked = (NUMBER.sub("0", line) for line in lines)
    return [" ".join(line.replace("#", "").split()) for line in masked]


def refresh(page: Path, folder: Path) -> None:
    """Runs a page and writes into it what its examples print now."""
    session, changes = Session(folder), []
    for example in examples(page):
        lines = session.run(example)
        span = example.shown if example.language == "python" else (example.line, example.line + len(example.lines))
        if span is not None and not example.file:
            changes.append((span, lines))
    text = page.read_text(encoding="utf-8").splitlines()
    for (start, stop), lines in reversed(changes):
        text[start:stop] = [line.rstrip() for line in lines]
    page.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        shared = Example(
            page=Path("examples"), line=0, language="console", file="",
            lines=["$ echoc compile --model bert-base-uncased -o graph.pb"],
        )  # fmt: skip
        Session(Path(made)).run(shared)
        for name in sys.argv[1:]:
            refresh(Path(name), Path(made))
