"""Progress: nothing of quick commands, a line a stage of slow ones, a count on a terminal; errors come last."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading

import pytest

from echograph.cli import output as shown
from echograph.cli.output import show_progress

SLOW = """
import sys
from echograph.cli import output as shown
from echograph.cli.app import make_app, run
from echograph.errors import InputError
shown.QUIET_S = 0.0
app = make_app("slow", "")
@app.command()
def command() -> None:
    with shown.show_progress("reading") as say:
        for number in range(1000):
            say("counting", number + 1, 1000)
        say("ending")
        if sys.argv.pop() == "fail":
            raise InputError("nothing there")
    print("done")
sys.argv = ["slow", "command"]
run(app, "slow")
"""


def ran(how: str) -> tuple[str, str]:
    code = SLOW.replace("sys.argv.pop()", repr(how))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def test_a_line_a_stage_and_the_error_last() -> None:
    out, err = ran("well")
    assert out == "done\n"
    assert err.splitlines()[-2:] == ["counting ...", "ending ..."]
    assert len(err.splitlines()) <= 3
    out, err = ran("fail")
    assert out == ""
    assert err.splitlines()[-2:] == ["ending ...", "slow: nothing there"]


def test_a_quick_command_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("reading") as progress:
        progress("counting", 1, 2)
    assert capsys.readouterr() == ("", "")
    assert not [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, threading.Timer) and not thread.finished.is_set()
    ]


def test_one_long_stage_is_said_without_being_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody calls while a stage runs; its line comes all the same."""
    monkeypatch.setattr(shown, "QUIET_S", 0.01)
    written = threading.Event()
    write = shown._write
    monkeypatch.setattr(shown, "_write", lambda line: (write(line), written.set()))
    with show_progress("thinking\nlong"):
        assert written.wait(30)
    assert capsys.readouterr().err == "thinking long ...\n"


def test_a_terminal_shows_a_count() -> None:
    leader, follower = pty.openpty()
    code = (
        "from echograph.cli.output import show_progress\nimport time\n"
        "with show_progress('reading') as progress:\n progress('counting [b] it', 7, 1234); time.sleep(0.5)\n"
    )
    subprocess.run([sys.executable, "-c", code], stderr=follower, check=True, env={**os.environ, "TERM": "xterm"})
    os.close(follower)
    said = io.BytesIO()
    try:
        while piece := os.read(leader, 4096):
            said.write(piece)
    except OSError:  # the end, on Linux
        pass
    os.close(leader)
    assert b"counting [b] it" in said.getvalue()
    assert b"7 of 1,234" in said.getvalue()
