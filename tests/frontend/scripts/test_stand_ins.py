"""Packages that need a GPU, as frameworks look for them and as their functions are called."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

LLAMA = """import importlib.metadata
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available
assert is_flash_attn_2_available() and importlib.metadata.version("flash-attn") == "2.8.3"
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                     num_attention_heads=4, num_key_value_heads=2)
config._attn_implementation = "flash_attention_2"
model = LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    tokens = torch.ones(2, 16, dtype=torch.long, device="cuda")
    mask = {mask}
    model(input_ids=tokens, labels=tokens, attention_mask=mask).loss.backward()
    optimizer.step()
"""


def ran(folder: Path, text: str) -> ScriptRun:
    path = folder / "train.py"
    path.write_text(text)
    return run_script(Script(path=path), World(), TorchAdapter())


def attention(run: ScriptRun) -> Counter[tuple[int, ...]]:
    """(batch, heads, queries) of each attention of the forward pass."""
    nodes = (node for node in run.recorder.graph.nodes if "flash_attention" in str(node.target))
    return Counter(
        tuple(node.args[0].meta["val"].shape[:3]) for node in nodes if "backward" not in str(node.target)
    )


@pytest.mark.parametrize(
    ("mask", "kernels"),
    [
        ("None", {(2, 4, 16): 3}),
        ("torch.ones_like(tokens)", {(2, 4, 16): 3}),
        # Padding is taken out: sequences of 16 and 9 in each of three layers.
        ("(torch.arange(16) < torch.tensor([[16], [9]])).long().cuda()", {(1, 4, 16): 3, (1, 4, 9): 3}),
    ],
)
def test_flash_attention_where_transformers_looks_for_it(
    tmp_path: Path, mask: str, kernels: dict[tuple[int, ...], int]
) -> None:
    pytest.importorskip("transformers")
    from transformers.utils import is_flash_attn_2_available

    assert not is_flash_attn_2_available()  # which it remembers
    run = ran(tmp_path, LLAMA.format(mask=mask))
    assert not is_flash_attn_2_available()
    assert attention(run) == kernels
    assert not any("sdpa" in note for note in run.recorder.notes)


def test_a_mask_that_nobody_knows_keeps_all_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = ran(tmp_path, LLAMA.format(mask="(torch.rand(2, 16, device='cuda') > 0.5).long()"))
    assert attention(run) == {(2, 4, 16): 3}
    assert any("masking_utils.py" in note and "1 stands for it" in note for note in run.recorder.notes)


XFORMERS = """import torch
from xformers.ops import memory_efficient_attention
model = torch.nn.Linear(64, 64).cuda().half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = model(torch.ones(6, 16, 64, device="cuda", dtype=torch.half))
    memory_efficient_attention(x, x, x).sum().backward()
    optimizer.step()
"""


def test_xformers_takes_sequences_without_heads(tmp_path: Path) -> None:
    """(batch x heads, sequence, head), as diffusers has them: six sequences of 16, not of 64."""
    assert attention(ran(tmp_path, XFORMERS)) == {(6, 1, 16): 1}
