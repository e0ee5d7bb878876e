"""Packages that need a GPU, as frameworks look for them and as their functions are called."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from echograph.errors import CaptureError
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


BESIDE = """import torch
import dropout_layer_norm, rotary_emb, xentropy_cuda_lib
from xformers.ops import SwiGLU
made = SwiGLU(8, 16, bias=False, _pack_weights=False).cuda()
packed = SwiGLU(8, 16, bias=False).cuda()
assert [tuple(p.shape) for p in made.parameters()] == [(16, 8), (16, 8), (8, 16)]
assert [tuple(p.shape) for p in packed.parameters()] == [(32, 8), (8, 16)]
optimizer = torch.optim.SGD([*made.parameters(), *packed.parameters()], lr=0.1)
weight = torch.ones(8, device="cuda")
for step in range(3):
    x = packed(made(torch.ones(4, 8, device="cuda")))
    settings = (None, None, None, None, 0.0, 1e-5, 1.0, 0, None, False, True)
    y, kept, dropped, mean, root = dropout_layer_norm.dropout_add_ln_fwd(x.detach(), None, weight, None, *settings)
    assert y.shape == kept.shape == x.shape and root.shape[0] == 4 and dropped is None
    back = (weight, None, None, None, None, 0.0, 1.0, 0, False, True)
    grads = dropout_layer_norm.dropout_add_ln_bwd(y, None, kept, None, None, mean, root, *back)
    assert grads[0].shape == x.shape and grads[2].shape == (8,) and len(grads) == 6
    first, second = x.detach().chunk(2, -1)
    rotary_emb.apply_rotary(first, second, None, None, first, second, False)
    turned = (x * 1.0).chunk(2, -1)  # views of one tensor, which autograd lets nobody write
    rotary_emb.apply_rotary(*turned, None, None, *turned, False)
    assert turned[0].transpose(0, 1).shape == (4, 4)
    losses, lse = xentropy_cuda_lib.forward(y, torch.zeros(4).long(), 0.0)
    assert losses.shape == lse.shape == (4,) and losses.dtype == torch.float32
    assert xentropy_cuda_lib.backward(losses, y, lse, None, 0.0, True, 8) is y
    x.sum().backward()
    optimizer.step()
"""


def test_kernels_beside_flash_attention(tmp_path: Path) -> None:
    """As TinyLlama's norms, rotary embedding, loss and feed-forward layers call them."""
    notes = ran(tmp_path, BESIDE).recorder.notes
    assert {note.partition(" ")[0] for note in notes} >= {"dropout_layer_norm", "rotary_emb", "xentropy_cuda_lib"}


def test_a_norm_that_adds_a_residual_is_refused(tmp_path: Path) -> None:
    given = "x, x, w, None, None, None, None, None, 0.0, 1e-5, 1.0, 0, None, False, True"
    made = "import torch, dropout_layer_norm as n\nx, w = torch.ones(4, 8), torch.ones(8)\n"
    text = f"{made}n.dropout_add_ln_fwd({given})"
    with pytest.raises(CaptureError, match="a residual, dropout, scales or subsets"):
        ran(tmp_path, text)


def test_torchaudio_goes_on_without_what_is_compiled_for_another_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchaudio" / "_extension"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("from torchaudio._extension import compiled\n")
    (package / "__init__.py").write_text(
        "from torchaudio._extension.utils import _load_lib\ncompiled = _load_lib('a')"
    )
    (package / "utils.py").write_text(
        f"import torch\n_load_lib = lambda _: torch.ops.load_library({str(tmp_path)!r})"
    )
    for name in ("torchaudio", "torchaudio._extension", "torchaudio._extension.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    text = """import sys, torch
import torchaudio
assert torchaudio.compiled is False
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    run = ran(tmp_path, text)
    assert run.recorder.recorded
    assert any("torchaudio's compiled operators" in note for note in run.recorder.notes)


def test_queries_and_keys_are_turned_where_they_lie(tmp_path: Path) -> None:
    """Of packed ones two of three are read and written, each way; of keys and values the first."""
    text = """import torch
from flash_attn.layers.rotary import apply_rotary_emb_kv_, apply_rotary_emb_qkv_
model = torch.nn.Linear(8, 3 * 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cos = sin = torch.ones(4, 2, device="cuda")
for step in range(3):
    packed = model(torch.ones(2, 4, 8, device="cuda"))
    turned = apply_rotary_emb_qkv_(packed.view(2, 4, 3, 2, 4), cos, sin)
    several = apply_rotary_emb_qkv_((packed * 2).view(2, 4, 6, 4), cos, sin, num_heads_q=2)
    keys = apply_rotary_emb_kv_((packed * 3)[..., :16].view(2, 4, 2, 2, 4), cos, sin)
    (turned.sum() + several.sum() + keys.sum()).backward()
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(text)
    graph = run_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter()).recorder.graph
    shapes = [tuple(n.meta["val"].shape) for n in graph.nodes if str(n.target) == "aten.mul_.Tensor"]
    assert sorted(shapes) == sorted([(2, 4, 2, 2, 4), (2, 4, 4, 4), (2, 4, 1, 2, 4)] * 2)
