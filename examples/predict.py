"""A model on growing clusters: how long a step takes, how sure that is, and how much communication shows.

python examples/predict.py [MODEL] [CLUSTER]
"""

import sys

import echograph as eg

model, cluster = (*sys.argv[1:3], *("distilbert-base-uncased", "dgx-h100")[len(sys.argv) - 1 :])[:2]

# %% Capture one training step: no GPU, no weights.
step = eg.compile(model, eg.StepSpec(dtype="bf16", optimizer="adamw"), batch_size=16)
print(f"{model}: {len(step.ops)} operations stored, {step.unfolded_ops} run")

# %% Where it runs is read once; how it is spread is a plan.
system = eg.System(cluster)
for gpus in (1, 8, 64, 512):
    result = eg.simulate(eg.lower(step, eg.Plan(gpus=gpus), system), system)
    step_ms, low, high = (1e3 * seconds for seconds in (result.step_s, *result.interval_s))
    exposed = sum(result.breakdown.exposed_communication.values()) / result.step_ps
    print(
        f"{gpus:5} GPUs  {result.step_s * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f}), {exposed:.1%} exposed"
    )
