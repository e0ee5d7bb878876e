"""Scripts that train with megatron-core: what they need besides a GPU, and where in a step they are.

    shims      stand-ins for what megatron-core takes from a GPU, Transformer Engine or Apex
    seams      the functions of megatron-core that tell phases, micro-batches, chunks and buckets
    adapter    both, with the mesh and the roles that megatron-core's `parallel_state` knows
    __main__   runs a script for GPUs on the CPUs of this machine, on real ranks
"""

from __future__ import annotations
