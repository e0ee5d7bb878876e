"""docs/ir.md is right: its Python runs, it names every field, and its limits are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echograph.ir import verify
from echograph.ir.files import MAX_FILE_BYTES
from echograph.ir.serde import MAX_CALLS, load
from echograph.proto import profile_pb2, workload_pb2

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "ir.md").read_text(encoding="utf-8")


def test_its_python_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = list(re.finditer(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
    assert len(snippets) >= 6
    names: dict[str, object] = {"__name__": "docs"}
    for snippet in snippets:
        line = TEXT[: snippet.start()].count("\n") + 1
        exec(compile("\n" * line + snippet[1], "docs/ir.md", "exec"), names)  # noqa: S102
    names["write"](names["graph"], tmp_path / "copy.pb")
    assert load(tmp_path / "copy.pb").name == "two layers"


@pytest.mark.parametrize("module", [workload_pb2, profile_pb2])
def test_it_explains_every_field(module: object) -> None:
    for message in module.DESCRIPTOR.message_types_by_name.values():
        missing = [f"{message.name}.{f.name}" for f in message.fields if f"`{f.name}`" not in TEXT]
        if message.name not in ("TensorChunk", "OpChunk"):
            assert not missing


def test_its_limits_are_those_of_the_code() -> None:
    limits = dict(re.findall(r"^\| ([a-z ,-]+) \| (\S.*?) \|$", TEXT.split("| Limit |")[1], re.MULTILINE))
    assert int(limits["file"].removesuffix(" GiB")) << 30 == MAX_FILE_BYTES
    powers = {key: 2 ** int(value.removeprefix("2^").split()[0]) for key, value in limits.items() if "^" in value}
    assert powers["bytes of a tensor"] == verify.MAX_TENSOR_BYTES
    assert powers["ranks"] == verify.MAX_RANKS
    assert powers["calls of a program"] == MAX_CALLS


def test_its_links_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors
    for path in re.findall(r"`((?:tests|proto|examples|docs)/[^`]+)`", TEXT):
        assert (ROOT / path).exists(), path
