"""`echoprof collectives`: measure the collectives of the machine at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from echograph.cli.app import print_error, print_json, print_text, require_torch
from echograph.errors import UsageError


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
    if budget <= 0:
        raise UsageError(f"--budget: {budget:g}: give seconds above 0")
    _measure(wanted, steps, backend, budget, output, as_json)


def _measure(
    wanted: list[str], steps: list[int], backend: str, budget: float, output: Path | None, as_json: bool
) -> None:
    import torch
    from torch import distributed

    from echograph.ir.files import whole_folder, write_whole
    from echograph.profiler.measure.collectives import facts_of_ranks, header, sweep, table_row

    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in ("gloo", "nccl"):
        raise UsageError(f"--backend: unknown backend '{backend}': give gloo or nccl")
    if backend == "nccl" and not torch.cuda.is_available():
        raise UsageError("--backend nccl needs CUDA: this PyTorch sees none; use gloo")
    device: Any = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    distributed.init_process_group(backend)
    try:
        speaks = distributed.get_rank() == 0
        facts = facts_of_ranks(device)
        logs: dict[str, list[str]] = {name: [header(name, facts)] for name in wanted}
        records: list[dict[str, object]] = []
        for measured in sweep(wanted, steps, device, budget):
            log = logs[measured.operation]
            log.append(table_row(measured, len(facts)))
            if speaks and not as_json:
                print_text("\n".join(log) if len(log) == 2 else log[-1])
            records.append(
                {
                    "operation": measured.operation,
                    "ranks": len(facts),
                    "size_bytes": measured.size_bytes,
                    "seconds": measured.seconds,
                    "repeats": measured.repeats,
                }
            )
        if speaks and output is not None:
            with whole_folder(output) as folder:
                for name, log in logs.items():
                    write_whole(folder / f"{name}.log", ["\n".join(log) + "\n"])
            print_error(f"wrote {output}: echoprof fit --nccl-tests {output / wanted[0]}.log --cluster ...")
        if speaks and as_json:
            print_json(records)
    finally:
        distributed.destroy_process_group()
