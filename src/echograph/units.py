"""Units: integer picoseconds inside, SI seconds in cost formulas, human text at the edge."""

from __future__ import annotations

import re

PS_PER_S = 10**12
PS_PER_MS = 10**9
PS_PER_US = 10**6
PS_PER_NS = 10**3
GB = 10**9
MIB = 2**20
GIB = 2**30

_TIME_STEPS = ((PS_PER_S, "s"), (PS_PER_MS, "ms"), (PS_PER_US, "us"), (PS_PER_NS, "ns"), (1, "ps"))


def to_ps(seconds: float) -> int:
    """Rounds a duration in seconds to whole picoseconds (half to even).

    Raises:
        ValueError: the duration is negative or not finite.
    """
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"a duration is a finite number >= 0, not {seconds!r}")
    return round(seconds * PS_PER_S)


def to_s(picoseconds: int | float) -> float:
    """Seconds of a duration in picoseconds."""
    return picoseconds / PS_PER_S


def format_time(picoseconds: int | float) -> str:
    """A duration in the largest unit that keeps it at or above one, four significant digits."""
    for step, unit in _TIME_STEPS:
        if abs(picoseconds) >= step:
            return f"{format_number(picoseconds / step)} {unit}"
    return "0 s"


def format_number(value: float) -> str:
    """Four significant digits, or all before the point; never a power of ten for what is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_bytes(count: int | float) -> str:
    """A size in binary units, four significant digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str) -> int | None:
    """A size as people write it, "72GiB" or "80 GB"; None where it is none."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B)\s*", text)
    if found is None or found[2] not in _SIZES:
        return None
    return round(float(found[1]) * _SIZES[found[2]])


_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12, "P": 10**15}


def parse_count(text: str) -> int | None:
    """A count as people write it, "1T", "300B" or "2.5e12"; None where it is none."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,6})?(?:[eE]\+?\d{1,2})?)\s*([KMBGTP]?)\s*", text)
    return None if found is None else round(float(found[1]) * _COUNTS[found[2]])


def format_count(count: int | float, unit: str = "") -> str:
    """A count in decimal units (K, M, G, T, P, E), four significant digits."""
    value = float(count)
    for prefix in ("", "K", "M", "G", "T", "P", "E"):
        if abs(value) < 1000 or prefix == "E":
            return f"{value:.4g} {prefix}{unit}".rstrip()
        value /= 1000
    raise AssertionError("unreachable")
