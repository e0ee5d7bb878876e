"""Real jobs on gloo: steps as recorded and free, against the simulation of the recorded graph.

How far a simulated step is from a free one is printed (`pytest -n 0 -s`), and means something on a machine that
does nothing else. What is asserted holds on a busy one, too.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from recorded_jobs import EXAMPLES, PROGRAMS, metadata, record, tool

from echograph.ir.serde import load

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WINDOW = (6, 10)
TOLERANCE = 0.08
DEEPSPEED = ("--layers", 2, "--hidden", 128, "--heads", 4, "--vocabulary", 2048, "--length", 64, "--steps", 16)
MEGATRON = (
    "--num-layers", 4, "--hidden-size", 256, "--seq-length", 64, "--micro-batch-size", 2, "--train-iters", 16,
    "--distributed-backend", "gloo", "--disable-gloo-process-groups",
)  # fmt: skip


def _program(name: str) -> Any:
    def job(folder: Path) -> Any:
        small = ("--layers", 2, "--width", 128, "--length", 64, "--steps", 16)
        return record(folder / "recording", PROGRAMS / name, *small, steps=WINDOW)

    return job


def _deepspeed(stage: int) -> Any:
    def job(folder: Path) -> Any:
        config = folder / "ds.json"
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
        }
        config.write_text(json.dumps(settings))
        script = EXAMPLES / "deepspeed-gpt2" / "train.py"
        arguments = ("--deepspeed_config", config, *DEEPSPEED)
        return record(folder / "recording", script, *arguments, steps=WINDOW, DS_ACCELERATOR="cpu")

    return job


def _megatron(*arguments: object) -> Any:
    def job(folder: Path) -> Any:
        script = EXAMPLES / "megatron-gpt" / "pretrain.py"
        launcher = ("-m", "echograph.frontend.megatron", script)
        return record(folder / "recording", *launcher, *MEGATRON, *arguments, steps=WINDOW)

    return job


JOBS = {
    "ddp": ("torch", _program("ddp.py")),
    "fsdp2": ("torch", _program("fsdp2.py")),
    "zero-1": ("deepspeed", _deepspeed(1)),
    "zero-2": ("deepspeed", _deepspeed(2)),
    "zero-3": ("deepspeed", _deepspeed(3)),
    "megatron-tp2": ("megatron", _megatron("--tensor-model-parallel-size", 2)),
    "megatron-pp2": ("megatron", _megatron("--pipeline-model-parallel-size", 2, "--global-batch-size", 8)),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_recorded_graph_takes_as_long_as_the_job_did(
    name: str, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    package, job = JOBS[name]
    if find_spec(package) is None:
        pytest.skip(f"needs the [{package}] extra")
    job(tmp_path)
    recording, kept, graph = tmp_path / "recording", tmp_path / "kept.pb", tmp_path / "job.pb"
    tool("echoc", "import", "kineto", recording, "-o", kept, "--keep-overhead")
    told = tool("echoc", "import", "kineto", recording, "-o", graph)
    assert "without what recording cost" in told.stderr
    for rank in (0, 1):
        said = metadata(recording, rank)
        assert said["complete"] and not said["problems"]
        assert (recording / str(rank) / "comms.jsonl").stat().st_size > 0
        recorded, free = ([s for s in said["steps"] if s["state"] == state] for state in ("recorded", "free"))
        assert {s["number"] for s in recorded} == set(range(*WINDOW))
        # The clock that saw these is the recorder's own, beside the profiler.
        as_recorded, without = (_replayed(path, rank) for path in (kept, graph))
        measured, undisturbed = ([s["seconds"] for s in steps] for steps in (recorded, free))
        assert len(without) == len(as_recorded) == len(measured)
        assert median(as_recorded) == pytest.approx(median(measured), rel=TOLERANCE)
        assert median(without) < median(as_recorded)
        taken = (_on_main_thread(kept, rank) - _on_main_thread(graph, rank)) / len(recorded)
        observed, alone = (median(s["processor_s"] for s in steps) for steps in (recorded, free))
        assert taken > 0
        line = (
            f"{name} rank {rank}: recorded {_ms(measured)} ms, replayed {_ms(as_recorded)} as recorded and "
            f"{_ms(without)} without, free {_ms(undisturbed)}: {median(without) / median(undisturbed) - 1:+.1%}; "
            f"processor {_ms([observed])} recorded, {_ms([observed - taken])} without, {_ms([alone])} free"
        )
        record_property("step", line)
        print(line)


def _replayed(graph: Path, rank: int) -> list[float]:
    """Seconds of each step of a rank, by the simulator."""
    steps = json.loads(tool("echosim", "replay", graph, "--json").stdout)["steps"]
    return [s["replayed_s"] for s in steps if s["role"] == f"rank {rank}" and "#" in s["name"]]


def _on_main_thread(file: Path, rank: int) -> float:
    """Seconds of all that the thread that trains did itself."""
    graph = load(file)
    ops, ((_, begin, end, _, _),) = graph.ops, graph.programs[rank].calls.tolist()
    rows = np.arange(begin, end)
    rows = rows[ops.stream[begin:end] == graph.streams.index("main")]
    of_step = [at for at, text in enumerate(graph.strings) if text in ("step", "free step")]
    counts = np.isin(ops.duration.rows, rows) & ~np.isin(ops.duration_device, of_step)
    return float(ops.duration.values[counts].sum()) / 1e12


def test_the_dependencies_take_at_most_as_long_as_the_step(tmp_path: Path, record_property: Any) -> None:
    JOBS["ddp"][1](tmp_path)
    recording, trace = tmp_path / "recording", tmp_path / "replay.json"
    replayed = json.loads(tool("echoprof", "replay", recording, "--pretty", "-o", trace, "--json").stdout)
    critical = json.loads(tool("echoprof", "critical", recording, "--json").stdout)
    nodes = json.loads(tool("echoprof", "dag", recording, "--json").stdout)["dag"]
    assert {"rank0.STEP", "rank1.STEP"} <= {node["name"] for node in nodes}
    for rank in (0, 1):
        said = metadata(recording, rank)
        assert not said["problems"]
        measured = 1e3 * fmean(s["seconds"] for s in said["steps"] if s["state"] == "recorded")
        (step,) = (s["step_ms"] for s in replayed["steps"] if s["gpu"] == f"rank{rank}")
        # Ranks are not coupled, and what is on a path ran one after another: the rest of the step is Python.
        assert step == pytest.approx(critical["length_ms"][f"rank{rank}"])
        assert measured / 2 < step < measured * 1.01
        record_property("dependencies", f"rank {rank}: {step:.1f} ms, wall {measured:.1f}")
        print(rank, step, measured)


def _ms(seconds: Any) -> str:
    return f"{median(seconds) * 1e3:.1f}"
