"""No option is silently idle: it changes the answer, or is refused in one line, or is said to have no effect."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

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
    "tp.toml": '"*.q_proj" = "colwise"\n"*.k_proj" = "colwise"\n"*.v_proj" = "colwise"\n"*.o_proj" = "rowwise"\n',
}
RUN: dict[str, tuple[str, str]] = {
    # Option: in which company it has an effect, and the value that has one.
    "--gpus": ("", "16"),
    "--cluster": ("", "dgx-a100"),
    "--tp": ("", "2"),
    "--sequence-parallel": ("--tp 2", ""),
    "--no-sequence-parallel": ("--tp 2 --plan {tmp}/opposite.toml --vpp 2 --pp 2 --ep 2", ""),
    "--tp-comm-overlap": ("--tp 2 --sequence-parallel", "chunks"),
    "--tp-plan": ("--tp 2", "{tmp}/tp.toml"),
    "--cp": ("", "2"),
    "--cp-method": ("--cp 2", "all-to-all"),
    "--ep": ("", "2"),
    "--etp": ("--tp 2 --sequence-parallel --ep 2", "1"),
    "--capacity-factor": ("", "0.5"),
    "--moe-dispatcher": ("--ep 4 --gpus 16", "deepep"),
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
    "--no-overlap-param-gather": ("--zero 1 --stack megatron-core", ""),
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


@pytest.mark.parametrize("option", sorted(RUN))
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


@pytest.mark.parametrize("option", sorted({*RUN, *IMPORTED_ALONE, "--tensors"}))
def test_an_option_of_run_is_never_silently_idle(
    cli: Any, graph: Path, folder: Path, known: dict[str, Any], option: str
) -> None:
    """Alone, on a graph without experts on one node, where many options have nothing to change."""
    if option in DEFAULTS or option in ("--strict-memory", "--overlap-grad-reduce"):
        pytest.skip("asks for what happens anyway")
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
