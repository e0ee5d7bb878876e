"""One step under several plans, side by side: time, memory, where the time goes; and the job for other simulators.

python examples/plans.py [GRAPH]
"""

import sys
from pathlib import Path

import echograph as eg

# %% A graph of `echoc compile`, or of eg.save.
step = eg.load(sys.argv[1] if len(sys.argv) > 1 else "graph.pb")
assert isinstance(step, eg.StepGraph)
system = eg.System("dgx-h100")

# %% Plans are the words of the command line.
plans = {
    "DDP": eg.Plan(gpus=32),
    "FSDP": eg.Plan(gpus=32, zero=3),
    "tensor parallel": eg.Plan(gpus=32, tp=4, sequence_parallel=True, zero=1),
    "pipeline": eg.Plan(gpus=32, pp=4, global_batch=1024),
}
for name, plan in plans.items():
    job = eg.lower(step, plan, system)
    result = eg.simulate(job, system, plan=plan)
    samples, memory = result.samples / result.step_s, result.memory
    assert memory is not None
    needed = memory.device_bytes / 2**30
    print(f"{name:16} {result.step_s * 1e3:8.2f} ms  {samples:10,.0f} samples/s  {needed:5.1f} GiB")

# %% What every rank runs, for ASTRA-sim.
done = eg.export(job, "chakra", Path("traces"), cluster="dgx-h100", per_role=True)
print(f"{done.files} files; {done.notes[0]}")
