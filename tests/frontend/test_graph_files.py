"""Files of JSON, GML and text from anywhere: a graph that holds together, or one line why not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "golden"))

from conformance_graphs import GRAPHS

from echograph.cli.app import run
from echograph.errors import EchoError
from echograph.frontend import graph_files
from echograph.ir import serde
from echograph.workflow.formats import EXPORTS, IMPORTS

pytest.importorskip("networkx")

FORMS = ("json", "gml", "text")
ODD = st.sampled_from(
    [b"[", b"]", b'"', b"{", b"\n", b"99999999999999999999", b"-1", b"..", b"\xff", b"#", b"&#0;", b"", b"null"]
)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused(form: str, path: Path) -> str | None:
    """Why a file is refused; None if it holds a graph, which then can be written and read again."""
    try:
        graph = IMPORTS[form](path)
    except EchoError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error)
        assert len(str(error)) < 600
        return str(error)
    assert serde.decode(b"".join(serde.encode(graph))) is not None
    return None


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], bytes]:
    folder = tmp_path_factory.mktemp("forms")
    found = {}
    for form in FORMS:
        for name in ("two_layers", "job", "kinds"):
            EXPORTS[form](GRAPHS[name](), folder / "graph")
            found[form, name] = (folder / "graph").read_bytes()
    return found


@pytest.mark.parametrize("form", FORMS)
@quick
@given(data=st.binary(max_size=200))
def test_random_bytes(form: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_bytes(data)
    assert refused(form, path)


@pytest.mark.parametrize("form", FORMS)
@quick
@given(
    name=st.sampled_from(["two_layers", "job", "kinds"]),
    seed=st.integers(0, 2**32),
    odd=ODD,
    cuts=st.integers(1, 3),
)
def test_changed_bytes(
    form: str, name: str, seed: int, odd: bytes, cuts: int, originals: dict[tuple[str, str], bytes], tmp_path: Path
) -> None:
    data, random = originals[form, name], Random(seed)
    for _ in range(cuts):
        at = random.randrange(len(data))
        data = data[:at] + odd + data[at + random.choice([0, 1, 1, 3, 40]) :]
    path = tmp_path / "graph"
    path.write_bytes(data)
    refused(form, path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00" * 1000, b"[" * 100_000, b'{"a":' * 50_000, b"graph [" * 50_000, b"9" * 100_000, b'"' * 9_999,
        b"echograph 1.0 step x producer=y\n" * 2, b"\xff\xfe", b"a", b'"', b"\n\n",
        b"graph [ node [ id 0 ] node 1 ]",
        b'{"echograph":"1.0","level":"job","blocks":[{"name":"m","instances":[{"bindings":['
        + b"0," * 9999 + b"0]}]}]}",
        b'{"echograph":1.0,"level":"job","mesh":[{"name":"dp","size":9223372036854775807}],"blocks":[{"name":"m"}]}',
    ],
    ids=range(15),
)  # fmt: skip
def test_what_is_no_graph(form: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_bytes(data)
    assert refused(form, path)


@pytest.mark.parametrize("key", ["table", "block", "row", "kind", "position", "id"])
@pytest.mark.parametrize("value", ["[]", "[ a 1 ]", '"_networkx_list_start"', '"[]"'])
def test_lists_where_gml_has_words_and_numbers(
    key: str, value: str, originals: dict[tuple[str, str], bytes], tmp_path: Path
) -> None:
    lines = originals["gml", "two_layers"].decode().split("\n")
    last = max(at for at, line in enumerate(lines) if line.split()[:1] == [key])
    lines[last] = f"{key} {value}\n{key} {value}"
    (tmp_path / "graph").write_text("\n".join(lines))
    assert refused("gml", tmp_path / "graph")


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_too_large_is_not_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    with path.open("wb") as file:
        file.truncate(graph_files.MAX_BYTES[form] + 1)
    assert f"larger than {16 if form == 'gml' else 64} MiB, not read" in (refused(form, path) or "")


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_not_there(form: str, tmp_path: Path) -> None:
    assert f"echoc export graph.pb --to {form}" in (refused(form, tmp_path / "none") or "")


@pytest.mark.parametrize("form", FORMS)
def test_the_command_writes_nothing_for_what_it_refuses(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from echograph.cli.echoc import app

    (tmp_path / "graph").write_bytes(b"\x00")
    call: Callable[[], None] = lambda: run(app, "echoc")  # noqa: E731
    monkeypatch.setattr(sys, "argv", ["echoc", "import", form, f"{tmp_path}/graph", "-o", f"{tmp_path}/out.pb"])
    with pytest.raises(SystemExit) as stopped:
        call()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["graph"]
