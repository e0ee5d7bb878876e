"""`echoc lower` and plan files: one plan, three ways to say it, and every wrong one refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.options import option_name
from echograph.workflow.plan import AXES, Plan

OPTIONS = ("--gpus", 16, "--tp", 2, "--pp", 2, "--global-batch", 32)
FILE = 'gpus = 16\ntp = 2\npp = 2\n"global-batch" = 32\n'


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(FILE)
    return path


def test_one_plan_said_in_three_ways_is_one_prediction(cli, graph: Path, plan_file: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.pb"
    assert cli("echoc", "lower", graph, *OPTIONS, "-o", job).status == 0
    records = [
        cli("echosim", "run", *how, "--json").json()
        for how in ((graph, *OPTIONS), (graph, "--plan", plan_file), (job,))
    ]
    for record in records:
        assert record["step_time_s"] == records[0]["step_time_s"]
        assert {k: record["plan"][k] for k in ("gpus", *AXES)} == {
            "gpus": 16, "tp": 2, "cp": 1, "ep": 1, "dp": 4, "pp": 2,
        }  # fmt: skip


def test_the_command_line_counts_more_than_the_file(cli, graph: Path, plan_file: Path) -> None:
    plan = cli("echosim", "run", graph, "--plan", plan_file, "--tp", 1, "--json").json()["plan"]
    assert (plan["tp"], plan["pp"], plan["dp"]) == (1, 2, 8)


def test_a_plan_file_takes_underscores_and_lists(cli, graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("pp = 2\nstage_layers = [2, 1]\ngpus = 2\n")
    roles = cli("echoc", "lower", graph, "--plan", path, "-o", tmp_path / "job.pb", "--json").json()["roles"]
    assert [role["role"] for role in roles] == ["stage 0", "stage 1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpp = 2", "did you mean 'tp'?"),
        ("tp = 'two'", "tp is 'two': give a whole number"),
        ("tp = true", "tp is true: give a whole number"),
        ("tp = ", "is no TOML"),
        ("\x00", "is no TOML"),
        ("sequence_parallel = 1", "give true or false"),
        ("#" * 70_000, "is over 64 KiB"),
    ],
)
def test_a_wrong_plan_file_is_one_line(cli, graph: Path, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    outcome = cli("echosim", "run", graph, "--plan", path)
    assert outcome.status in (1, 2)
    assert words in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tp", 0), "give 1 or more"),
        (("--tp", 3, "--gpus", 16), "15 or 18 would be"),
        (("--tp", 3, "--gpus", 9), "choose a size of"),
        (("--pp", 8, "--gpus", 8), "3 layers"),
        (("--vpp", 2), "give --pp 2 or more"),
        (("--pp", 2, "--vpp", 2, "--schedule", "gpipe"), "use interleaved"),
        (("--pp", 2, "--schedule", "interleaved"), "--vpp 2 or more"),
        (("--schedule", "round-robin", "--pp", 2), "choose gpipe, 1f1b"),
        (("--dp", 3, "--gpus", 8), "--dp 8, or --gpus 3"),
        (("--ep", 3, "--gpus", 8), "choose 2 or 4"),
        (("--hsdp-replicas", 3, "--zero", 3, "--gpus", 8), "choose 2 or 4"),
        (("--hsdp-replicas", 2), "need --zero 3"),
        (("--zero", 4), "choose 0, 1, 2, 3"),
        (("--global-batch", 17, "--gpus", 8), "such as 16 or 32"),
        (("--sequence-parallel",), "give --tp 2 or more"),
        (("--recompute", "some"), "choose none, selective"),
        (("--precision", "int4"), "choose bf16"),
        (("--mesh-order", "tp-pp"), "give each of"),
        (("--expert-imbalance", 0.5), "at least the mean"),
        (("--capacity-factor", 0), "more than 0"),
        (("--overlap-param-gather",), "--zero 1 or 2"),
        (("--stage-layers", "1,x", "--pp", 2), "whole numbers"),
        (("--gpus", 10**9), "has 1 to"),
    ],
)
def test_a_wrong_plan_names_the_rule_and_what_would_work(
    cli, graph: Path, tmp_path: Path, options: tuple[object, ...], words: str
) -> None:
    for command in (("echosim", "run"), ("echoc", "lower", "-o", tmp_path / "job.pb")):
        outcome = cli(*command[:2], graph, *options, *command[2:])
        assert outcome.status in (1, 2)
        assert words in outcome.err
        assert outcome.err.count("\n") == 1
    assert not (tmp_path / "job.pb").exists()


def test_every_field_of_a_plan_is_an_option_with_its_default(cli) -> None:
    for command in (("echosim", "run"), ("echoc", "lower")):
        shown = "".join(cli(*command, "--help").out.split())
        for name in Plan.__dataclass_fields__:
            assert option_name(name) in shown


def test_the_mesh_order_says_who_are_neighbours(cli, graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.pb"
    where = (graph, "--gpus", 16, "--tp", 2, "--pp", 2, "-o", path, "--json")
    usual = cli("echoc", "lower", *where).json()
    other = cli("echoc", "lower", *where, "--mesh-order", "pp-dp-tp-cp-ep").json()
    assert list(usual["mesh"]) == ["pp", "dp", "tp"]
    assert list(other["mesh"]) == ["tp", "dp", "pp"]
    assert other["roles"] == usual["roles"]


def test_lower_does_not_write_over_its_graph(cli, graph: Path) -> None:
    before = graph.read_bytes()
    assert cli("echoc", "lower", graph, "-o", graph).status == 2
    assert graph.read_bytes() == before


def test_show_tells_a_jobs_roles_and_collectives(cli, graph: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.pb"
    cli("echoc", "lower", graph, *OPTIONS, "-o", job)
    record = cli("echoc", "show", job, "--json").json()
    assert record["mesh"] == {"pp": 2, "dp": 4, "tp": 2}
    assert [role["ranks"] for role in record["roles"]] == [8, 8]
    sends = [e for e in record["communication"] if e["kind"] == "send"]
    receives = [e for e in record["communication"] if e["kind"] == "recv"]
    assert sum(sum(e["calls"].values()) for e in sends) == sum(sum(e["calls"].values()) for e in receives) > 0
    assert {e["axes"] for e in record["communication"]} == {"pp", "dp", "tp"}
    text = cli("echoc", "show", job).out
    assert "stage 1" in text
    assert "reduce" in text


def test_strict_memory_makes_an_error_of_a_verdict(cli, graph: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text(_cluster_with_little_memory())
    where = (graph, "--cluster", small, "--gpus", 2)
    assert cli("echosim", "run", *where, "--json").json()["memory"]["fits"] is False
    outcome = cli("echosim", "run", *where, "--strict-memory")
    assert outcome.status == 1
    assert "the plan needs" in outcome.err
    assert outcome.out == ""


def test_a_plan_that_does_not_fit_names_those_that_do(cli, tiny_config: Path, tmp_path: Path) -> None:
    graph = tmp_path / "many.pb"
    assert cli("echoc", "compile", "-m", tiny_config, "--batch-size", 1024, "-o", graph).status == 0

    def needed(*options: object) -> int:
        return cli("echosim", "run", graph, "--gpus", 8, *options, "--json").json()["memory"]["device_bytes"]

    between = (needed() + needed("--recompute", "full")) / 2 / 2**30
    little = (graph, "--gpus", 8, "--set", f"cluster.node.memory_GiB={between}")
    text = cli("echosim", "run", *little).out
    assert "DOES NOT FIT" in text
    line = cli("echosim", "run", *little, "--strict-memory").err
    assert "it fits with --recompute full (" in line
    assert "fits\n" in cli("echosim", "run", *little, "--recompute", "full").out


def _cluster_with_little_memory() -> str:
    from importlib.resources import files

    text = (files("echograph.simulator.clusters") / "presets" / "dgx-h100.toml").read_text()
    return text.replace("memory_GiB = 79.6", "memory_GiB = 0.001")
