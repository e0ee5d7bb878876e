"""Whether a step could have fitted into memory without recomputation: less than this it surely takes."""

from __future__ import annotations

from echograph.models.catalog import GATED_MLP
from echograph.workflow.plan import Plan
from echograph.workflow.validation.model import RowModel

_COUNTED = ("LlamaForCausalLM", "NemotronForCausalLM", "GPT2LMHeadModel")
"""Architectures that rows of sizes alone are taken for."""

_STATE_BYTES = {0: (2, 2, 12), 1: (2, 2, 12), 2: (2, 0, 14), 3: (0, 0, 16)}
"""Bytes of a parameter, its gradient, and of both and the optimizer where a stage of ZeRO divides them: in 16 bit,
with Adam and a master copy in fp32."""


def least_bytes(model: RowModel, plan: Plan, seq_len: int) -> tuple[int, int]:
    """Bytes of parameters and optimizer, and of what forward keeps without recomputation: the first stage's least.

    Of a layer: what attention, its products and the feed-forward network read again in backward, once, in 16 or
    8 bit; norms, dropout, logits and what kernels work with are left out. A stage of a pipeline keeps what as many
    micro-batches as stages need, so that its depth does not count. Zeros for architectures that are not counted.

    Args:
        model: with its sizes.
        plan: with GPUs and micro-batch.
        seq_len: tokens of a sample.
    """
    architecture = model.entry.architecture
    if architecture not in _COUNTED or plan.gpus is None or plan.ep > 1:
        return 0, 0
    matrices = 2 + GATED_MLP[architecture]
    hidden, ffn, heads, kv_heads = (model.size(name) for name in ("hidden", "ffn_hidden", "heads", "kv_heads"))
    wide = hidden + 2 * hidden * kv_heads // heads
    parameters = model.layers * (2 * hidden * hidden + wide * hidden - hidden * hidden + matrices * hidden * ffn)
    own, gradients, divided = _STATE_BYTES[plan.zero]
    shards = max(1, plan.gpus // plan.model_ranks // plan.hsdp_replicas) if plan.zero else 1
    state = parameters * (own + gradients + divided / shards) / (plan.tp * plan.pp)
    tokens = (plan.micro_batch or 1) * seq_len / (plan.cp * plan.tp)
    width = 2 if plan.precision in ("", "bf16", "fp16", "tf32") else 1
    kept = model.layers * tokens * (width * (2 * hidden + wide) + 2 * matrices * ffn)
    return int(state), int(kept)
