"""Every example of the documentation runs, and prints what its page shows, numbers aside."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from examples import TIMEOUT_S, Example, ExampleError, Session, examples, expected, words

pytest.importorskip("torch")

from echograph.frontend.pytorch.capture import PRODUCERS
from echograph.ir.passes import PASSES
from echograph.models.build import OWN
from echograph.registry import Table
from echograph.simulator.collectives import ALGORITHMS
from echograph.simulator.engine import ENGINES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Of the scripts, model.py and train.py are run by the lines of the README.
SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in ("model.py", "train.py")]
# Their commands take longer than those of all other pages together.
LONG = ("search.md", "analyze.md", "interchange.md", "extend/model.md", "extend/cluster.md")
LINK = r"\]\((?!https?:|#|mailto:)([^)#\s]+)"

TABLES = (PASSES, ENGINES, ALGORITHMS, PRODUCERS, OWN)

pytestmark = pytest.mark.torch


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Path:
    """The graph that all pages begin with, compiled once."""
    folder = tmp_path_factory.mktemp("docs")
    compile_bert = ["$ echoc compile --model bert-base-uncased -o graph.pb"]
    Session(folder, warm).run(Example(page=ROOT, line=0, language="console", file="", lines=compile_bert))
    return folder / "graph.pb"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=pytest.mark.slow if str(page).endswith(LONG) else (), id=str(page.relative_to(ROOT))
        )
        for page in PAGES
    ],
)
def test_page(page: Path, graph: Path, warm: Path, tmp_path: Path) -> None:
    shutil.copy(graph, tmp_path)
    session = Session(tmp_path, warm)
    for example in examples(page):
        printed, shown = session.run(example), expected(example)
        if shown is not None:
            assert words(printed) == words(shown), (
                f"{page.name}:{example.line}: refresh with tests/docs/examples.py"
            )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script(script: Path, graph: Path, warm: Path, tmp_path: Path) -> None:
    shutil.copy(graph, tmp_path)
    done = subprocess.run(
        [warm / "python", script], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(LINK, page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_reader_is_shown_is_public(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^\s*(?:from|import) echograph\.(?:cli|workflow)\b.*", text, re.MULTILINE) == []
    assert re.findall(r"^\s*from echograph\S* import .*\b_\w+", text, re.MULTILINE) == []
    if path.suffix == ".py":
        assert re.findall(r"^\s*(?:from|import) (echograph\S*)", text, re.MULTILINE) == ["echograph"]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)
def test_every_line_of_a_table_names_something(table: Table) -> None:
    assert len([table[name] for name in table]) == len(table) > 0


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_a_changed_word_is_seen_and_a_changed_number_is_not(tmp_path: Path) -> None:
    page = page_of(tmp_path, "```console\n$ echo step 12.5 ms\nstep 11 ms\n```\n")
    (example,) = examples(page)
    assert words(Session(tmp_path).run(example)) == words(example.lines)
    page = page_of(tmp_path, "```console\n$ echo step 12.5 ms\nwait 12.5 ms\n```\n")
    (example,) = examples(page)
    assert words(Session(tmp_path).run(example)) != words(example.lines)


def test_a_failing_command_is_an_error(tmp_path: Path) -> None:
    (example,) = examples(page_of(tmp_path, "```console\n$ false\n```\n"))
    with pytest.raises(ExampleError, match="exits with 1"):
        Session(tmp_path).run(example)


def test_python_blocks_share_a_namespace_and_show_what_they_print(tmp_path: Path) -> None:
    text = "```python\nx = 2\n```\n```python\nprint('x is', x)\n```\n\n```text\nx is 3\n```\n"
    first, second = examples(page_of(tmp_path, text))
    session = Session(tmp_path)
    session.run(first)
    assert session.run(second) == ["x is 2"]
    assert expected(second) == ["x is 3"]


def test_a_block_with_a_reason_is_left_out_and_a_file_is_written(tmp_path: Path) -> None:
    text = "<!-- not run: takes an hour -->\n```console\n$ false\n```\n\n```toml file=a.toml\nx = 1\n```\n"
    (example,) = examples(page_of(tmp_path, text))
    Session(tmp_path).run(example)
    assert (tmp_path / "a.toml").read_text() == "x = 1\n"
