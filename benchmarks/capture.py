"""The dispatch recorder beside export and AOTAutograd, PyTorch's own way to the same graph, in the same run.

python -m benchmarks.capture
"""

from __future__ import annotations

import time

from echograph.frontend.pytorch.spec import StepSpec
from echograph.workflow.compile import compile as compile_model

MODELS = ("bert-base-uncased", "gpt2", "llama-3.2-1b")


def main() -> None:
    """Prints seconds of both producers, without imports, and their ratio."""
    _compile("distilbert-base-uncased", "recorder")  # imports
    print(f"{'model':<24} {'recorder s':>10} {'aot s':>8} {'ratio':>6}")
    for model in MODELS:
        recorder, aot = (_compile(model, producer) for producer in ("recorder", "aot"))
        print(f"{model:<24} {recorder:10.2f} {aot:8.2f} {aot / recorder:6.1f}", flush=True)


def _compile(model: str, producer: str) -> float:
    began = time.perf_counter()
    compile_model(model, StepSpec(), batch_size=1, producer=producer)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
