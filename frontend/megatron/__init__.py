"""Scripts that train with megatron-core: what they need besides a GPU, and where in a step they are.

`shims` stands in for what megatron-core takes from a GPU, Transformer Engine or Apex; `hooks` has its functions
that tell phases, micro-batches, chunks and buckets; both are tables of `patches`. `adapter` puts them in and knows
the mesh from `parallel_state`. `__main__` runs a script for GPUs on the CPUs of this machine.
"""

from __future__ import annotations
