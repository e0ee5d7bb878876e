"""`echoc capture`: a user's own training script as a job graph, without its ranks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import print_error, print_json, progress, require_torch
from echograph.cli.options import parse_ranks
from echograph.cli.show_job import print_job
from echograph.errors import UsageError
from echograph.units import format_bytes
from echograph.workflow.summary import summarize_job


class Device(StrEnum):
    """What a script finds."""

    CUDA = "cuda"
    CPU = "cpu"


def capture_command(
    framework: Annotated[str, typer.Argument(help="torch, deepspeed or megatron.")],
    script: Annotated[Path, typer.Option("--script", help="The training script; it is not edited.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script finds behind its name; give it behind --.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the job.")] = 8,
    local_size: Annotated[int, typer.Option(min=1, help="Ranks of a machine.")] = 8,
    device: Annotated[
        Device, typer.Option(help="What the script finds: a GPU for each rank (cuda), or none (cpu).")
    ] = Device.CUDA,
    decide: Annotated[
        list[str] | None,
        typer.Option(help="Which way the script goes where a tensor's value decides: train.py:12=no; any number."),
    ] = None,
    ranks: Annotated[
        str, typer.Option(help="Which ranks to run: roles (one of each that differ), or numbers as 0,5.")
    ] = "roles",
    step: Annotated[
        int | None, typer.Option(min=1, help="Which training step to record; by default the first steady one.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Let the script go on after that step.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="DeepSpeed: the configuration, for scripts that take one.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the job goes.")] = Path("job.pb"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; the script prints on stderr.")] = False,
) -> None:
    """Run a training script as one rank of a job without GPUs, and write what all ranks do as a job graph."""
    from echograph.ir import files, serde
    from echograph.ir.graph import JobGraph

    chosen = () if ranks == "roles" else parse_ranks("--ranks", ranks)
    files.check_writable(output)
    require_torch("capturing scripts")
    from echograph.workflow.capture import capture_script_file

    captured = capture_script_file(
        script, framework, arguments or (), world_size=world_size, local_size=local_size,
        gpus=device is Device.CUDA, decided=dict(map(_decided, decide or ())), ranks=chosen, step=step,
        whole=whole, config=config, showing=lambda: progress("starting"), quiet=as_json,
    )  # fmt: skip
    with progress(f"writing {output}") as say:
        size = serde.save(captured.graph, output, say)
    for note in captured.notes:
        print_error(f"note: {note}")
    assert isinstance(captured.graph, JobGraph)
    summary = summarize_job(captured.graph)
    if as_json:
        print_json({"output": str(output), "bytes": size, "notes": list(captured.notes), **summary})
    else:
        print_job(summary)
    print_error(f"wrote {output} ({format_bytes(size)})")


def _decided(text: str) -> tuple[str, bool]:
    where, _, which = text.rpartition("=")
    name, _, line = where.rpartition(":")
    if not name or not line.isdecimal() or which not in ("yes", "no"):
        raise UsageError(f"--decide {text}: give a line of the script and which way it goes, as train.py:12=no")
    return where, which == "yes"
