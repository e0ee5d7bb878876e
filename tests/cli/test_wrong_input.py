"""Wrong input: one line that says what, where and what to do; exit 1 or 2; nothing left behind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

HUGE = 10**12
MODELS = {
    "raises": "def f():\n    raise RuntimeError('first line\\nsecond line')\n",
    "number": "def f():\n    return 3\n",
    "syntax": "def f(:\n",
    "imports": "import not_an_installed_module\n",
    "exits": "import sys\nsys.exit(0)\n",
    "recursive": "def f():\n    return f()\n",
    "arguments": "def f(size):\n    pass\n",
    "nul": "x = '\x00'\n",
    "numbers": "def f():\n    return 1, 2, 3\n",
}
TORCH_MODELS = {
    "shape": "return torch.nn.Linear(2, 2), (torch.ones(1, 3),), lambda y: y.sum()",
    "no_loss": "return torch.nn.Linear(2, 2), (torch.ones(1, 2),)",
    "frozen": "return torch.nn.Linear(2, 2).requires_grad_(False), (torch.ones(1, 2),), lambda y: y.sum()",
    "detached": "return torch.nn.Linear(2, 2), (torch.ones(1, 2),), lambda y: y.detach().sum()",
    "branches": "return Branches(), (torch.ones(1, 2),)",
    "numeric": "return torch.nn.Linear(2, 2), (torch.ones(1, 2),), lambda y: y.sum().item()",
}
BRANCHES = """
import torch

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            return y.sum()
        return y.mean()

def f():
    """
CONFIG_CHANGES: dict[str, dict[str, Any]] = {
    "unknown_type": {"model_type": "no-such-type"},
    "unknown_class": {"architectures": ["NoSuchModel"]},
    "no_type": {"model_type": None},
    "deep": {"num_hidden_layers": 10**9},
    "negative_layers": {"num_hidden_layers": -1},
    "negative": {"hidden_size": -64},
    "text": {"hidden_size": "wide"},
    "fraction": {"hidden_size": 64.5},
    "null": {"hidden_size": None},
    "list": {"num_hidden_layers": [2]},
    "no_heads": {"num_attention_heads": 0},
    "odd_heads": {"num_attention_heads": 7},
    "activation": {"hidden_act": "no-such-activation"},
    "padding": {"pad_token_id": 10**6},
    "no_words": {"vocab_size": 0},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file and a folder to stumble over."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("hello")
    return tmp_path


@pytest.fixture
def refused(cli, folder: Path):
    """Runs a command that must fail well; its line."""

    def run(*arguments: object, status: int | None = None) -> str:
        before = _contents(folder)
        outcome = cli(*arguments)
        assert outcome.status in ((1, 2) if status is None else (status,)), outcome
        (line,) = outcome.err.splitlines()
        assert line.startswith(f"{arguments[0]}: "), line
        assert not re.search(r"internal error|Traceback|<[^>]* object at 0x", line), line
        assert outcome.out == ""
        assert _contents(folder) == before, "files were left behind or changed"
        return line

    return run


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


# --- graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("echosim", "run"), ("echoc", "show"), ("echoc", "check"), ("echoc", "text")])
def test_a_file_that_is_no_graph(refused, folder: Path, graph: Path, command: tuple[str, str]) -> None:
    whole = graph.read_bytes()
    for name, content, says in (
        ("empty.pb", b"", "empty"),
        ("half.pb", whole[: len(whole) // 2], "truncated"),
        ("short.pb", whole[:-1], "truncated"),
        ("longer.pb", whole + b"\x00", "corrupted"),
        ("flipped.pb", whole[:900] + bytes([whole[900] ^ 1]) + whole[901:], "corrupted|checksum"),
        ("text.pb", b"hello, world\n", "not an echograph file"),
        ("zeros.pb", bytes(4096), "not an echograph file"),
        ("random.pb", bytes((i * i * 31 + 7 * i) % 251 for i in range(4096)), "not an echograph file"),
    ):
        (folder / name).write_bytes(content)
        line = refused(*command, name, status=1)
        assert name in line
        assert re.search(says, line), line
    assert "No such file" in refused(*command, "missing.pb", status=1)
    assert "echoc compile" in refused(*command, "missing.pb"), "says how to make one"
    assert "directory" in refused(*command, "folder", status=1)
    assert "file/graph.pb" in refused(*command, "file/graph.pb", status=1)
    assert "graph" in refused(*command, status=2).lower()


def test_a_graph_of_a_newer_major_format(refused, folder: Path, graph: Path) -> None:
    from echograph.ir.files import fields, with_checksum
    from echograph.ir.graph import FORMAT_MAJOR
    from echograph.proto import workload_pb2 as pb

    whole = graph.read_bytes()
    message = pb.Graph.FromString(b"".join(whole[f.start : f.end] for f in fields(whole)))
    message.format_major = FORMAT_MAJOR + 1
    (folder / "newer.pb").write_bytes(b"".join(with_checksum([message.SerializeToString()])))
    assert "upgrade echograph" in refused("echosim", "run", "newer.pb", status=1)


# --- echosim run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", ["0", "-8", str(HUGE), str(10**30), "abc", "1.5", "", "8,16"])
def test_an_impossible_number_of_gpus(refused, graph: Path, gpus: str) -> None:
    assert "--gpus" in refused("echosim", "run", graph, "--gpus", gpus, status=2)


def test_a_job_graph_on_another_number_of_gpus(refused, job_graph: Path) -> None:
    assert "16" in refused("echosim", "run", job_graph, "--gpus", 8, status=2)
    assert "batch" in refused("echosim", "run", job_graph, "--global-batch", 64, status=2)


@pytest.mark.parametrize("batch", ["0", "-16", "3", "17", str(16 * HUGE)])
def test_a_global_batch_that_does_not_divide(refused, graph: Path, batch: str) -> None:
    refused("echosim", "run", graph, "--gpus", 8, "--global-batch", batch)


@pytest.mark.parametrize(
    "options",
    [
        ("--zero", "4"),
        ("--zero", "-1"),
        ("--zero", "all"),
        ("--hsdp-replicas", "2"),
        ("--zero", "3", "--hsdp-replicas", "3"),
        ("--zero", "3", "--hsdp-replicas", "0"),
        ("--zero", "3", "--hsdp-replicas", "-2"),
        ("--zero", "3", "--hsdp-replicas", str(HUGE)),
    ],
    ids=" ".join,
)
def test_a_sharding_that_does_not_fit(refused, graph: Path, options: tuple[str, ...]) -> None:
    assert options[-2] in refused("echosim", "run", graph, "--gpus", 8, *options, status=2)


def test_sharding_of_a_job_graph(refused, job_graph: Path) -> None:
    assert "step graph" in refused("echosim", "run", job_graph, "--zero", 3, status=2)


def test_an_unknown_cluster_or_engine(refused, graph: Path) -> None:
    assert "'dgx-h100'" in refused("echosim", "run", graph, "--cluster", "dgx-h1000", status=2)
    assert "'static'" in refused("echosim", "run", graph, "--engine", "statics", status=2)
    for command, name in (("clusters", "dgx-h1000"), ("devices", "h100")):
        assert "did you mean" in refused("echosim", command, name, status=2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"gpus = [", "TOML"),
        (b"\xff\xfe\x00", "TOML"),
        (b"", "mine.toml"),
        (b"nodes = 'many'", "mine.toml"),
        (b"[network]\nnics_per_node = -1", "mine.toml"),
    ],
)
def test_a_broken_cluster_file(refused, folder: Path, graph: Path, content: bytes, says: str) -> None:
    (folder / "mine.toml").write_bytes(content)
    assert says in refused("echosim", "run", graph, "--cluster", "mine.toml", status=1)
    refused("echosim", "run", graph, "--cluster", "missing.toml", status=1)
    refused("echosim", "run", graph, "--cluster", "folder")


PRESET_LINE = re.compile(r"^(\w+) = (-?[\d.]+)$", re.MULTILINE)


def test_a_cluster_file_with_senseless_numbers(refused, cli, folder: Path, graph: Path) -> None:
    from echograph.simulator.clusters import load_cluster

    preset = (Path(load_cluster.__code__.co_filename).parent / "presets" / "dgx-h100.toml").read_text()
    lines = list(PRESET_LINE.finditer(preset))
    assert lines
    for line in lines:
        changed = preset[: line.start(2)] + "-1" + preset[line.end(2) :]
        (folder / "mine.toml").write_text(changed)
        assert "mine.toml" in refused("echosim", "run", graph, "--cluster", "mine.toml", status=1), line[0]


@pytest.mark.parametrize("path", ["missing/out", "folder", "file/out", "", "x" * 300, "/proc/no-such-file"])
def test_a_path_that_cannot_be_written(refused, graph: Path, tiny_config: Path, path: str) -> None:
    for option in ("--output", "--trace"):
        assert "cannot write" in refused("echosim", "run", graph, option, path, status=1)
    assert "cannot write" in refused("echoc", "compile", "-m", tiny_config, "-o", path, status=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_may_not_be_written(refused, folder: Path, graph: Path) -> None:
    (folder / "folder").chmod(0o500)
    assert "cannot write" in refused("echosim", "run", graph, "-o", "folder/out", status=1)


def test_one_path_for_two_files(refused, folder: Path, graph: Path) -> None:
    (folder / "graph.pb").write_bytes(graph.read_bytes())
    refused("echosim", "run", "graph.pb", "-o", "same", "--trace", "./same", status=2)
    refused("echosim", "run", "graph.pb", "-o", "folder/../graph.pb", status=2)


def test_options_and_commands_that_do_not_exist(refused) -> None:
    assert "--no-such-option" in refused("echosim", "run", "graph.pb", "--no-such-option", status=2)
    assert "simulate" in refused("echosim", "simulate", status=2)
    assert "--model" in refused("echoc", "compile", status=2)
    assert "measure" in refused("echoprof", "measure", status=2)


# --- echoc compile ------------------------------------------------------------------------------------------


def test_an_unknown_model(refused) -> None:
    assert "did you mean 'bert-base-uncased'" in refused("echoc", "models", "bert-base-uncase", status=2)
    assert "did you mean 'gpt2-xl'" in refused("echoc", "compile", "-m", "gpt2xl", status=2)
    for name in ("", "x" * 5000, "a/b/c", "model:function", "model.py", "file", "a\nb"):
        refused("echoc", "compile", "-m", name)
    for name in ("missing.json", "folder", "missing.py:f", "file.py:", "file.py:a b"):
        refused("echoc", "compile", "-m", name)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--batch-size", v) for v in ("0", "-1", "many", "1.5")),
        *(("--seq-len", v) for v in ("0", "-1")),
        *(("--clip-grad-norm", v) for v in ("0", "-1", "nan", "inf", "much")),
        ("--dtype", "int8"),
        ("--optimizer", "lion"),
        ("--capture", "camera"),
        ("--attention", "divided"),
    ],
)
def test_an_option_out_of_range(refused, tiny_config: Path, option: str, value: str) -> None:
    name = option.removeprefix("--").replace("-", ".")
    assert re.search(name, refused("echoc", "compile", "-m", tiny_config, option, value, status=2))


@pytest.mark.torch
def test_a_sequence_beyond_the_positions(refused) -> None:
    assert "512" in refused("echoc", "compile", "-m", "bert-base-uncased", "--seq-len", 513, status=2)


@pytest.mark.torch
def test_sizes_beyond_any_machine(refused, tiny_config: Path) -> None:
    for batch in (10**18, 10**30):
        refused("echoc", "compile", "-m", tiny_config, "--batch-size", batch)
    refused("echoc", "compile", "-m", "distilbert-base-uncased", "--batch-size", HUGE)
    refused("echoc", "compile", "-m", "resnet-18", "--batch-size", 1, "--seq-len", 10**8)


@pytest.mark.torch
@pytest.mark.parametrize("name", CONFIG_CHANGES)
def test_a_configuration_that_makes_no_model(refused, folder: Path, tiny_config: Path, name: str) -> None:
    config = json.loads(tiny_config.read_text())
    (folder / "mine.json").write_text(json.dumps({**config, **CONFIG_CHANGES[name]}))
    refused("echoc", "compile", "-m", "mine.json", status=1)


@pytest.mark.torch
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"{}", b"\xff\x00", b"[" * 100_000, b'{"model_type": 3}'])
def test_a_configuration_that_is_none(refused, folder: Path, content: bytes) -> None:
    (folder / "mine.json").write_bytes(content)
    assert "mine.json" in refused("echoc", "compile", "-m", "mine.json", status=1)
    (folder / "folder" / "config.json").write_bytes(content)
    assert "config.json" in refused("echoc", "compile", "-m", "folder", status=1)


@pytest.mark.torch
@pytest.mark.parametrize("name", [*MODELS, *TORCH_MODELS, "missing_function"])
def test_a_model_file_that_makes_no_model(refused, folder: Path, name: str) -> None:
    content = MODELS.get(name, BRANCHES + TORCH_MODELS.get(name, "pass"))
    (folder / "mine.py").write_text(content)
    function = "g" if name == "missing_function" else "f"
    line = refused("echoc", "compile", "-m", f"mine.py:{function}", status=1)
    if name in MODELS or name == "missing_function":
        assert "mine.py" in line
    if name in ("raises", "branches"):
        assert re.search(r"mine\.py:\d+", line), "names the line"


@pytest.mark.torch
def test_options_of_the_zoo_on_a_function(refused, folder: Path) -> None:
    (folder / "mine.py").write_text(MODELS["number"])
    assert "in your function" in refused("echoc", "compile", "-m", "mine.py:f", "--batch-size", 2, status=2)


# --- echoc capture ------------------------------------------------------------------------------------------


def test_an_option_of_the_script_stands_behind_dashes(refused) -> None:
    line = refused("echoc", "capture", "torch", "--script", "train.py", "--lr", "3", "-o", "job.pb", status=2)
    assert "No such option: --lr" in line and "a script's own options stand behind --" in line
    assert "stand behind" not in refused("echoc", "show", "--lr", status=2)


# --- echoprof fit -------------------------------------------------------------------------------------------


def test_nothing_to_fit(refused, folder: Path) -> None:
    assert "--kernels" in refused("echoprof", "fit", status=2)
    refused("echoprof", "fit", "--kernels", "missing.csv", "-o", "out", status=1)
    refused("echoprof", "fit", "--kernels", "file", "-o", "out", status=1)
    refused("echoprof", "fit", "--collectives", "missing.csv", "-o", "out", status=1)
    refused("echoprof", "fit", "--collectives", "folder", "-o", "out", status=1)
    assert "cannot write" in refused("echoprof", "fit", "--kernels", "file", "-o", "file/out", status=1)
    assert "h100" in refused("echoprof", "fit", "--kernels", "file", "--device", "h100-sxn", "-o", "out", status=2)
    refused("echoprof", "fit", "--collectives", "file", "--fabric", "nvlink9", "-o", "out", status=2)
