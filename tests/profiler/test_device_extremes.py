"""Device profiles with values that no device has: each is predicted with, or refused in one line that names it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echograph.errors import DataError, EchoError, FormatError, InputError, UnavailableError
from echograph.profiler.costs import attention_backward, attention_forward, device_names, gemm, load_device
from echograph.profiler.costs.device import MEMORY_KINDS, DeviceProfile, memory_bound
from echograph.profiler.costs.gemm import grouped_gemm
from echograph.units import to_ps

SHIPPED = Path(gemm.__code__.co_filename).parents[1] / "devices"
WRONG = (
    "1e300", "-1", "0", "1e999", '"word"', "null", "[]", "{}", "true", "1e-30", "9" * 400, "-1e300", '""',
    '[[1, "x"]]', '{"a": 1}', "9" * 5000,
)  # fmt: skip


def ways(document: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The ways to everything that a document holds; of a list of numbers, to the first and the last."""
    items: list[tuple[str | int, Any]]
    if isinstance(document, dict):
        items = list(document.items())
    else:
        items = [(i, document[i]) for i in {0: 0, len(document) - 1: 0} if document]
    for key, value in items:
        yield (*way, key)
        if isinstance(value, dict | list):
            yield from ways(value, (*way, key))


def predicted(device: DeviceProfile) -> None:
    """Asks a profile for everything; times are such that the clock can hold."""
    small = {"batch": 1, "heads": 4, "seq": 512, "head_dim": 64}
    asked = [
        *(lambda d=d, n=n: gemm(device, n, n, n, dtype=d) for d in ("bf16", "fp8", "fp32") for n in (1, 4096)),
        lambda: attention_forward(device, **small),
        lambda: attention_backward(device, **small),
        *(lambda k=k: memory_bound(device, k, bytes_read=2**20, bytes_written=2**20) for k in MEMORY_KINDS),
        lambda: grouped_gemm(device, [64, 64], 512, 512),
    ]  # fmt: skip
    for ask in asked:
        try:
            seconds = float(ask().seconds)
        except UnavailableError:
            continue
        assert math.isfinite(seconds) and seconds >= 0
        to_ps(seconds)
    to_ps(device.host.op_s)
    to_ps(max(0.0, device.host.kernel_s))
    assert device.host.kernel_s >= 0


@pytest.mark.parametrize(
    "name", [n if n == "a100-sxm-40" else pytest.param(n, marks=pytest.mark.slow) for n in device_names()]
)
def test_wrong_values_are_predicted_with_or_refused(name: str, tmp_path: Path) -> None:
    document = json.loads((SHIPPED / f"{name}.json").read_text())
    path, refused, few = tmp_path / "mine.json", 0, itertools.cycle(WRONG)
    every = list(ways(document))
    for way in every:
        holder = document
        for step in way[:-1]:
            holder = holder[step]
        before = holder[way[-1]]
        holder[way[-1]] = "@"
        text = json.dumps(document)
        holder[way[-1]] = before
        # Every key meets one of the values, and every value meets many keys.
        for value in itertools.islice(few, 1):
            path.write_text(text.replace('"@"', value))
            try:
                device = load_device(path)
            except (DataError, FormatError) as error:
                refused += 1
                named = {str(step) for step in way} & set(re.findall(r"[\w-]+", str(error)))
                assert named or isinstance(error, FormatError), (way, value, error)
                assert "\n" not in str(error) and len(str(error)) < 600
                continue
            predicted(device)
    assert refused > len(every) / 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a device profile"),
        ("[" * 100_000, "not a device profile"),
        ('{"a":' * 100_000, "not a device profile"),
        ("\x00", "not a device profile"),
        ("[]", "not a device profile"),
        ("{}", "missing required field `format`"),
        (" " * (5 << 20), "larger than"),
    ],
)
def test_files_that_are_no_profile(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises((FormatError, DataError), match=message) as caught:
        load_device(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["a\0b.json", "x" * 5000 + ".json", "nowhere/mine.json"])
def test_paths_that_are_no_file(path: str) -> None:
    with pytest.raises(InputError, match="give the path of a device profile"):
        load_device(path)


def test_a_value_is_named_with_what_is_permitted(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    document = json.loads((SHIPPED / "h100-sxm.json").read_text())
    document["gemm"]["bf16"]["efficiency"][0] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(EchoError, match=r"gemm\.bf16\.efficiency\.0 = -1: give a number from 0\.0001 to 2"):
        load_device(path)


def test_a_profile_is_at_most_four_mebibytes(tmp_path: Path) -> None:
    path, text = tmp_path / "mine.json", (SHIPPED / "h100-sxm.json").read_text()
    path.write_text(text + " " * ((4 << 20) - len(text.encode())))
    assert load_device(path).datasheet == load_device("h100-sxm").datasheet
    path.write_text(text + " " * ((4 << 20) + 1 - len(text.encode())))
    with pytest.raises(FormatError, match=r"mine\.json: larger than 4 MiB"):
        load_device(path)
