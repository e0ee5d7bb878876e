"""No option is silently idle: it changes the answer, or is refused in one line, or is said to have no effect."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

EXPERTS: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
FILES = {
    "plan.toml": "tp = 2\n",
    "opposite.toml": "sequence-parallel = true\noverlap-moe-expert-parallel-comm = true\n",
    "tp.toml": (
        '[plan]\n"*.q_proj" = "colwise"\n"*.k_proj" = "colwise"\n"*.v_proj" = "colwise"\n"*.o_proj" = "rowwise"\n'
    ),
}
RUN: dict[str, tuple[str, str]] = {
    # Option: in which company it has an effect, and the value that has one.
    "--gpus": ("", "16"),
    "--cluster": ("", "dgx-a100"),
    "--tp": ("", "2"),
    "--sequence-parallel": ("--tp 2", ""),
    "--no-sequence-parallel": (
        "--tp 2 --plan {tmp}/opposite.toml --vpp 2 --pp 2 --ep 2 --global-batch 64",
        "",
    ),
    "--tp-comm-overlap": ("--tp 2 --sequence-parallel", "chunks"),
    "--tp-plan": ("--tp 2", "{tmp}/tp.toml"),
    "--cp": ("", "2"),
    "--cp-method": ("--cp 2", "all-to-all"),
    "--ep": ("", "2"),
    "--etp": ("--tp 2 --sequence-parallel --ep 2", "1"),
    "--capacity-factor": ("", "0.5"),
    "--moe-dispatcher": ("--ep 2", "deepep"),
    "--expert-imbalance": ("--ep 2", "2"),
    "--pp": ("", "2"),
    "--vpp": ("--pp 2", "2"),
    "--schedule": ("--pp 2 --global-batch 64", "gpipe"),
    "--stage-layers": ("--pp 2", "1,3"),
    "--dp": ("", "4"),
    "--zero": ("", "1"),
    "--hsdp-replicas": ("--zero 3 --gpus 16", "2"),
    "--distributed-optimizer-instances": ("--zero 1 --gpus 16", "2"),
    "--reshard-after-forward": ("--zero 3 --pp 2", ""),
    "--no-reshard-after-forward": ("--zero 3", ""),
    "--overlap-grad-reduce": ("--stack megatron-core --pp 2", ""),
    "--no-overlap-grad-reduce": ("", ""),
    "--overlap-param-gather": ("--zero 1", ""),
    "--no-overlap-param-gather": ("--zero 1 --stack nemo --micro-batch 512", ""),
    "--overlap-moe-expert-parallel-comm": ("--ep 2 --pp 2 --vpp 2 --global-batch 64", ""),
    "--no-overlap-moe-expert-parallel-comm": (
        "--tp 2 --ep 2 --pp 2 --vpp 2 --plan {tmp}/opposite.toml --global-batch 64",
        "",
    ),
    "--micro-batch": ("", "4"),
    "--global-batch": ("", "64"),
    "--recompute": ("", "full"),
    "--recompute-early-stop": ("--recompute full --stack megatron-core", ""),
    "--no-recompute-early-stop": ("--recompute full", ""),
    "--loss": ("", "fused"),
    "--stack": ("", "torchtitan"),
    "--precision": ("", "fp8"),
    "--grad-dtype": ("", "fp32"),
    "--mesh-order": ("--gpus 16 --tp 2", "dp-cp-ep-tp-pp"),
    "--passes": ("", "data_parallel{{replicas=4}}"),
    "--plan": ("", "{tmp}/plan.toml"),
    "--device": ("", "a100-sxm-80"),
    "--set": ("--gpus 16", "cluster.network.nic_GBps=1"),
    "--host-waits": ("--pp 2 --global-batch 64", ""),
    "--launch-blocking": ("", ""),
    "--power-limit": ("--micro-batch 512", "200"),
    "--scale": ("", "compute=2"),
    "--without": ("", "comm"),
    "--ranks": ("", "all"),
    "--straggler": ("", "1=2"),
    "--jitter": ("", "0.1"),
    "--seed": ("--jitter 0.1", "3"),
    "--draws": ("--jitter 0.1", "3"),
    "--network": ("--gpus 16", "flows"),
    "--degrade": ("", "node 0 compute=0.5"),
    "--node-mtbf-hours": ("", "100 --checkpoint-s 3 --restart-s 3"),
    "--checkpoint-s": ("--node-mtbf-hours 100 --restart-s 3 --checkpoint-s 5", "3"),
    "--restart-s": ("--node-mtbf-hours 100 --checkpoint-s 3 --restart-s 5", "3"),
    "--checkpoint-interval-s": ("--node-mtbf-hours 100 --checkpoint-s 3 --restart-s 5", "30"),
    "--train-tokens": ("", "1B"),
    "--days": ("--train-tokens 1B --global-batch 16", "9999"),
    "--gpu-hour": ("--train-tokens 1B", "0"),
    "--pue": ("--train-tokens 1B", "1.1"),
    "--g-per-kwh": ("--train-tokens 1B", "0"),
    "--place": ("--storage-gbps 1 --read-gib 1 --gpus 4", "gpus:1-4"),
    "--storage-gbps": ("", "1 --read-gib 1"),
    "--read-gib": ("--storage-gbps 1 --checkpoint-gib 1", "1"),
    "--checkpoint-gib": ("--storage-gbps 1 --read-gib 1", "1"),
    "--checkpoint-every": ("--storage-gbps 1 --checkpoint-gib 1", "3"),
    "--strict-memory": ("--set cluster.node.memory_GiB=1.25", ""),
    "--what-fits": ("--set cluster.node.memory_GiB=4", ""),
    "--model": ("--set cluster.node.memory_GiB=4 --what-fits", "{tmp}/experts.json"),
    "--engine": ("", "events"),
    "--trace-ranks": ("--trace {tmp}/trace.json", "1"),
}
ONLY_WRITTEN = {"--output", "--trace", "--html", "--tensors", "--json"}
"""What has files or other text alone: tested where they are."""
IMPORTED_ALONE = {"--model-communication"}
DEFAULTS = {
    "--no-host-waits", "--no-launch-blocking", "--no-model-communication", "--no-strict-memory", "--no-what-fits",
    "--no-sequence-parallel", "--no-overlap-moe-expert-parallel-comm",
}  # fmt: skip
"""What says of a switch that it stays as it is."""


def options(program: str, command: str) -> set[str]:
    """All long options of a command, as the command itself has them."""
    app: Any = typer.main.get_command(import_module(f"echograph.cli.{program}").app)
    found = (p for p in app.commands[command].params if p.param_type_name == "option")
    return {name for p in found for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}


def test_every_option_of_run_has_a_case() -> None:
    assert options("echosim", "run") == {*RUN, *ONLY_WRITTEN, *IMPORTED_ALONE, *DEFAULTS}


class Case(NamedTuple):
    """Words with which an option would change nothing, and what is said of them in a line."""

    words: str
    line: str


IDLE: dict[tuple[str, str], dict[str, Case]] = {
    ("echoc", "compile"): {
        "--lora-targets": Case("-m {tmp}/experts.json --lora-targets q_proj", "give --lora-rank as well"),
        "--lora-rank": Case(
            "-m {tmp}/experts.json --lora-rank 2 --lora-targets q_proj,q", "targets q: no linear layer"
        ),
        "--mtp-use-repeated-layer": Case(
            "-m {tmp}/experts.json --mtp-use-repeated-layer", "give --mtp-num-layers as well"
        ),
        "--mtp-num-layers": Case(
            "-m {dense} --mtp-num-layers 1 --mtp-use-repeated-layer", "one further token has one module"
        ),
        "--master-weights": Case("-m {tmp}/experts.json --dtype fp32 --master-weights", "these are fp32"),
        "--branch": Case("-m bert --branch then", "--branch: for an ONNX file"),
        "--dim": Case("-m bert --dim x=2", "--dim: for an ONNX file"),
        "--train": Case("-m bert --train", "--train: for an ONNX file"),
        "--loss": Case("--onnx x.onnx --loss sum", "--loss: of a training step"),
        "--optimizer": Case("--onnx x.onnx --optimizer sgd", "--optimizer: of a training step"),
        "--kernels": Case("--onnx x.onnx --kernels cpu", "--kernels: of a training step"),
        "--clip-grad-norm": Case("--onnx x.onnx --clip-grad-norm 1", "--clip-grad-norm: of a training step"),
        "--no-master-weights": Case("--onnx x.onnx --no-master-weights", "--master-weights: of a training step"),
        "--recompute": Case("--onnx x.onnx --recompute", "an ONNX file has none"),
        "--batch-size": Case("--onnx x.onnx --batch-size 2", "--batch-size: not for an ONNX file"),
        "--seq-len": Case("--onnx x.onnx --seq-len 2", "--seq-len: not for an ONNX file"),
        "--attention": Case("--onnx x.onnx --attention sdpa", "--attention: not for an ONNX file"),
        "--capture": Case("--onnx x.onnx --capture aot", "--capture: not for an ONNX file"),
        "--dtype": Case("-m {tmp}/experts.json --dtype=", "--dtype: is empty"),
        "--onnx": Case("-m bert --onnx x.onnx", "one of them"),
        "--model": Case("--json", "--model NAME or --onnx FILE"),
    },
    ("echoc", "capture"): {
        "--script": Case("torch --script a.py --module b", "one of them"),
        "--module": Case("torch --module=", "--module: is empty"),
        "--config": Case("torch --script a.py --config b.json", "--config is for DeepSpeed"),
        "--device": Case("megatron --script a.py --device cpu", "--device cpu is for scripts of plain PyTorch"),
        "--timeout": Case("torch --script a.py --timeout nan", "--timeout nan: give seconds above 0"),
        "--ranks": Case("torch --script a.py --ranks=", "--ranks: is empty"),
        "--decide": Case("torch --script a.py --decide a=no", "--decide a=no: give a line"),
        "--fake-data": Case("torch --script a.py --fake-data=", "--fake-data: is empty"),
        "--fake-weights": Case("torch --script a.py --fake-weights=", "--fake-weights: is empty"),
    },
    ("echosim", "plan"): {
        "--top": Case("{graph} --compare-clusters dgx-h100 --top 2", "--top: not with --compare-clusters"),
        "--time": Case("{graph} --gpus 8 --global-batch 16 --time nan", "--time nan: give 0 seconds or more"),
        "--max-memory": Case("{graph} --max-memory=", "--max-memory: is empty"),
        "--objective": Case("{graph} --moves greedy --objective cost", "--objective: not with --moves"),
        "--over": Case("{graph} --moves greedy --over tp=2", "--over: not with --moves"),
        "--fix": Case("{graph} --moves greedy --fix tp=2", "--fix: not with --moves"),
        "--journal": Case("{graph} --moves greedy --journal {tmp}/j", "--journal: not with --moves"),
        "--moves": Case("{graph} --moves=", "--moves: is empty"),
        "--compare-clusters": Case("{graph} --moves greedy --compare-clusters dgx-h100", "not with --moves"),
        "--jobs": Case("{graph} --moves greedy --jobs 2", "--jobs: is of a search"),
        "--address": Case("{graph} --address auto", "give --engine ray as well"),
        "--write": Case("{graph} --moves greedy --write plan:{tmp}/p.toml", "writes no plan or page"),
        "--html": Case("{graph} --compare-clusters dgx-h100 --html {tmp}/p.html", "writes no plan or page"),
        "--output": Case("{graph} --moves greedy -o {tmp}/p.toml", "writes no plan or page"),
        "--cp-method": Case(
            "{graph} --gpus 2 --global-batch 4 --fix cp=1 --fix pp=1 --fix tp=1 --fix zero=0 --fix recompute=none"
            " --top 1 --cp-method all-to-all",
            "--cp-method: has no effect here",
        ),
    },
    ("echosim", "sweep"): {
        "--over": Case("{graph} --over jitter=nan", "--over jitter=nan: give numbers"),
        "--address": Case("{graph} --over tp=1,2 --address auto", "give --engine ray as well"),
        "--cp-method": Case("{graph} --over tp=1,2 --cp-method all-to-all", "--cp-method: has no effect here"),
        "--host-waits": Case("{graph} --over tp=1,2 --host-waits", "--host-waits: has no effect here"),
        "--stack": Case("{graph} --over tp=1,2 --stack=", "--stack: is empty"),
        "--expert-imbalance": Case("{graph} --over tp=1,2 --expert-imbalance inf", "--expert-imbalance inf"),
        "--capacity-factor": Case("{graph} --over tp=1,2 --capacity-factor inf", "--capacity-factor inf"),
    },
    ("echosim", "validate"): {
        "--family": Case("--trace {tmp} --family x", "--family: of a table"),
        "--grade": Case("--trace {tmp} --grade A", "--grade: of a table"),
        "--jobs": Case("--trace {tmp} --jobs 2", "--jobs: of a table"),
        "--peers": Case("--trace {tmp} --peers x.csv", "--peers: of a table"),
        "--trace": Case("x.csv --trace {tmp}", "give a table of measured steps, or --trace"),
        "--model": Case("x.csv --model bert", "--model: only with --trace"),
        "--dtype": Case("x.csv --dtype fp32", "--dtype: only with --trace"),
        "--optimizer": Case("x.csv --optimizer sgd", "--optimizer: only with --trace"),
        "--batch-size": Case("x.csv --batch-size 2", "--batch-size: only with --trace"),
        "--seq-len": Case("x.csv --seq-len 2", "--seq-len: only with --trace"),
        "--attention": Case("x.csv --attention sdpa", "--attention: only with --trace"),
    },
    ("echosim", "calibrate"): {
        "--source": Case("x.json --source a", "give --output as well"),
        "--date": Case("x.json --date a", "give --output as well"),
    },
    ("echoprof", "fit"): {
        "--kernels": Case("--trace {tmp} --kernels k.csv", "leave the tables out"),
        "--collectives": Case("--trace {tmp} --collectives k.csv", "leave the tables out"),
        "--nccl-tests": Case("--trace {tmp} --nccl-tests k.log", "leave the tables out"),
        "--cluster": Case("--kernels k.csv --cluster dgx-h100", "--cluster: is of --nccl-tests"),
        "--collective": Case("--kernels k.csv --collective all_reduce", "--collective: is of --nccl-tests"),
        "--name": Case("--kernels k.csv --name a", "--name: is of --nccl-tests"),
        "--device": Case("--collectives k.csv --device h100-sxm", "--device: is of --kernels"),
        "--base": Case("--kernels k.csv --base h100-sxm --device h100-sxm", "--device: not with --base"),
        "--fabric": Case("--kernels k.csv --fabric nvlink3", "--fabric: is of --collectives"),
        "--date": Case("--trace {tmp} --date today", "--date: is of --kernels or"),
        "--trace": Case("-o {tmp}/fitted", "nothing to fit"),
        "--model": Case("--kernels k.csv --model bert", "--model: is of --trace"),
        "--plan": Case("--kernels k.csv --plan {tmp}/plan.toml", "--plan: is of --trace"),
    },
    ("echoprof", "analyze"): {
        "--option": Case("{tmp} --option a=b", "name the analysis"),
        "--jobs": Case("{tmp} --jobs -1", "--jobs -1: give 1 or more"),
        "--engine": Case("{tmp} --engine ray --jobs 2", "--jobs: a Ray cluster has a task a rank"),
        "--against": Case("{tmp} counters --against {tmp} -o {tmp}/c.json", "--against: not with a copy"),
        "--html": Case("{tmp} --html {tmp}/p.html --xlsx {tmp}/p.xlsx", "a page is written alone"),
        "--xlsx": Case("{tmp} --xlsx {tmp}/p.xlsx --csv", "a workbook is written alone"),
        "--csv": Case("{tmp} --csv --json", "give one of them"),
        "--output": Case("{tmp} -o {tmp}/o.csv", "the overview is several tables"),
    },
    ("echoprof", "ops"): {
        "--clock": Case("-m bert --device cuda --clock cpu", "--clock cpu: is of --device cpu"),
        "--resume": Case("-m {dense} --device cpu --resume -o {tmp}/none.pb", "leave --resume out"),
    },
    ("echoprof", "step"): {
        "--clock": Case("-m bert --device cuda --clock cpu", "--clock cpu: is of --device cpu"),
        "--allocator": Case("-m bert --allocator other", "--allocator other: give keep or system"),
    },
    ("echoprof", "collectives"): {
        "--ops": Case("--ops=", "--ops: is empty"),
        "--sizes": Case("--sizes=", "--sizes: '': give a range"),
    },
}
"""What of other commands would do nothing, or has no value that it could have: each is refused or noted."""
SHARED = {*RUN, *DEFAULTS, "--json"}
"""Fields of the plan, the system, the scenario and the training: where they do nothing is said in one place."""
EFFECTIVE: dict[tuple[str, str], set[str]] = {
    ("echoc", "compile"): {"--json", "--output", "--no-recompute", "--no-mtp-use-repeated-layer"},
    ("echoc", "capture"): {
        "--json", "--output", "--world-size", "--local-size", "--step", "--whole", "--no-whole", "--measure-host",
        "--no-measure-host", "--strict", "--no-strict",
    },
    ("echosim", "plan"): SHARED,
    ("echosim", "sweep"): SHARED | {"--jobs", "--html", "--output"},
    ("echosim", "validate"): SHARED | {"--output"},
    ("echosim", "calibrate"): {"--json", "--output"},
    ("echoprof", "fit"): {"--json", "--output"},
    ("echoprof", "analyze"): {"--json", "--ranks", "--last-step", "--cache", "--no-cache"},
    ("echoprof", "ops"): {
        "--json", "--output", "--model", "--batch-size", "--seq-len", "--attention", "--dtype", "--optimizer",
        "--device", "--name", "--repeats", "--budget", "--graph", "--echo-json",
    },
    ("echoprof", "step"): {
        "--json", "--model", "--batch-size", "--seq-len", "--attention", "--dtype", "--optimizer", "--device",
        "--steps", "--warm-up", "--profile",
    },
    ("echoprof", "collectives"): {"--json", "--output", "--backend", "--budget"},
}  # fmt: skip
"""What always changes the answer, or what is written, or how soon: tested where they are."""


@pytest.fixture(scope="module")
def folder(session_cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step graph of a small mixture of experts, with gradients of several buckets, and the files of cases."""
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    made = tmp_path_factory.mktemp("options")
    (made / "experts.json").write_text(json.dumps(EXPERTS))
    for name, text in FILES.items():
        (made / name).write_text(text)
    graph = made / "experts.pb"
    assert session_cli("echoc", "compile", "-m", made / "experts.json", "--batch-size", 2, "-o", graph).status == 0
    return made


@pytest.mark.parametrize(("program", "command"), sorted(IDLE))
def test_every_option_of_a_command_has_a_case(program: str, command: str) -> None:
    known = {*IDLE[program, command], *EFFECTIVE[program, command]}
    there = options(program, command)
    assert there <= known
    assert known - SHARED <= there


@pytest.mark.parametrize(
    ("program", "command", "option"), [(*which, option) for which, cases in IDLE.items() for option in cases]
)
def test_an_option_that_would_do_nothing_is_refused_or_noted(
    cli: Any, graph: Path, tiny_config: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, program: str, command: str, option: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    case = IDLE[program, command][option]
    after = cli(program, command, *case.words.format(tmp=folder, graph=graph, dense=tiny_config).split())
    said = [line for line in (after.err + caplog.text).splitlines() if case.line in line]
    assert len(said) == 1, after.err
    assert after.status in (1, 2) or "has no effect here" in said[0]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """Answers that several cases are compared with."""
    return {}


def _answer(out: str) -> Any:
    """A result but for what it only repeats of the question, and how long it took."""
    record = json.loads(out)
    record.pop("plan", None)
    record.get("simulation", {}).pop("wall_s", None)
    return record


def _words(text: str, folder: Path) -> list[str]:
    return text.format(tmp=folder).split() if text else []


SLOW = ("--model", "--what-fits")
"""Options with which models are captured anew, or many sizes tried."""


def _cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(names)]


@pytest.mark.parametrize("option", _cases(RUN))
def test_an_option_of_run_changes_the_answer(cli: Any, folder: Path, known: dict[str, Any], option: str) -> None:
    company, value = RUN[option]
    run = ("echosim", "run", folder / "experts.pb", "--json", *_words(company, folder))
    if company not in known:
        known[company] = cli(*run)
        assert known[company].status == 0, known[company].err
    before = known[company]
    # A value may be two words of which the second is an option's, but a label of a link has spaces itself.
    values = [value] if option == "--degrade" else _words(value, folder)
    after = cli(*run, option, *values)
    if option == "--strict-memory":
        assert after.status == 1 and "the plan needs" in after.err
    elif option == "--trace-ranks":
        assert after.status == 0
        assert "rank 1" in (folder / "trace.json").read_text()
    else:
        assert after.status == 0, after.err
        assert _answer(after.out) != _answer(before.out)
        assert "has no effect" not in after.err


NEITHER = {*DEFAULTS, "--strict-memory", "--overlap-grad-reduce", "--set", "--no-overlap-grad-reduce"}
"""What asks for what happens anyway, says of what is there (a port of a single node), or is hidden by the host."""


@pytest.mark.parametrize("option", _cases({*RUN, *IMPORTED_ALONE, "--tensors"} - NEITHER))
def test_an_option_of_run_is_never_silently_idle(
    cli: Any, graph: Path, folder: Path, known: dict[str, Any], option: str
) -> None:
    """Alone, on a graph without experts on one node, where many options have nothing to change."""
    run = ("echosim", "run", graph, "--json")
    if graph not in known:
        known[graph] = cli(*run)
    before = known[graph]
    _, value = RUN.get(option, ("", "2" if option == "--tensors" else ""))
    values = [value] if option == "--degrade" else _words(value, folder)
    after = cli(*run, option, *values)
    if after.status:
        assert len(after.err.splitlines()) == 1, "refused in one line"
    else:
        changed = _answer(after.out) != _answer(before.out)
        assert changed or f"{option.replace('--no-', '--')}: has no effect" in after.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("echosim validate t.csv --family=", "--family: is empty"),
        ("echosim validate t.csv --family toy --family=", "--family: is empty"),
        ("echosim validate t.csv --grade=", "--grade: is empty"),
        ("echosim validate t.csv --grade A,", "--grade: is empty"),
        ("echoprof analyze . kernels --ranks=", "--ranks : give ranks with commas between them"),
    ],
)
def test_an_empty_value_is_none_that_was_left_out(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, line: str
) -> None:
    pytest.importorskip("torch", reason="needs the [torch] extra")
    monkeypatch.chdir(tmp_path)
    after = cli(*words.split())
    assert after.status == 2 and line in after.err and len(after.err.splitlines()) == 1
