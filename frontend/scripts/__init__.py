"""Runs a user's own training script as one rank under fake process groups, and lowers what it does to a job.

    world       `World`: rank, size; process groups of any backend become fake ones
    adapter     `Adapter`: what a framework needs; `ADAPTERS` names them, one line each
    recorder    `ScriptRecorder`: operators and collectives of one training step, as an annotated graph
    run         runs the script, ends it after the recorded step, says in one line what went wrong
    lower       the graphs of the distinct ranks -> `JobGraph`
    capture     all of it: script -> job

Nothing of the script is edited, and no GPU, no memory and no other rank is needed: tensors are fake (a shape and
no data), "cuda" is where the captured operators stand for a GPU's, and collectives communicate with nobody.
"""

from __future__ import annotations

from echograph.registry import Table

ADAPTERS = Table(
    "framework",
    {
        "torch": "echograph.frontend.scripts.torch_adapter:TorchAdapter",
        "deepspeed": "echograph.frontend.deepspeed.adapter:DeepSpeedAdapter",
        "megatron": "echograph.frontend.megatron.adapter:MegatronAdapter",
    },
)
"""Frameworks whose scripts are captured: name -> class of `adapter.Adapter`."""
