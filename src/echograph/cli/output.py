"""What commands that write files share: the options, the checks beforehand, and a line on what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echograph.cli.app import print_error
from echograph.errors import UsageError

if TYPE_CHECKING:
    from echograph.simulator.result import Result

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result as JSON.")]
Trace = Annotated[Path | None, typer.Option(help="Write a Chrome trace, for Perfetto.")]


def check_outputs(inputs: Mapping[str, Path], outputs: Mapping[str, Path | None]) -> None:
    """Refuses files that cannot be written before any work is done, and two that are one.

    Args:
        inputs: what is read, by what it is called.
        outputs: what is written, by option; None where it was not asked for.

    Raises:
        UsageError: an output is an input, or another output.
        OutputError: one cannot be written.
    """
    from echograph.ir import files

    seen = {path.resolve(): name for name, path in inputs.items()}
    for option, path in outputs.items():
        if path is None:
            continue
        if (other := seen.get(path.resolve())) is not None:
            what = f"is {other} itself" if other in inputs else f"is what {other} writes"
            raise UsageError(f"{option} {path}: {what}: give it a file of its own")
        seen[path.resolve()] = option
        files.check_writable(path)


def write_text(path: Path | None, text: str, what: str) -> None:
    """Writes a file whole, where it was asked for, and says so."""
    from echograph.ir import files

    if path is not None:
        files.write_whole(path, [text])
        print_error(f"wrote {path} ({what})")


def write_json(path: Path | None, record: Any, what: str) -> None:
    """Writes a record as JSON, where it was asked for, and says so."""
    if path is not None:
        write_text(path, json.dumps(record, indent=2) + "\n", what)


def write_trace(path: Path | None, result: Result, ranks: Sequence[int] = ()) -> None:
    """Writes what ran when as a Chrome trace, where it was asked for, and says so."""
    if path is not None:
        assert result.job is not None
        from echograph.ir import files
        from echograph.ir.exporters.chrome import chrome_trace

        files.write_whole(path, chrome_trace(result.job, result.traced or result.timeline, ranks=tuple(ranks)))
        print_error(f"wrote {path} (Chrome trace: open in ui.perfetto.dev)")
