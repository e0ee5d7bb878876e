"""Files and settings with values that no machine has: each is a cluster, or one line that names key and value."""

from __future__ import annotations

import copy
import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_files import KEYS, places, prepared, written

from echograph.errors import DataError, EchoError, InputError, UnknownNameError, UsageError
from echograph.simulator.clusters import PRESETS, cluster_names, fabric_names, load_cluster, parse_degraded
from echograph.simulator.clusters.fabric import parse_fabric, read_fabric_document

WRONG: list[Any] = [
    1e300, 1e-30, -1, -1e300, math.nan, math.inf, -math.inf, "a word", "", "\n", 10**30, 10**400, -(10**400),
    [], [1], {}, {"a": {"b": 1}}, True,
]  # fmt: skip


def toml(value: Any) -> str:
    if isinstance(value, float):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def refused_in_a_line(error: EchoError, key: str, value: Any) -> None:
    line = str(error)
    assert "\n" not in line or "\n" in str(value)
    assert len(line) < 600
    assert re.search(rf"\b{key}\b", line) or (isinstance(value, str) and value in line), line


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_wrong_values_in_a_file(key: tuple[str, ...], tmp_path: Path) -> None:
    base, path, refused = prepared("dgx-h100", key), tmp_path / "mine.toml", 0
    for value in WRONG:
        document = copy.deepcopy(base)
        for holder, name in places(document, key):
            holder[name] = f"@{name}@"
        text = re.sub(r'"@\w+@"', lambda _, v=value: toml(v), written(document))
        path.write_text(text)
        try:
            load_cluster(path)
        except (DataError, UnknownNameError) as error:
            refused += 1
            refused_in_a_line(error, str(name), value)
    assert refused >= len(WRONG) - 3


OF_THE_PROFILER = ("device", "processor")


def settings() -> Iterator[str]:
    with pytest.raises(UnknownNameError) as caught:
        load_cluster("dgx-h100", {"?": "1"})
    assert "(27 in all)" in str(caught.value)
    document = tomllib.loads((PRESETS / "dgx-h100.toml").read_text())
    yield "max_gpus"
    for table in ("node", "network"):
        # Which devices and processors there are the profiler says, when the step is predicted.
        yield from (
            f"{table}.{key}" for key in document[table] if key not in ("level", "growth", *OF_THE_PROFILER)
        )
    for level in document["network"]["level"]:
        yield from (f"network.level.{level['name']}.{key}" for key in level if key != "name")
    yield from (f"network.growth.{key}" for key in document["network"]["growth"])


@pytest.mark.parametrize("key", list(settings()))
def test_wrong_values_by_set(key: str) -> None:
    texts = ["1e300", "1e-30", "-1", "nan", "inf", "-inf", "word", "", "9" * 5000, "9" * 400, "[" * 9999, "{a=1}"]
    texts += ["1\nnvls = true", "1 # 2", '"', "[[x]]", "\0", "1e999", "0x" + "f" * 300]
    refused = 0
    for text in texts:
        try:
            load_cluster("dgx-h100", {key: text})
        except EchoError as error:
            refused += 1
            last = key.rpartition(".")[2]
            assert isinstance(error, DataError | UnknownNameError)
            assert re.search(rf"\b{last}\b", str(error)), (text, error)
            assert len(str(error)) < 600
    assert refused >= len(texts) - 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 100_000, "is not TOML"),
        ("a = " + "9" * 5000, "is not TOML"),
        ("max_gpus = \x00", "is not TOML"),
        (".".join("a" * 20_000) + " = 1", "nested too deeply"),
        ("", "missing required field"),
    ],
)
def test_files_that_are_no_cluster(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load_cluster(path)
    assert len(str(caught.value)) < 600


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("x" * (2 << 20))
    with pytest.raises(InputError, match=r"mine\.toml: larger than"):
        load_cluster(path)


@pytest.mark.parametrize("path", ["/dev/null/x.toml", "a\0b.toml", "x" * 5000 + ".toml", "/.toml"])
def test_paths_that_are_no_file(path: str) -> None:
    with pytest.raises(InputError, match="give the path of a cluster file"):
        load_cluster(path)


def numbers(document: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The ways to everything that a JSON document holds."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*way, key)
        if isinstance(value, dict | list):
            yield from numbers(value, (*way, key))


@pytest.mark.parametrize("name", fabric_names())
def test_wrong_values_in_a_fabric(name: str) -> None:
    base = read_fabric_document(name)
    for way in numbers(base):
        for value in (1e300, -1e300, math.nan, 10**400, "word", [[]], {"a": 1}, None):
            document = copy.deepcopy(base)
            holder = document
            for step in way[:-1]:
                holder = holder[step]
            holder[way[-1]] = value
            try:
                parse_fabric(document, "mine")
            except DataError as error:
                assert str(way[-1]) in (*re.findall(r"\w+", str(error)), "0", "1", "2"), (way, error)
                assert "\n" not in str(error)


@pytest.mark.parametrize(
    "text", ["{", "[1]", "", '{"a":' * 9999, '{"kind": "node", "levels": 1e999}', "\x00", "nan"]
)
def test_files_that_are_no_fabric(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(DataError, match=r"mine\.json"):
        load_cluster("dgx-h100", {"node.fabric": str(tmp_path / "mine.json")})


@pytest.mark.parametrize(
    "factor", ["0", "-1", "nan", "inf", "1e300", "1e-300", "1.01", "", "9" * 5000, "x", "0,5"]
)
@pytest.mark.parametrize("what", ["node 3 nic 5", "node 3 compute", "leaf 0 up", ""])
def test_wrong_factors_of_what_is_degraded(what: str, factor: str) -> None:
    with pytest.raises(UsageError, match="give LINK=FACTOR with a factor from 1e-06 to 1"):
        parse_degraded(f"{what}={factor}")


@pytest.mark.parametrize("name", cluster_names())
def test_slowest_and_fastest_links_are_predicted(name: str) -> None:
    """What is permitted can be computed with: the ends of the ranges give finite, positive times."""
    from echograph.simulator.collectives import collective_time

    for rate in ("0.001", "1000000"):
        link = "nvlink_GBps" if load_cluster(name).nvlink_bytes_per_s else "pcie_GBps"
        cluster = load_cluster(name, {"network.nic_GBps": rate, f"node.{link}": rate})
        for ranks in (8, 64):
            seconds = collective_time("all_reduce", 1e9, cluster.place(range(ranks)), cluster).seconds
            assert 0 < seconds < 1e9


def test_what_is_degraded_keeps_a_millionth_to_all_of_its_speed() -> None:
    for factor in ("1", "1.0", "0.000001"):
        assert parse_degraded(f"node 3 nic 5={factor}").bandwidth == float(factor)
        assert parse_degraded(f" node  3 compute ={factor}").compute == float(factor)
    for factor in ("1.0000001", "0.0000009", "0", "-1", "nan", "inf", "", "half"):
        with pytest.raises(UsageError, match=r"give LINK=FACTOR with a factor from 1e-06 to 1"):
            parse_degraded(f"node 3 nic 5={factor}")
    with pytest.raises(UsageError, match=r"give LINK=FACTOR"):
        parse_degraded("=0.5")
