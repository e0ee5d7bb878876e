"""Message size, algorithm bandwidth and bus bandwidth of a collective.

As nccl-tests defines them (NVIDIA/nccl-tests, doc/PERFORMANCE.md): the size is what one rank holds of the whole
message; algorithm bandwidth is size over time; bus bandwidth multiplies it by the share of the size that every
rank must at least send, so that it can be compared with the speed of a link, whatever the operation and the ranks.
"""

from __future__ import annotations

from collections.abc import Callable

BusFactor = Callable[[int], float]


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _there_and_back(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _once(ranks: int) -> float:
    return 1.0


_FACTORS: dict[str, BusFactor] = {
    "all_reduce": _there_and_back,
    "all_gather": _all_but_own,
    "reduce_scatter": _all_but_own,
    "all_to_all": _all_but_own,
    "gather": _all_but_own,
    "scatter": _all_but_own,
    "broadcast": _once,
    "reduce": _once,
    "send": _once,
    "recv": _once,
}


def base_operation(operation: str) -> str:
    """What an operation does, whatever its spelling: `all_gather_into_tensor_coalesced` -> `all_gather`.

    Args:
        operation: as torch.distributed names it.
    """
    fitting = [name for name in _FACTORS if operation == name or operation.startswith(f"{name}_")]
    return max(fitting, key=len, default=operation)


def message_bytes(operation: str, input_bytes: int, output_bytes: int, ranks: int) -> int:
    """nccl-tests' size of an operation.

    Args:
        operation: as torch.distributed names it.
        input_bytes: what this rank gives.
        output_bytes: what this rank gets.
        ranks: size of the group.
    """
    match base_operation(operation):
        case "gather":
            return input_bytes * ranks
        case "scatter":
            return output_bytes * ranks
        case "all_gather" | "broadcast" | "recv":
            return output_bytes
        case "barrier":
            return 0
    return input_bytes


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth; 0 for what moves no message (a barrier) or has one rank alone."""
    factor = _FACTORS.get(operation) or _FACTORS.get(base_operation(operation))
    return factor(ranks) if factor is not None and ranks > 1 else 0.0
