"""`echoprof collectives`: measure the collectives of the machine at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import print_error, print_json, print_text, require_torch
from echograph.errors import UsageError
from echograph.progress import silent


def collectives_command(
    sizes: Annotated[
        str, typer.Option(help="Range (1K:64M, each the double) or list (4K,1M) of bytes.")
    ] = "1K:64M",
    ops: Annotated[str, typer.Option(help="Operations, with commas.")] = "all_reduce,all_gather,reduce_scatter",
    backend: Annotated[str, typer.Option(help="gloo or nccl; by default nccl where there is CUDA.")] = "",
    budget: Annotated[float, typer.Option(help="Seconds that each size is repeated.")] = 0.5,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for one log an operation.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Under torchrun: time collectives and write tables like nccl-tests', for `echoprof fit --nccl-tests`."""
    require_torch("measuring collectives")
    from echograph.profiler.measure.collectives import parse_operations, parse_sizes

    wanted, steps = parse_operations(ops), parse_sizes(sizes)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UsageError(
            "echoprof collectives measures between ranks: torchrun --nproc-per-node 2 --no-python "
            "echoprof collectives"
        )
    if not budget > 0:
        raise UsageError(f"--budget: {budget:g}: give seconds above 0")
    from echograph.workflow.measure import measure_collectives

    found = measure_collectives(wanted, steps, backend, budget, silent if as_json else print_text, output)
    if found is None:
        return
    if output is not None:
        print_error(f"wrote {output}: echoprof fit --nccl-tests {output / wanted[0]}.log --cluster ...")
    if as_json:
        print_json(found)
