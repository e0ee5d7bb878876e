"""How much slower hosts of public traces are than this processor, beside what their ratings say.

python -m benchmarks.host_traces FOLDER

FOLDER has traces of HolisticTraceAnalysis and TraceLens (`v100-float-timestamps`, `mi300x-resnet`). Of operators
that launch nothing and allocate nothing, the span in a trace over the span here, under the same profiler; the
median over operators against the ratio of `single_thread` in `processors.toml`. Nothing there is fitted to these
spans, so that each platform is one that was left out. Their PyTorch is another one, and their caches a training's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from echograph.profiler.costs.host import load_processor

HERE = "epyc-9655"
PLATFORMS = {"v100-float-timestamps": "xeon-6154", "mi300x-resnet": "epyc-9654"}
"""Folder and processor; other traces count whole microseconds, or were taken with slower tracers."""
OPERATORS = (
    "aten::view", "aten::as_strided", "aten::detach", "detach", "aten::slice", "aten::narrow",
    "torch::autograd::AccumulateGrad", "AddBackward0", "autograd::engine::evaluate_function: AddBackward0",
)  # fmt: skip


def main() -> None:
    """Prints a line for each operator and platform."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_traces")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    here = _here()
    for name, processor in PLATFORMS.items():
        (path,) = (folder / name).glob("*.json.gz")
        there = _spans(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
        slower = {one: there[one] / here[one] for one in OPERATORS if one in there and one in here}
        rated = load_processor(HERE).single_thread / load_processor(processor).single_thread
        low, _, high = quantiles(slower.values(), n=4)
        print(f"{name}: {processor}, rated {rated:.2f} times as slow")
        for one, factor in slower.items():
            print(f"  {one:<55}{here[one]:>7.2f} us here{there[one]:>7.2f} us there{factor:>7.2f}")
        middle = median(slower.values())
        print(
            f"  median {middle:.2f} (quartiles {low:.2f} to {high:.2f}): the rating is {rated / middle - 1:+.0%}"
        )


def _spans(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Median microseconds of each operator."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "Operator"):
            found[event["name"]].append(float(event["dur"]))
    return {name: median(spans) for name, spans in found.items()}


class _Residual(nn.Module):
    """A block of the network that was traced, with images of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.first(x)))
        y += x
        return y


def _here() -> dict[str, float]:
    """The same on this machine: of twelve turns, the least median."""
    torch.set_num_threads(1)
    model, image = nn.Sequential(*(_Residual() for _ in range(32))), torch.randn(1, 4, 2, 2)
    turns: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(12):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                model(image).sum().backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.detach().narrow(0, 0, 1).view(-1)
            path = Path(folder) / f"{turn}.json"
            profiler.export_chrome_trace(str(path))
            for name, span in _spans(json.loads(path.read_text())["traceEvents"]).items():
                turns[name].append(span)
    return {name: min(spans) for name, spans in turns.items()}


if __name__ == "__main__":
    main()
