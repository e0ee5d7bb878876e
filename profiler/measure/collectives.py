"""Measures the collectives of the machine at hand, and writes what nccl-tests would print of them."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from echograph.errors import UnknownNameError, UsageError
from echograph.ir.comms.bandwidth import bus_factor

ITEM_BYTES = 4
WARM_UP = 2
# Operation -> nccl-tests' program, its reduction, its root.
PROGRAMS = {
    "all_reduce": ("all_reduce_perf", "sum", -1),
    "all_gather": ("all_gather_perf", "none", -1),
    "reduce_scatter": ("reduce_scatter_perf", "sum", -1),
    "all_to_all": ("alltoall_perf", "none", -1),
    "broadcast": ("broadcast_perf", "none", 0),
    "reduce": ("reduce_perf", "sum", 0),
    "send_recv": ("sendrecv_perf", "none", -1),
}
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """One size of one operation.

    Attributes:
        operation: a key of `PROGRAMS`.
        size_bytes: nccl-tests' size, a multiple of 4 bytes times the ranks where it is divided among them.
        seconds: of one call, the mean over the ranks, median of the repeats.
        repeats: how often it was timed.
    """

    operation: str
    size_bytes: int
    seconds: float
    repeats: int


def parse_sizes(text: str) -> list[int]:
    """Sizes in bytes from `1K:1G` (each the double of the last) or `1K,64K,1M`.

    Raises:
        UsageError: the text is neither.
    """
    try:
        if ":" in text:
            low, high = (_bytes(part) for part in text.split(":"))
            sizes = [low]
            while sizes[-1] * 2 <= high:
                sizes.append(sizes[-1] * 2)
        else:
            low, sizes = 1, [_bytes(part) for part in text.split(",")]
            high = max(sizes)
    except ValueError:
        raise UsageError(f"--sizes: '{text}': give a range like 1K:1G or a list like 4K,1M") from None
    if (low < ITEM_BYTES and ":" in text) or min(sizes) < ITEM_BYTES or high < low:
        raise UsageError(f"--sizes: '{text}': sizes are at least {ITEM_BYTES} bytes, the smaller one first")
    return sizes


def parse_operations(text: str) -> list[str]:
    """Operations from a list with commas.

    Raises:
        UnknownNameError: one is in no table.
        UsageError: there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PROGRAMS:
            raise UnknownNameError("collective", name, PROGRAMS)
    if not names:
        raise UsageError(f"--ops: is empty: give some of {', '.join(PROGRAMS)}")
    return names


def measure_collectives(
    operations: Sequence[str], sizes: Sequence[int], device: Any, budget_s: float
) -> Iterator[CollectiveTiming]:
    """Measures on the ranks of the default group, which all call this alike.

    Args:
        operations: keys of `PROGRAMS`.
        sizes: bytes.
        device: a torch.device.
        budget_s: about how long each size is repeated.
    """
    from torch import distributed

    ranks = distributed.get_world_size()
    for operation in operations:
        for asked in sizes:
            # What is divided among the ranks has a whole number of elements for each.
            unit = (
                ITEM_BYTES * ranks if operation in ("all_gather", "reduce_scatter", "all_to_all") else ITEM_BYTES
            )
            size = max(unit, asked // unit * unit)
            call = _make(operation, size // ITEM_BYTES, device)
            times = _time(call, device, budget_s)
            yield CollectiveTiming(
                operation=operation, size_bytes=size, seconds=statistics.median(times), repeats=len(times)
            )


def header(operation: str, facts: Sequence[Sequence[str]]) -> str:
    """What stands above the table.

    Args:
        operation: a key of `PROGRAMS`.
        facts: host, device and process of each rank.
    """
    lines = [f"# Collective test starting: {PROGRAMS[operation][0]}", "#", "# Using devices"]
    for rank, (host, device, pid) in enumerate(facts):
        lines.append(f"#  Rank {rank:2d} Group  0 Pid {pid:>6} on {host} device {rank:2d} [0x00] {device}")
    lines += [
        "#",
        "#" + " " * 62 + "out-of-place" + " " * 23 + "in-place",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   "
        "busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  "
        "(GB/s)",
    ]
    return "\n".join(lines)


def table_row(measured: CollectiveTiming, ranks: int) -> str:
    """A line of the table; what was not measured (in place, errors) is N/A."""
    _, reduction, root = PROGRAMS[measured.operation]
    alg = measured.size_bytes / measured.seconds * 1e-9
    bus = alg * bus_factor(measured.operation, ranks)
    return (
        f"{measured.size_bytes:12d}  {measured.size_bytes // ITEM_BYTES:12d}     float  {reduction:>6}  {root:6d}"
        f"  {measured.seconds * 1e6:9.2f}  {alg:6.4g}  {bus:6.4g}    N/A      N/A     N/A     N/A    N/A"
    )


def facts_of_ranks(device: Any) -> list[list[str]]:
    """Host, device and process of each rank; all ranks call this."""
    import torch
    from torch import distributed

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    own = [socket.gethostname(), name, str(os.getpid())]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


def _bytes(text: str) -> int:
    text = text.strip().upper().removesuffix("IB")
    unit = text[-1:] if text[-1:] in "BKMG" else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


def _make(operation: str, items: int, device: Any) -> Callable[[], Any]:
    """A call that waits for its end on the host, or is queued on the device."""
    import torch
    from torch import distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()
    big = torch.ones(items, device=device)
    part = torch.ones(max(1, items // ranks), device=device)
    other = torch.empty_like(big)
    match operation:
        case "all_reduce":
            return lambda: dist.all_reduce(big)
        case "all_gather":
            return lambda: dist.all_gather_single(big, part)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_single(part, big)
        case "all_to_all":
            return lambda: dist.all_to_all_single(other, big)
        case "broadcast":
            return lambda: dist.broadcast(big, 0)
        case "reduce":
            return lambda: dist.reduce(big, 0)
    pair = [
        dist.P2POp(dist.isend, big, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, other, (rank - 1) % ranks),
    ]

    def send_and_receive() -> None:
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return send_and_receive


def _time(call: Callable[[], Any], device: Any, budget_s: float) -> list[float]:
    """Seconds of each repeat, the mean over ranks, as nccl-tests takes it; all ranks repeat equally often."""
    import torch
    from torch import distributed as dist

    def once() -> float:
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    warm = [once() for _ in range(WARM_UP)]
    count = torch.tensor([max(3.0, min(200.0, budget_s / max(warm[-1], 1e-6)))], device=device)
    dist.broadcast(count, 0)
    times = torch.tensor([once() for _ in range(int(count.item()))], dtype=torch.float64, device=device)
    dist.all_reduce(times)
    return list((times / dist.get_world_size()).tolist())
