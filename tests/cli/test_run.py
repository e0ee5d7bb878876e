"""`echosim run`: the contract of its JSON, its files, its engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONTRACT = {
    *("step_time_s", "step_time_interval_s", "tokens_per_s", "samples_per_s", "mfu", "gpus", "plan"),
    *("breakdown_s", "memory", "durations", "simulation"),
}


def test_the_json_keeps_the_contract(cli, graph: Path) -> None:
    record = cli("echosim", "run", graph, "--gpus", 16, "--json").json()
    assert record.keys() >= CONTRACT
    assert record["breakdown_s"].keys() == {"compute", "exposed_communication", "bubble", "wait", "host"}
    assert record["memory"].keys() >= {"peak_bytes", "capacity_bytes", "fits"}
    assert record["durations"].keys() >= {"measured", "fitted", "analytical"}
    assert record["simulation"].keys() >= {"engine", "ranks", "tasks", "wall_s"}
    low, high = record["step_time_interval_s"]
    assert 0 < low <= record["step_time_s"] <= high
    assert record["gpus"] == record["plan"]["gpus"] == 16
    assert record["samples_per_s"] == pytest.approx(2 * 16 / record["step_time_s"])
    assert record["tokens_per_s"] == pytest.approx(64 * record["samples_per_s"])
    assert sum(record["durations"].values()) == pytest.approx(1)


@pytest.mark.parametrize("gpus", [1, 8, 12, 1024])
def test_the_breakdown_adds_up_to_the_step(cli, graph: Path, gpus: int) -> None:
    record = cli("echosim", "run", graph, "--gpus", gpus, "--json").json()
    parts = dict(record["breakdown_s"])
    parts |= parts.pop("exposed_communication")
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(record["step_time_s"], rel=1e-9)


def test_the_table_says_what_the_json_says(cli, graph: Path) -> None:
    text = cli("echosim", "run", graph, "--gpus", 8).out
    for expected in ("tiny on 8 GPUs of dgx-h100", "step time", "throughput", "compute", "memory", "durations"):
        assert expected in text


def test_without_gpus_it_takes_one_node(cli, graph: Path) -> None:
    assert cli("echosim", "run", graph, "--cluster", "gb200-nvl72", "--json").json()["gpus"] == 4


def test_files_hold_the_result_and_a_trace(cli, graph: Path, tmp_path: Path) -> None:
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    outcome = cli("echosim", "run", graph, "--gpus", 8, "--json", "-o", result, "--trace", trace)
    assert json.loads(result.read_text()) == outcome.json()
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    last = max(e["ts"] + e["dur"] for e in spans)
    assert last / 1e6 == pytest.approx(outcome.json()["step_time_s"], rel=1e-6)
    assert len({(e["pid"], e["tid"]) for e in spans}) >= 2, "host and device are apart"
    assert len(outcome.err.splitlines()) == 2


def test_the_engines_agree(cli, graph: Path) -> None:
    records = [cli("echosim", "run", graph, "--gpus", 64, "--engine", e, "--json").json() for e in ENGINES]
    assert [r["simulation"].pop("engine") for r in records] == ["static", "static", "events"]
    for record in records:
        record["simulation"].pop("wall_s")
    assert all(record == records[0] for record in records)


ENGINES = ("auto", "static", "events")


def test_two_runs_print_the_same(cli, graph: Path) -> None:
    records = [cli("echosim", "run", graph, "--json").json() for _ in range(2)]
    for record in records:
        record["simulation"].pop("wall_s")
    assert json.dumps(records[0]) == json.dumps(records[1])


def test_a_larger_global_batch_runs_more_micro_batches(cli, graph: Path) -> None:
    one = cli("echosim", "run", graph, "--gpus", 8, "--json").json()
    four = cli("echosim", "run", graph, "--gpus", 8, "--global-batch", 64, "--json").json()
    assert four["plan"]["global_batch"] == 4 * one["plan"]["global_batch"] == 64
    assert one["step_time_s"] < four["step_time_s"] < 4 * one["step_time_s"]
    assert four["samples_per_s"] == pytest.approx(64 / four["step_time_s"])


def test_a_job_graph_runs_as_it_is(cli, graph: Path, job_graph: Path) -> None:
    lowered = cli("echosim", "run", graph, "--gpus", 16, "--json").json()
    stored = cli("echosim", "run", job_graph, "--json").json()
    assert stored["gpus"] == 16
    assert stored["step_time_s"] == lowered["step_time_s"]


def test_a_cluster_of_ones_own(cli, graph: Path, tmp_path: Path) -> None:
    from echograph.simulator.clusters import load_cluster

    preset = Path(load_cluster.__code__.co_filename).parent / "presets" / "dgx-h100.toml"
    own = tmp_path / "mine.toml"
    own.write_text(preset.read_text())
    mine = cli("echosim", "run", graph, "--gpus", 64, "--cluster", own, "--json").json()
    named = cli("echosim", "run", graph, "--gpus", 64, "--json").json()
    assert mine["breakdown_s"] == named["breakdown_s"]


def test_tensor_parallel_plans_run_and_say_what_they_are(cli, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 256,
    }
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "graph.pb"
    assert (
        cli(
            "echoc", "compile", "-m", str(tmp_path), "--batch-size", "2", "--seq-len", "128", "-o", str(path)
        ).status
        == 0
    )
    for extra in ([], ["--sequence-parallel"], ["--zero", "3"], ["--zero", "3", "--sequence-parallel"]):
        record = cli("echosim", "run", str(path), "--gpus", "16", "--tp", "4", *extra, "--json").json()
        parts = record["breakdown_s"]
        total = sum(v for k, v in parts.items() if k != "exposed_communication")
        assert total + sum(parts["exposed_communication"].values()) == pytest.approx(
            record["step_time_s"], rel=1e-9
        )
        assert record["plan"]["tp"] == 4
        assert record["plan"]["global_batch"] == 2 * 4
        assert record["collectives"]["tp"]["calls"] > 0
    for wrong in (["--tp", "3"], ["--tp", "0"], ["--sequence-parallel"], ["--gpus", "18", "--tp", "4"]):
        refused = cli("echosim", "run", str(path), "--gpus", "16", *wrong)
        assert refused.status in (1, 2)
        assert len(refused.err.strip().splitlines()) == 1


def test_pipelines_run_with_tensor_and_data_parallelism(cli, graph: Path) -> None:
    layers = 2
    for extra, mesh in (([], {"pp": 2, "dp": 8}), (["--tp", "2"], {"pp": 2, "dp": 4, "tp": 2})):
        run = ["echosim", "run", graph, "--gpus", "16", "--pp", str(layers), *extra, "--json"]
        record = cli(*run).json()
        assert {axis: record["plan"][axis] for axis in mesh} == mesh
        parts = record["breakdown_s"]
        total = sum(v for k, v in parts.items() if k != "exposed_communication")
        assert total + sum(parts["exposed_communication"].values()) == pytest.approx(
            record["step_time_s"], rel=1e-9
        )
        assert record["simulation"] | {"engine": "static", "ranks": layers} == record["simulation"]
    for wrong in (
        ["--pp", "3"],
        ["--pp", "0"],
        ["--vpp", "2"],
        ["--pp", "2", "--hsdp-replicas", "2"],
        ["--pp", "8"],
    ):
        refused = cli("echosim", "run", graph, "--gpus", "16", *wrong)
        assert refused.status in (1, 2)
        assert len(refused.err.strip().splitlines()) == 1


def test_a_run_says_its_stack_and_is_otherwise_than_without(cli) -> None:
    graph = Path(__file__).parents[1] / "golden" / "predictions" / "graphs" / "llama.pb"
    plain, stacked = (
        cli("echosim", "run", graph, "--gpus", 8, "--precision", "fp8", *more, "--json").json()
        for more in ((), ("--stack", "nemo"))
    )
    assert "stack" not in plain["plan"]
    assert stacked["plan"]["stack"] == "nemo"
    assert stacked["step_time_s"] < plain["step_time_s"]
    assert "choose" in cli("echosim", "run", graph, "--stack", "abacus").err
