"""A program that is a fork is told from the real one by nothing but its speed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SEEN = "import json, os, sys; print(json.dumps([sys.argv, os.getcwd(), os.environ['X'], sys.stdin.read()]))"


def run(program: Path | str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *map(str, arguments)], cwd=folder, env={**os.environ, "X": "1"},
        input="typed", capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_arguments_folder_environment_and_input_arrive(warm: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "seen.py").write_text(f"import beside\n{SEEN}")
    words = {"-c": ["-c", SEEN], "-m": ["-m", "seen"], "script": [tmp_path / "seen.py"]}[how]
    ours, real = (run(program, *words, "a b", folder=tmp_path) for program in (warm / "python", sys.executable))
    assert (ours.returncode, ours.stderr) == (0, "")
    assert ours.stdout == real.stdout


def test_a_status_a_traceback_and_a_signal_are_those_of_the_program(warm: Path, tmp_path: Path) -> None:
    assert run(warm / "python", "-c", "raise SystemExit(7)", folder=tmp_path).returncode == 7
    wrong = run(warm / "python", "-c", "1 / 0", folder=tmp_path)
    assert (wrong.returncode, wrong.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    killed = run(warm / "python", "-c", "import os; os.kill(os.getpid(), 9)", folder=tmp_path)
    assert killed.returncode == -signal.SIGKILL


END = """
import atexit, os, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("last", end="")
sys.exit({code})
"""


@pytest.mark.parametrize("code", ["", "0", "True", "300", "'a message'"])
def test_a_program_ends_as_the_real_one(warm: Path, tmp_path: Path, code: str) -> None:
    words = ["-c", END.format(code=code)]
    ours, real = (run(program, *words, folder=tmp_path) for program in (warm / "python", sys.executable))
    assert (ours.returncode, ours.stdout, ours.stderr) == (real.returncode, real.stdout, real.stderr)


def test_a_full_disk_is_noticed_at_the_end(warm: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    line = '"$0" -c "print(1)" > /dev/full'
    ours, real = (
        run("bash", "-c", line, program, folder=tmp_path) for program in (warm / "python", sys.executable)
    )
    assert ours.returncode == real.returncode != 0
    assert ours.stderr.splitlines()[-1] == real.stderr.splitlines()[-1]


def test_a_program_leaves_nothing_behind(warm: Path, tmp_path: Path) -> None:
    run(warm / "python", "-c", "import torch; torch.set_default_dtype(torch.float64)", folder=tmp_path)
    done = run(warm / "python", "-c", "import torch; print(torch.get_default_dtype())", folder=tmp_path)
    assert done.stdout == "torch.float32\n"


def test_a_program_ends_with_its_caller(warm: Path, tmp_path: Path) -> None:
    forever = "import time; open('begun', 'w').close(); time.sleep(600)"
    with subprocess.Popen([warm / "python", "-c", forever], cwd=tmp_path, stdout=subprocess.PIPE) as caller:
        while not (tmp_path / "begun").exists():
            assert caller.poll() is None
        caller.kill()
        assert caller.stdout is not None
        assert caller.stdout.read() == b"", "its end of the pipe is closed when it ends"


def test_a_command_is_the_installed_one(warm: Path, tmp_path: Path) -> None:
    installed = Path(sys.executable).with_name("echosim")
    if not installed.exists():
        pytest.skip("the commands are not installed")
    for words in (["clusters", "--json"], ["run", "no.pb"], []):
        ours, real = (run(program, *words, folder=tmp_path) for program in (warm / "echosim", installed))
        assert (ours.returncode, ours.stdout, ours.stderr) == (real.returncode, real.stdout, real.stderr)
