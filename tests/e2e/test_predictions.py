"""BERT and others from one GPU to 1,024: what must hold of any prediction."""

from __future__ import annotations

from typing import Any

import pytest

from echograph.ir.unfold import unfold

pytestmark = pytest.mark.torch
WEAK_SCALING = (8, 16, 32, 64, 128, 256, 512, 1024)


def exposed(record: dict[str, Any]) -> float:
    return sum(record["breakdown_s"]["exposed_communication"].values())


def test_one_gpu_does_not_communicate(compiled, simulated) -> None:
    record = simulated(compiled("bert-base-uncased", batch_size=8), 1)
    assert exposed(record) == 0
    assert record["collectives"] == {}
    assert record["breakdown_s"]["bubble"] == record["breakdown_s"]["wait"] == 0
    assert record["step_time_s"] > 0


@pytest.mark.parametrize("name", ["bert-base-uncased", pytest.param("bert-large-uncased", marks=pytest.mark.slow)])
def test_weak_scaling_costs_communication_and_nothing_else(compiled, simulated, name: str) -> None:
    alike = {"node.gpu_spread": "0"}
    records = [simulated(compiled(name, batch_size=8), gpus, settings=alike) for gpus in WEAK_SCALING]
    steps = [r["step_time_s"] for r in records]
    assert steps == sorted(steps)
    assert [exposed(r) for r in records] == sorted(exposed(r) for r in records)
    assert len({r["breakdown_s"]["compute"] for r in records}) == 1
    host = max(r["breakdown_s"]["host"] for r in records)
    growth = steps[-1] - steps[0]
    assert 0 < growth == pytest.approx(exposed(records[-1]) - exposed(records[0]), abs=host)
    throughput = [r["samples_per_s"] / r["gpus"] for r in records]
    assert throughput == sorted(throughput, reverse=True)


def test_a_node_that_is_not_full(compiled, simulated) -> None:
    graph = compiled("bert-base-uncased", batch_size=8)
    records = {gpus: simulated(graph, gpus) for gpus in (1, 2, 5, 8, 12, 16)}
    busy = {gpus: record["collectives"]["dp"]["busy_s"] for gpus, record in records.items() if gpus > 1}
    assert records[1]["step_time_s"] < records[2]["step_time_s"]
    assert busy[12] > busy[8], "two nodes are slower than one"
    assert all(record["gpus"] == gpus for gpus, record in records.items())


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("dgx-a100", "dgx-h100"),
        ("dgx-h100", "dgx-h200"),
        ("dgx-h200", "dgx-b200"),
        ("azure-nd-a100-v4", "dgx-a100"),
    ],
)
@pytest.mark.parametrize(("name", "layers"), [("bert-large-uncased", 6), ("llama-3-8b", 4)])
@pytest.mark.parametrize("gpus", [1, 8, 256])
def test_a_faster_machine_is_faster(
    compiled, simulated, slower: str, faster: str, name: str, layers: int, gpus: int
) -> None:
    graph = compiled(name, layers, batch_size=8, seq_len=512)
    assert simulated(graph, gpus, faster)["step_time_s"] <= 1.001 * simulated(graph, gpus, slower)["step_time_s"]


def test_ethernet_is_slower_than_infiniband(compiled, simulated) -> None:
    graph = compiled("bert-base-uncased", batch_size=8)
    times = [
        simulated(graph, 64, cluster)["collectives"]["dp"]["busy_s"] for cluster in ("ethernet-100g", "dgx-a100")
    ]
    assert times[0] > 2 * times[1]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("bert-base-uncased", None),
        pytest.param("t5-small", None, marks=pytest.mark.slow),
        pytest.param("resnet-50", None, marks=pytest.mark.slow),
        ("mixtral-8x7b", 4),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_folding_changes_no_prediction(
    compiled, simulated, name: str, layers: int | None, micro_batches: int
) -> None:
    graph = compiled(name, layers, batch_size=2)
    records = [simulated(g, 16, global_batch=32 * micro_batches) for g in (graph, unfold(graph))]
    for record in records:
        # What repeats is simulated segment by segment, what stands unfolded task by task.
        del record["simulation"]["wall_s"], record["simulation"]["engine"]
    assert records[0] == records[1]


def test_a_larger_micro_batch_uses_the_device_better(compiled, simulated) -> None:
    records = [simulated(compiled("bert-base-uncased", batch_size=size), 8) for size in (2, 8, 32)]
    assert [r["mfu"] for r in records] == sorted(r["mfu"] for r in records)
    assert all(0 < r["mfu"] < 0.7 for r in records)


def test_a_small_batch_is_bound_by_the_host(compiled, simulated) -> None:
    record = simulated(compiled("bert-base-uncased", batch_size=1, seq_len=32), 1)
    parts = record["breakdown_s"]
    assert parts["host"] > parts["compute"]


def test_memory_grows_with_the_batch_alone(compiled, simulated) -> None:
    small, large = (simulated(compiled("bert-base-uncased", batch_size=b), 8)["memory"] for b in (2, 8))
    kept = ("parameter", "optimizer_state", "buffer")
    assert [small["at_peak_bytes"][k] for k in kept] == [large["at_peak_bytes"][k] for k in kept]
    assert small["at_peak_bytes"]["activation"] < large["at_peak_bytes"]["activation"]
    assert large["fits"]


def test_a_model_beyond_the_memory_is_said_not_to_fit(compiled, simulated) -> None:
    record = simulated(compiled("llama-3-70b", 8, batch_size=1, seq_len=2048), 8)
    assert record["memory"]["peak_bytes"] > record["memory"]["capacity_bytes"]
    assert not record["memory"]["fits"]


def test_sharding_trades_memory_for_communication(compiled, simulated) -> None:
    graph = compiled("llama-3-8b", 4, batch_size=1, seq_len=2048)
    whole, sharded = (simulated(graph, 64, zero=stage) for stage in (0, 3))
    assert sharded["memory"]["at_peak_bytes"]["optimizer_state"] == pytest.approx(
        whole["memory"]["at_peak_bytes"]["optimizer_state"] / 64, rel=0.01
    )
    assert sharded["memory"]["peak_bytes"] < whole["memory"]["peak_bytes"] / 4
    assert sum(c["busy_s"] for c in sharded["collectives"].values()) > whole["collectives"]["dp"]["busy_s"]
    hybrid = simulated(graph, 64, zero=3, hsdp_replicas=8)
    peaks = [r["memory"]["peak_bytes"] for r in (sharded, hybrid, whole)]
    assert peaks == sorted(peaks), "a hybrid lies between"


@pytest.mark.parametrize("gpus", [1, 5, 16, 1024])
def test_the_breakdown_of_a_sharded_step_adds_up(compiled, simulated, gpus: int) -> None:
    record = simulated(compiled("bert-base-uncased", batch_size=2), gpus, zero=3, global_batch=4 * gpus)
    parts = dict(record["breakdown_s"])
    parts |= parts.pop("exposed_communication")
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(record["step_time_s"], rel=1e-9)
