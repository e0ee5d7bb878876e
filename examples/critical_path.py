"""What a step waits for, and what would change it: the critical path, an analysis, a slow GPU, faster kernels.

python examples/critical_path.py [GRAPH] [GPUS]
"""

import sys
from collections import Counter

import echograph as eg

path, gpus = (*sys.argv[1:3], *("graph.pb", "64")[len(sys.argv) - 1 :])[:2]

# %% A stored step, on a system.
system = eg.System("dgx-h100")
job = eg.lower(eg.load(path), eg.Plan(gpus=int(gpus)), system)
result = eg.simulate(job, system)
timeline = result.timeline

# %% The chain of work that ends last, by operation.
time_ps: Counter[str] = Counter()
for row in timeline.critical_path().tolist():
    time_ps[job.strings[job.ops.name[timeline.op[row]]]] += int(timeline.duration[row])
print(f"{result.model} on {gpus} GPUs: {result.step_s * 1e3:.2f} ms; on the critical path:")
for name, total in time_ps.most_common(8):
    print(f"  {total / 1e9:8.3f} ms {total / result.step_ps:6.1%}  {name}")

# %% The analyses of profiler traces read a prediction, too.
for record in eg.analyze(result, "overlap").records():
    print(record)

# %% What if?
for words, scenario in {
    "GPU 5 takes 30 % longer": eg.Scenario(straggler=("5=1.3",)),
    "every kernel varies by 2 %": eg.Scenario(jitter=0.02),
    "half the time in collectives": eg.Scenario(scale=("comm=0.5",)),
}.items():
    print(f"{words}: {eg.simulate(job, system, scenario).step_s / result.step_s - 1:+.1%}")
