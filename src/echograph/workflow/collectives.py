"""The collectives of the machine at hand, measured between ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echograph.errors import UsageError


def measure_collectives(
    wanted: Sequence[str],
    sizes: Sequence[int],
    backend: str,
    budget_s: float,
    tell: Callable[[str], None],
    output: Path | None = None,
) -> list[dict[str, Any]] | None:
    """Times collectives over all ranks.

    Args:
        wanted: operations: "all_reduce", ...
        sizes: bytes of each.
        backend: "gloo" or "nccl"; "": nccl where there is CUDA.
        budget_s: seconds that each size is repeated.
        tell: given the lines of a table like nccl-tests', as they come.
        output: folder for one such table an operation.

    Returns:
        A record each measurement, in seconds; None on all ranks but the first.

    Raises:
        UsageError: a backend that there is not.
        OutputError: the folder cannot be written.
    """
    import torch
    from torch import distributed

    from echograph.ir.files import whole_folder, write_whole
    from echograph.profiler.measure.collectives import facts_of_ranks, header, sweep, table_row

    device = _device(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        first = distributed.get_rank() == 0
        facts = facts_of_ranks(device)
        logs: dict[str, list[str]] = {name: [header(name, facts)] for name in wanted}
        records: list[dict[str, Any]] = []
        for measured in sweep(list(wanted), list(sizes), device, budget_s):
            log = logs[measured.operation]
            log.append(table_row(measured, len(facts)))
            if first:
                tell("\n".join(log) if len(log) == 2 else log[-1])
            records.append(
                {
                    "operation": measured.operation,
                    "ranks": len(facts),
                    "size_bytes": measured.size_bytes,
                    "seconds": measured.seconds,
                    "repeats": measured.repeats,
                }
            )
        if first and output is not None:
            with whole_folder(output) as folder:
                for name, log in logs.items():
                    write_whole(folder / f"{name}.log", ["\n".join(log) + "\n"])
        return records if first else None
    finally:
        distributed.destroy_process_group()


def _device(backend: str) -> Any:
    import torch

    if backend not in ("gloo", "nccl"):
        raise UsageError(f"--backend: unknown backend '{backend}': give gloo or nccl")
    if backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--backend nccl needs CUDA: this PyTorch sees none; use gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
