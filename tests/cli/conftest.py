"""What the tests of the commands share: running one, and a small graph to run it on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from echograph.cli.app import run

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


class Outcome(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


Cli = Callable[..., Outcome]


def call(*arguments: object) -> int:
    """Runs a command in this process as its console script would; its exit status."""
    name, *rest = map(str, arguments)
    before, sys.argv = sys.argv, [name, *rest]
    try:
        run(import_module(f"echograph.cli.{name}").app, name)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code
    finally:
        sys.argv = before
    raise AssertionError("a command always exits")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("echosim", "run", path)`: status, stdout and stderr of a command."""

    def command(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = call(*arguments)
        return Outcome(status, *capsys.readouterr())

    return command


@pytest.fixture(scope="session")
def session_cli() -> Cli:
    """`cli` for fixtures that outlive a test; what it says on stderr is the fixture's."""

    def command(*arguments: object) -> Outcome:
        with redirect_stdout(StringIO()) as out:
            status = call(*arguments)
        return Outcome(status, out.getvalue(), "")

    return command


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face configuration that compiles in a second."""
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(json.dumps(TINY_LLAMA))
    return path


@pytest.fixture(scope="session")
def graph(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its step graph: two samples of 64 tokens."""
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    path = tmp_path_factory.mktemp("graph") / "tiny.pb"
    with redirect_stdout(StringIO()):
        assert call("echoc", "compile", "-m", tiny_config, "--batch-size", 2, "-o", path) == 0
    return path


@pytest.fixture(scope="session")
def job_graph(graph: Path) -> Path:
    """The job of 16 ranks that the step graph lowers to, with durations."""
    from echograph.ir import serde
    from echograph.workflow.plan import Plan
    from echograph.workflow.predict import predict

    path = graph.with_name("job.pb")
    serde.save(predict(serde.load(graph), Plan(gpus=16))[1], path)
    return path
