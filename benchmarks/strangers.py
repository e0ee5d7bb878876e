"""Captures training scripts of others, unedited, from clones: `python -m benchmarks.strangers FOLDER`.

Prints the table of docs/adapters/tried.md: what came out of each script of `strangers.toml`, in how many seconds
of processor time and at what peak of memory, or the line in which it ended. With `--outcomes FILE` each is written
there as it ends, and those that the file has are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_suffix(".toml")
_COMMAND = ["-c", "from echograph.cli.echoc import main; main()"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out of a capture.

    Attributes:
        name: of the script.
        ranks: of the world.
        captured: whether there is a graph.
        communication: axes and bytes a step that rank 0 exchanges along them.
        seconds: of processor time.
        mib: peak of memory.
        line: a warning, or what it ended with.
    """

    name: str
    ranks: int
    captured: bool
    communication: str
    seconds: float
    mib: float
    line: str


def scripts(text: str) -> list[dict[str, Any]]:
    """The scripts of a file of them; one that is like another has what it does not say itself from that one.

    Raises:
        KeyError: one is like none that stands before it.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in tomllib.loads(text)["script"]:
        base = found[row["like"]] if "like" in row else {}
        # Data and further arguments are those of one script alone.
        found[row["name"]] = {
            key: value for key, value in base.items() if key not in ("more", "data", "decide")
        } | row
    return list(found.values())


def clone(row: dict[str, Any]) -> str:
    """Name of the folder in which a script's repository lies."""
    return str(row.get("clone", row["repository"].partition("/")[2]))


def command(row: dict[str, Any], data: Path, output: Path) -> list[str]:
    """The capture of a script, as a user would type it."""
    what = ["--module", row["module"]] if "module" in row else ["--script", row["script"]]
    decided = [part for line in row.get("decide", ()) for part in ("--decide", line)]
    arguments = [part.format(data=data) for part in (*row["arguments"], *row.get("more", ()))]
    ranks = ["--world-size", str(row["ranks"])]
    ranks += ["--local-size", str(row["local-size"])] if "local-size" in row else []
    step = ["--step", str(row["step"])] if "step" in row else []
    framework = row.get("framework", "torch")
    made = [
        *(part for name in row.get("fake-data", ()) for part in ("--fake-data", name.format(data=data))),
        *(part for name in row.get("fake-weights", ()) for part in ("--fake-weights", name.format(data=data))),
    ]
    asked = [*what, *ranks, *step, *decided, *made]
    return ["capture", framework, *asked, "--json", "-o", str(output), "--", *arguments]


def capture(row: dict[str, Any], folder: Path, output: Path | None = None) -> Outcome:
    """Captures a script in a process of its own; the graph is kept where `output` says so."""
    at = folder / clone(row) / row.get("folder", "")
    own = folder / row.get("python", "") / "bin" / "python"
    python = str(own) if "python" in row and own.is_file() else sys.executable
    # As an environment that is active: what scripts call by name is found there first.
    found_at = {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    known = {"data": folder / "data", "path": os.environ.get("PYTHONPATH", "")}
    set_there = {name: value.format(**known) for name, value in row.get("environment", {}).items()}
    with tempfile.TemporaryDirectory() as made:
        asked = command(row, folder / "data", output or Path(made) / "job.pb")
        told, errors = Path(made) / "told", Path(made) / "errors"
        with told.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen(
                [python, *_COMMAND, *asked], cwd=at, stdout=out, stderr=err, env=os.environ | found_at | set_there
            )
            try:
                _, status, used = os.wait4(process.pid, 0)
            except KeyboardInterrupt:
                process.kill()
                raise
        seconds = used.ru_utime + used.ru_stime
        lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        summary = json.loads(told.read_text()) if status == 0 else {}
    warnings = summary.get("warnings", ())
    return Outcome(
        name=row["name"], ranks=row["ranks"], captured=status == 0, communication=_exchanged(summary),
        seconds=seconds, mib=used.ru_maxrss / 1024,
        line=" ".join(warnings) if status == 0 else (lines or [""])[-1],
    )  # fmt: skip


def outcomes(rows: Sequence[dict[str, Any]], folder: Path, kept: Path | None) -> Iterator[Outcome]:
    """What comes out of scripts, one after the other; those that a file of outcomes has are taken from there."""
    lines = kept.read_text().splitlines() if kept is not None and kept.is_file() else []
    known = {outcome.name: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}
    for row in rows:
        if row["name"] in known:
            yield known[row["name"]]
            continue
        outcome = capture(row, folder)
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        yield outcome


def _exchanged(summary: dict[str, Any]) -> str:
    """What a rank of the first role exchanges along each axis."""
    axes: dict[str, int] = {}
    for row in summary.get("communication", ()):
        calls = row["calls"].get(summary["roles"][0]["role"], 0)
        axes[row["axes"]] = axes.get(row["axes"], 0) + calls * row["bytes_per_rank"]
    return ", ".join(f"{name} {total / 2**20:,.1f} MiB" for name, total in axes.items())


def table(outcomes: list[Outcome]) -> str:
    """The outcomes in Markdown."""
    lines = [
        "| script | ranks | captured | a rank exchanges in a step | CPU s | MiB | |",
        "|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        told = "yes" if o.captured else "no"
        numbers = f"{o.ranks:,} | {told} | {o.communication} | {o.seconds:.0f} | {o.mib:,.0f}"
        lines.append(f"| {o.name} | {numbers} | {o.line.removeprefix('echoc: ').replace('|', '/')} |")
    return "\n".join(lines)


def main() -> None:
    """Runs them all, or those whose names hold a word, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the clones lie")
    parser.add_argument("--only", default="", help="those whose names hold this")
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file of scripts; by default strangers.toml")
    parser.add_argument("--outcomes", type=Path, help="a file that keeps them: a run that was ended goes on")
    given = parser.parse_args()
    folder = given.folder.resolve()
    rows = [row for row in scripts(given.rows.read_text()) if given.only in row["name"]]
    there = [row for row in rows if (folder / clone(row)).is_dir()]
    print(table(list(outcomes(there, folder, given.outcomes))))


if __name__ == "__main__":
    main()
