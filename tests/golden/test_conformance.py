"""The conformance files are what the script makes, and a reader finds in them what the .json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from make_conformance import FOLDER, files, summary

from echograph.errors import FormatError
from echograph.ir.serde import encode, load

NAMES = sorted(path.stem for path in FOLDER.glob("*.pb"))
REASONS = {"newer": r"format 3\.\d+ is newer", "corrupted": "checksum does not match", "truncated": "truncated"}


def expected(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_the_files_are_what_the_script_makes() -> None:
    made = dict(files())
    stored = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    hint = "run: python tests/golden/make_conformance.py"
    assert sorted(made) == sorted(stored), hint
    for name, data in made.items():
        assert stored[name] == data, f"{name} differs; {hint}"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_holds_what_its_json_says(name: str) -> None:
    path, finding = FOLDER / f"{name}.pb", expected(name)
    if reason := finding.get("error"):
        with pytest.raises(FormatError, match=REASONS[str(reason)]):
            load(path)
        return
    graph = load(path)
    version = {"format": finding["format"]}
    assert json.loads(json.dumps(summary(graph))) | version == finding
    if name != "newer_minor":
        assert b"".join(encode(graph)) == path.read_bytes()


def test_numbers_worked_out_by_hand() -> None:
    layers = expected("two_layers")
    products = 2 * 8 * 4 * 4
    assert layers["work"]["forward flops"] == str(2 * products + 64)
    assert layers["work"]["backward flops"] == str(4 * products + 32)
    assert layers["unfolded_operations"] == 2 * 4 + 2
    order = [row[:2] for row in layers["programs"][0]["operations"]]
    assert order[:3] == [["aten.mm", "layers.0"], ["aten.mm", "layers.1"], ["loss", ""]]
    big = expected("large_numbers")
    assert big["work"]["forward flops"] == str(2**62 + 1 + 2**61)
    assert big["tensors"][0].endswith(f" {4 * (2**56 - 1)}")
    job = expected("job")
    assert job["groups"][1]["members"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [program["ranks"] for program in job["programs"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_every_file_has_its_expectation() -> None:
    assert {path.stem for path in Path(FOLDER).glob("*.json")} == set(NAMES)
