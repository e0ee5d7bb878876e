"""What the pages name by its path or its module is there, and a word of the glossary has one meaning."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("frontend", "ir", "models", "profiler", "simulator", "workflow")
FOLDERS = (*PACKAGES, "proto", "src", "cli", "tests", "benchmarks", "docs", "examples")
# Of what a reader is to write: profiler/devices/NAME.json, and the files of the pass that a page adds.
TO_BE_WRITTEN = re.compile(r"[A-Z]{3,}|forward_only")


def mentions(text: str) -> Iterator[str]:
    """The paths and modules in the prose of a page, as they stand between backticks."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for word in re.findall(r"`([^`\n]+)`", prose):
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w/.-]*|echograph\.(?:{'|'.join(PACKAGES)})\.[\w.]+", word):
            yield word


def files_of_diagrams(text: str) -> Iterator[str]:
    """Files and folders in the diagrams of a page, and files that its prose names by the end of their path."""
    for diagram in re.findall(r"```mermaid\n(.*?)```", text, flags=re.DOTALL):
        for label in re.findall(r'"([^"]+)"', diagram):
            yield from re.findall(r"[\w/]+/[\w.]*", label.replace("<br/>", " "))
    yield from re.findall(r"`(\w+/[\w/]+\.py)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


SOURCES = [
    str(path.relative_to(ROOT)) for top in FOLDERS if (ROOT / top).is_dir() for path in (ROOT / top).rglob("*.py")
]


def is_source(word: str) -> bool:
    """Whether it is the end of a source file's path, or a folder of one."""
    return any(path.endswith(f"/{word}") or (f"/{word}" in f"/{path}" and word.endswith("/")) for path in SOURCES)


def is_there(word: str) -> bool:
    """Whether a path, from the top or from the package, or a dotted name leads to something."""
    if "/" in word:
        return (ROOT / word).exists() or (ROOT / "src" / "echograph" / word).exists()
    found: object = import_module("echograph")
    name = "echograph"
    for part in word.split(".")[1:]:
        name += f".{part}"
        with suppress(ModuleNotFoundError):
            import_module(name)
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    found = mentions(page.read_text(encoding="utf-8"))
    assert [word for word in found if not TO_BE_WRITTEN.search(word) and not is_there(word)] == []


# Captures of scripts and the evidence of accuracy name files of other projects.
OWN = [page for page in PAGES if page.parent.name not in ("accuracy", "adapters")]


@pytest.mark.parametrize("page", OWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_by_their_ends_are_there(page: Path) -> None:
    found = set(files_of_diagrams(page.read_text(encoding="utf-8")))
    assert [word for word in sorted(found) if not (is_source(word) or is_there(word))] == []


def test_what_is_not_there_is_seen() -> None:
    assert is_source("costs/gemm.py") and is_source("engine/") and not is_source("memory/nothing.py")
    text = "`ir/passes/nothing.py`, `ir/graph.py`, `echograph.ir.graph.Nothing`, `echograph.ir.graph.Graph`, `tp`"
    assert [word for word in mentions(text) if not is_there(word)] == [
        "ir/passes/nothing.py", "echograph.ir.graph.Nothing",
    ]  # fmt: skip


def anchors(page: Path) -> set[str]:
    """What a link may name after `#`: the page's headings, as GitHub writes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_headings_that_a_page_links_to_are_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    missing = [
        f"{path}#{anchor}"
        for path, anchor in links
        if not path or path.endswith(".md")
        if anchor not in anchors(page.parent / path if path else page)
    ]
    assert missing == []


def test_the_glossary_has_one_meaning_a_word() -> None:
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    words = Counter(word for row in rows for word in row.split(", ") if row != "word")
    assert [word for word, count in words.items() if count > 1] == []
    assert len(words) > 100


def test_every_column_that_validate_reads_is_told() -> None:
    sources = (ROOT / "src/echograph/workflow/validation").glob("*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    read = set(re.findall(r'\b(?:row|self)\.(?:text|number|real)\("(\w+)"', text))
    page = (ROOT / "docs" / "accuracy" / "steps.md").read_text(encoding="utf-8")
    table = page.split("## The table of measured steps")[1].split("\n## ")[0]
    told = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if line[:1] == "|" else "")
    }
    assert read - told == set()
    assert len(read) > 20
