"""The sum of measured operations and the simulated step beside real steps, in one sitting, for five models.

python -m benchmarks.measure_ops [--device cpu|cuda] [--rounds N] [--budget SECONDS] [MODEL ...]

Steps and operations take turns, so that both see the machine in the same mood; a figure is the ratio of the two
within a round, and of the rounds their median. Profiles, graphs and results.json go to $OUT (default: out/ops).
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

MODELS = {
    "bert-base-uncased": {"cpu": (1, 128), "cuda": (32, 512)},
    "gpt2": {"cpu": (1, 128), "cuda": (8, 1024)},
    "distilbert-base-uncased": {"cpu": (1, 64), "cuda": (32, 512)},
    "resnet-18": {"cpu": (2, 224), "cuda": (64, 224)},
    "t5-small": {"cpu": (1, 64), "cuda": (16, 512)},
}
"""Batch size and sequence length (pixels) of each."""
_STEPS = {"cpu": 4, "cuda": 20}
_WARM_UP = 2


def main() -> None:
    """Measures every model and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure_ops")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=45.0, help="seconds for a model's operations, a round")
    parser.add_argument("--repeats", type=int, default=100)
    given = parser.parse_args()
    out = Path(os.environ.get("OUT", "out/ops"))
    out.mkdir(parents=True, exist_ok=True)
    results = []
    print(f"{'model':<26}{'step ms':>9}{'sum/step':>10}{'sim/step':>10}  rounds", flush=True)
    for name in given.models:
        results.append(compare(name, given, out))
        (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        _print(results[-1])
    for figure in ("sum_over_step", "simulated_over_step"):
        errors = [abs(r[figure] - 1) for r in results]
        print(f"{figure}: median of {len(errors)} models {median(errors):.1%} off, worst {max(errors):.1%}")


def compare(name: str, given: argparse.Namespace, out: Path) -> dict[str, Any]:
    """One model: rounds of steps, operations, steps."""
    import torch

    from echograph.frontend.pytorch.step import real_step
    from echograph.ir import serde
    from echograph.profiler.measure.device import keep_freed_memory
    from echograph.profiler.measure.sampling import time_steps
    from echograph.workflow.compile import build_model
    from echograph.workflow.measure import MeasuringOptions, capture_invocations

    clock = "cpu" if given.device == "cpu" and torch.get_num_threads() == 1 else "wall"
    device, spec = MeasuringOptions(device=given.device, clock=clock).open()
    if given.device == "cpu":
        keep_freed_memory()
    batch, length = MODELS[name][given.device]
    sizes = {"batch_size": batch, "seq_len": length}
    captured = capture_invocations(name, spec, device.cache_bytes, lambda _: None, **sizes)
    with torch.device(given.device):
        _, built = build_model(name, spec, **sizes)
    step = real_step(*built, spec, given.device)
    serde.save(captured.graph, out / f"{name}.graph.pb")
    time_steps(step, device, 1, _WARM_UP)
    rounds = [_round(captured, step, device, given, out / f"{name}.profile.pb") for _ in range(given.rounds)]
    return {
        "model": name,
        "batch_size": batch,
        "length": length,
        "clock": clock,
        "environment": asdict(device.environment()),
        "step_s": median(r["step_s"] for r in rounds),
        "sum_over_step": median(r["sum_s"] / r["step_s"] for r in rounds),
        "simulated_over_step": median(r["simulated_s"] / r["step_s"] for r in rounds),
        "rounds": rounds,
    }


def _round(captured: Any, step: Any, device: Any, given: argparse.Namespace, path: Path) -> dict[str, Any]:
    from echograph.ir.passes.annotate import join
    from echograph.ir.profile import Profile, save_profile
    from echograph.profiler.measure.ops import Options, measure
    from echograph.profiler.measure.sampling import time_steps
    from echograph.units import to_s
    from echograph.workflow.measure import with_host
    from echograph.workflow.plan import Plan
    from echograph.workflow.predict import predict

    options = Options(repeats=given.repeats, budget_s=given.budget)
    steps = [time_steps(step, device, _STEPS[device.name], 0)]
    outcome = measure(captured.invocations, device, Profile(environment=with_host(device)), options)
    steps.append(time_steps(step, device, _STEPS[device.name], 0))
    seconds = [second for taken in steps for second in taken.seconds]
    save_profile(outcome.profile, path)
    _, coverage = join(captured.graph, outcome.profile)
    if coverage.missing:
        raise SystemExit(f"{coverage.missing} operations are not measured: give more --budget; {outcome.refused}")
    result, _ = predict(captured.graph, Plan(cluster=str(path)), memory=False)
    return {
        "step_s": median(seconds),
        "seconds": seconds,
        "sum_s": to_s(coverage.busy_ps),
        "simulated_s": to_s(result.step_ps),
        "host_op_s": to_s(outcome.profile.environment.host_op_picoseconds),
        "host_view_s": to_s(outcome.profile.environment.host_view_picoseconds),
        "operations": {"measured": coverage.measured, "free": coverage.free, "missing": coverage.missing},
        "unmatched": len(coverage.unmatched),
        "refused": outcome.refused,
        "left": len(outcome.left),
    }


def _print(result: dict[str, Any]) -> None:
    each = " ".join(f"{r['sum_s'] / r['step_s']:.3f}" for r in result["rounds"])
    last = result["rounds"][-1]
    print(
        f"{result['model']:<26}{result['step_s'] * 1e3:9.1f}{result['sum_over_step']:10.3f}"
        f"{result['simulated_over_step']:10.3f}  {each}; {last['operations']}, unmatched {last['unmatched']}, "
        f"refused {len(last['refused'])}, left {last['left']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
