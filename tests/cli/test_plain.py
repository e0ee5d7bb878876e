"""Plain values are read as typer reads them; the others are left to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from echograph.cli.app import read_plainly


def read(words: list[str], *, plainly: bool) -> Any:
    """What a command is given for some words, or what it says is wrong."""
    app, given = typer.Typer(), []

    @app.command()
    def command(
        path: Path,
        whole: int | None = None,
        number: float = 0.5,
        text: str = "none",
        several: list[str] | None = None,
        limited: Annotated[int, typer.Option(min=1, max=9)] = 1,
        share: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
        flag: bool | None = None,
    ) -> None:
        given.append((path, whole, number, text, several, limited, share, flag))

    made = typer.main.get_command(app)
    if plainly:
        read_plainly(made)
    try:
        made(words, standalone_mode=False)
    except Exception as error:
        return type(error), getattr(error, "message", str(error))
    return given, [type(value) for value in given[0]]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "a.pb",
        "a.pb --whole 12 --number 0.02 --text 17 --several a --several b=1 --flag",
        "a.pb --whole -3 --number -1 --no-flag",
        "a.pb --whole 007 --number 1e-3",
        "a.pb --whole 1.5",
        "a.pb --whole ' 4'",
        "a.pb --whole 1_000",
        "a.pb --whole 99999999999999999999999",
        "a.pb --number inf",
        "a.pb --number x",
        "a.pb --limited 9",
        "a.pb --limited 1",
        "a.pb --limited 0",
        "a.pb --share 0.25 --limited 0009",
        "a.pb --share 1.5",
        "a.pb --share -0",
        "a.pb --limited 10",
        "a.pb --limited x",
        "/ --whole 3",
    ],
)
def test_values_and_errors_are_those_of_typer(words: str) -> None:
    import shlex

    assert read(shlex.split(words), plainly=True) == read(shlex.split(words), plainly=False)


def test_what_is_plain_loads_no_library_that_checks() -> None:
    program = """
import sys
from echograph.cli.app import run
from echograph.cli.echosim import app
sys.argv = ["echosim", "run", "missing.pb", "--gpus", "8", "--tp", "2"]
try:
    run(app, "echosim")
except SystemExit as ended:
    assert ended.code == 1, ended.code
assert "pydantic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
