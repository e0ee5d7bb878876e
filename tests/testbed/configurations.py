"""What is measured: jobs, and the links that they run over. Every one is held against its prediction."""

from __future__ import annotations

from typing import NamedTuple

from jobs import Job, alike, apart, ddp, fsdp, pipeline

KIB, MIB = 1 << 10, 1 << 20
MBIT = 1e6
DP, ACROSS = ("dp",), ("rack", "local")


class Links(NamedTuple):
    """Rates of a bed, bits a second in each direction; without one, the uplink is never the bottleneck."""

    nic: float
    uplink: float | None = None


class Configuration(NamedTuple):
    """A job on links."""

    name: str
    links: Links
    job: Job


def _ddp(
    ranks: int, nic: int, what: str, forward_s: float, backward_s: float, buckets: list[int]
) -> Configuration:
    job = alike(ranks, ddp(forward_s, backward_s, buckets, DP))
    return Configuration(f"DDP, {ranks} ranks, {nic} Mbit/s, {what}", Links(nic * MBIT), job)


def _fsdp(ranks: int, nic: int, forward_s: float, backward_s: float, blocks: int, nbytes: int) -> Configuration:
    name = f"FSDP, {ranks} ranks, {nic} Mbit/s, {blocks} blocks of {nbytes // KIB} KiB"
    return Configuration(name, Links(nic * MBIT), alike(ranks, fsdp(forward_s, backward_s, blocks, nbytes, DP)))


def _pipeline(
    replicas: int, nic: int, micro_batches: int, forward_s: float, nbytes: int, gradient: int = 0
) -> Configuration:
    job = pipeline(
        4, replicas, micro_batches=micro_batches, forward_s=forward_s, backward_s=2 * forward_s, nbytes=nbytes,
        gradient=gradient,
    )  # fmt: skip
    name = f"1F1B, {job.ranks} ranks, {nic} Mbit/s, {micro_batches} micro-batches of {nbytes // KIB} KiB"
    return Configuration(name, Links(nic * MBIT), job)


def _shared(nic: int, uplink: int, what: str, job: Job) -> Configuration:
    return Configuration(f"{what}, {nic} Mbit/s, uplink {uplink}", Links(nic * MBIT, uplink * MBIT), job)


CONFIGURATIONS = (
    _ddp(4, 100, "4 buckets", 0.1, 0.3, [MIB] * 4),
    _ddp(4, 100, "mostly compute", 0.2, 0.6, [512 * KIB] * 4),
    _ddp(4, 200, "8 buckets", 0.1, 0.5, [MIB] * 8),
    _ddp(4, 1000, "8 buckets", 0.1, 0.3, [4 * MIB] * 8),
    _ddp(8, 200, "4 buckets", 0.2, 0.4, [2 * MIB] * 4),
    _ddp(8, 200, "uneven buckets", 0.1, 0.4, [256 * KIB, 4 * MIB, 2 * MIB, MIB]),
    _ddp(8, 400, "6 buckets", 0.1, 0.2, [4 * MIB] * 6),
    _ddp(8, 400, "one bucket", 0.2, 0.3, [16 * MIB]),
    _fsdp(4, 100, 0.1, 0.2, 4, 512 * KIB),
    _fsdp(4, 200, 0.3, 0.6, 6, MIB),
    _fsdp(4, 400, 0.2, 0.4, 8, 2 * MIB),
    _fsdp(4, 1000, 0.15, 0.3, 6, 5 * MIB),
    _fsdp(8, 200, 0.1, 0.2, 4, MIB),
    _fsdp(8, 200, 0.4, 0.8, 6, 512 * KIB),
    _fsdp(8, 400, 0.1, 0.2, 4, 4 * MIB),
    _fsdp(8, 400, 0.4, 0.8, 8, MIB),
    _pipeline(1, 100, 4, 0.04, 256 * KIB),
    _pipeline(1, 100, 8, 0.02, 512 * KIB),
    _pipeline(1, 200, 8, 0.03, 512 * KIB),
    _pipeline(1, 400, 12, 0.03, MIB),
    _pipeline(1, 1000, 8, 0.04, 2 * MIB),
    _pipeline(2, 200, 6, 0.03, MIB, gradient=4 * MIB),
    _pipeline(2, 400, 4, 0.05, 2 * MIB, gradient=2 * MIB),
    _pipeline(2, 400, 8, 0.03, MIB, gradient=8 * MIB),
    _shared(200, 200, "two DDP groups alike", apart(2, 2, [ddp(0.1, 0.3, [MIB] * 4, ACROSS)] * 2)),
    _shared(
        200, 200, "two DDP groups unlike",
        apart(2, 2, [ddp(0.1, 0.4, [MIB] * 4, ACROSS), ddp(0.3, 0.3, [3 * MIB] * 2, ACROSS)]),
    ),
    _shared(
        400, 500, "two DDP groups unlike",
        apart(2, 2, [ddp(0.05, 0.4, [2 * MIB] * 6, ACROSS), ddp(0.2, 0.2, [6 * MIB] * 3, ACROSS)]),
    ),
    _shared(
        400, 400, "DDP beside FSDP",
        apart(2, 2, [ddp(0.1, 0.3, [4 * MIB] * 4, ACROSS), fsdp(0.2, 0.4, 6, 2 * MIB, ACROSS)]),
    ),
    _shared(
        200, 300, "two FSDP groups",
        apart(2, 2, [fsdp(0.2, 0.4, 5, MIB, ACROSS), fsdp(0.1, 0.2, 4, MIB, ACROSS)]),
    ),
    _shared(
        400, 400, "four pairs",
        apart(4, 1, [ddp(0.1, 0.2 + 0.1 * pair, [3 * MIB] * (4 - pair), ACROSS) for pair in range(4)]),
    ),
)  # fmt: skip
