"""Compiles a model in Python and predicts its step on growing clusters.

python examples/predict.py [MODEL] [CLUSTER]
"""

from __future__ import annotations

import sys

from echograph.frontend.pytorch.spec import StepSpec
from echograph.units import format_time
from echograph.workflow.compile import compile as compile_model
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict


def main(model: str = "distilbert-base-uncased", cluster: str = "dgx-h100") -> None:
    """Prints a line for each number of GPUs."""
    spec = StepSpec(dtype="bf16", optimizer="adamw")
    graph = compile_model(model, spec, batch_size=16)
    print(f"{model}: {len(graph.ops)} operations stored, {graph.unfolded_ops} run")
    for gpus in (1, 8, 64, 512):
        result, _ = predict(graph, Plan(cluster=cluster, gpus=gpus))
        low, high = (format_time(t) for t in result.interval_ps)
        exposed = sum(result.breakdown.exposed_communication.values()) / result.step_ps
        print(
            f"{gpus:5} GPUs  {format_time(result.step_ps)} ({low} to {high}), {exposed:.1%} exposed communication"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
