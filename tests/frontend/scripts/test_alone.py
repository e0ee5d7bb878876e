"""Scripts on one GPU run as `python` starts them: what a launcher would say is said where it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from script_ranks import SMALL_TRAINING

from echograph.errors import CaptureError
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.formats import Imported

_TRAIN = "import os, pickle, sys\nimport torch\n{first}\n" + SMALL_TRAINING


def capture(folder: Path, first: str, size: int = 1) -> Imported:
    path = folder / "train.py"
    path.write_text(_TRAIN.format(first=first))
    return capture_script(Script(path=path), World(size=size), TorchAdapter())


def test_no_launcher_is_told_of(tmp_path: Path) -> None:
    made = capture(tmp_path, "assert not {'RANK', 'WORLD_SIZE', 'LOCAL_RANK'} & os.environ.keys()")
    assert not any("launcher" in note for note in made.notes)
    with pytest.raises(CaptureError, match="AssertionError"):
        capture(tmp_path, "assert 'RANK' not in os.environ", size=2)


@pytest.mark.parametrize(
    "first",
    [
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        "torch.distributed.init_process_group('nccl')\nassert os.environ['WORLD_SIZE'] == '1'",
    ],
)
def test_who_asks_a_launcher_has_one(tmp_path: Path, first: str) -> None:
    made = capture(tmp_path, first)
    assert "train.py asks for what a launcher sets: it runs as the one rank of torchrun" in made.notes


def test_what_a_script_caught_is_why_it_left(tmp_path: Path) -> None:
    left = "try:\n    raise ValueError('no such task')\nexcept ValueError:\n    sys.exit(3)"
    with pytest.raises(CaptureError, match=r"train.py:4: ValueError: no such task") as caught:
        capture(tmp_path, left)
    assert caught.value.exit_code == 3


def test_what_a_log_kept_is_why_it_ended(tmp_path: Path) -> None:
    (tmp_path / "loguru.py").write_text("""
class Logger:
    def catch(self, exception=Exception, *, onerror=None):
        def around(function):
            def run():
                try:
                    function()
                except Exception as error:
                    onerror and onerror(error)
            return run
        return around
logger = Logger()
""")
    logged = (
        "from loguru import logger\n@logger.catch()\ndef main():\n    raise ValueError('no such task')\nmain()\n"
    )
    with pytest.raises(CaptureError, match=r"train.py:6: ValueError: no such task"):
        capture(tmp_path, logged + "sys.exit()")


def test_the_driver_s_command_knows_the_gpus(tmp_path: Path) -> None:
    asked = """query = 'nvidia-smi --query-gpu=memory.total,memory.used --format=csv,nounits,noheader'
total, used = os.popen(query).read().strip().split(",")
assert (int(total), int(used)) == (81920, 0)
assert os.system('nvidia-smi --query-gpu=power.draw 2> /dev/null') != 0
"""
    made = capture(tmp_path, asked)
    assert any(note.startswith("nvidia-smi answers") for note in made.notes)


def test_tensors_are_pickled(tmp_path: Path) -> None:
    kept = """given = torch.ones(4, 2, device="cuda"), torch.nn.Parameter(torch.zeros(3))
again = pickle.loads(pickle.dumps(given))
assert [tuple(t.shape) for t in again] == [(4, 2), (3,)] and again[0].is_cuda and again[1].requires_grad
assert again[0] is not given[0]
"""
    capture(tmp_path, kept)


@pytest.mark.parametrize(
    "default", ["torch.set_default_device('cuda')", "torch.set_default_tensor_type('torch.cuda.FloatTensor')"]
)
def test_tensors_are_on_the_default_device(tmp_path: Path, default: str) -> None:
    # Each is asked twice: the first tensor is made before PyTorch looks for a GPU.
    asked = f"""torch.set_default_device("cpu")
{default}
for _ in range(2):
    assert torch.tensor([1.0]).is_cuda and torch.zeros(3).is_cuda
assert torch.get_default_device().type == "cuda" and torch.nn.Linear(2, 2).weight.is_cuda
assert not torch.zeros(3, device="cpu").is_cuda
"""
    capture(tmp_path, asked)
    assert getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is None and not torch.zeros(3).is_cuda


def test_a_package_whose_import_failed_is_forgotten(tmp_path: Path) -> None:
    inner = tmp_path / "whole" / "part" / "folder"
    inner.mkdir(parents=True)
    (tmp_path / "whole" / "__init__.py").write_text("import whole.part")
    (tmp_path / "whole" / "part" / "__init__.py").write_text(
        "import whole.part.folder\nraise ImportError('of another kind')"
    )
    with pytest.raises(CaptureError, match="ImportError: of another kind"):
        capture(tmp_path, "import whole")


def test_the_largest_of_numbers_that_nobody_has_is_such_a_number(tmp_path: Path) -> None:
    asked = """from collections import deque
losses = deque(torch.randn(2, device="cuda")[i].item() for i in range(2))
assert type(losses[0]) is not float
top, low, best = max(losses), min(7.5, *losses), max(3.0, losses[0])
assert type(top) is type(low) is type(best) is type(losses[0])
of = torch.randn(2, 3, device="cuda")[0, 1]
assert max(32, of) is max(of, 32) is min(of, 32) is min(32, of, 1) is of
assert max(0, torch.tensor(-3)) == 0 and max(torch.tensor(5), 4) == 5
import json
if losses[0] != losses[0] or losses[1] == float("inf") or json.loads(json.dumps(top)) != 1:
    sys.exit(5)
"""
    capture(tmp_path, asked)
    with pytest.raises(CaptureError, match=r"train.py:14: a comparison with a tensor's value"):
        capture(tmp_path, asked + "if best > 2:\n    pass")


def test_truth_values_are_viewed_as_before(tmp_path: Path) -> None:
    asked = """ranks = torch.ones(4, 5, device="cuda").topk(5)[1].t()
right = ranks.eq(torch.zeros(1, 4, dtype=torch.int64, device="cuda").expand_as(ranks))
assert right[:3].view(-1).float().sum(0).shape == ()
"""
    made = capture(tmp_path, asked)
    assert any(note.startswith("train.py:5 views truth values that do not lie so") for note in made.notes)


def test_who_imports_by_name_is_not_the_cause(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import no_such_package\nno_such_package.run()\n")
    by_name = """import importlib
try:
    importlib.import_module("task")
except ImportError as error:
    raise RuntimeError("cannot load 'task'") from error
"""
    with pytest.raises(CaptureError, match=r"task.py:2: ModuleNotFoundError.*install no_such_package"):
        capture(tmp_path, by_name)


def test_attention_with_a_bias_of_xformers_is_pytorchs(tmp_path: Path) -> None:
    asked = """from xformers.ops import memory_efficient_attention
q = torch.nn.Parameter(torch.ones(2, 6, 4, 16, device="cuda"))
made = memory_efficient_attention(q, q, q, attn_bias=torch.zeros(2, 4, 6, 6, device="cuda"), p=0.0, scale=0.25)
assert made.shape == q.shape
made.sum().backward()
"""
    made = capture(tmp_path, asked)
    assert any(note.startswith("xformers is not installed") for note in made.notes)


def test_checks_of_metrics_and_kernels_of_losses_are_left_to_pytorch(tmp_path: Path) -> None:
    for name in ("torchmetrics", "trl", "trl/kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torchmetrics" / "metric.py").write_text("class Metric: pass\n")
    (tmp_path / "trl" / "kernels" / "chunked_logprob.py").write_text("def _use_triton(device): return True\n")
    asked = """from torchmetrics.metric import Metric
from trl.kernels.chunked_logprob import _use_triton
metric = Metric()
metric.validate_args = True
assert not metric.validate_args and not _use_triton(torch.device("cuda"))
"""
    told = " ".join(capture(tmp_path, asked).notes)
    assert "torchmetrics does not hold values" in told and "TRL's losses are kernels in Triton" in told


_KEYED = """import torch
class Mean(torch.nn.Module):
    def forward(self, x):
        self.total = x.sum()
        return self.total
    def __hash__(self):
        return hash(("Mean", id(getattr(self, "total", None))))
model, mean, kept = torch.nn.Linear(16, 8).cuda(), Mean(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(32, 16, device="cuda")).sum()
    kept.append(mean(loss.detach()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_module_may_be_another_key_by_and_by(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_KEYED)
    capture_script(Script(path=path), World(), TorchAdapter())


def test_what_is_not_known_of_a_stand_in_is_not_there_for_who_has_another_way(tmp_path: Path) -> None:
    asked = """try:
    from flash_attn.ops.fused_dense import fused_mlp_func
except ImportError:
    fused_mlp_func = None
from flash_attn.ops.fused_dense import FusedMLP
assert fused_mlp_func is None and FusedMLP is not None
"""
    capture(tmp_path, asked)


def test_the_first_flash_attention_is_a_module(tmp_path: Path) -> None:
    asked = """from flash_attn.flash_attention import FlashAttention
qkv = torch.ones(2, 16, 3, 4, 32, device="cuda", dtype=torch.float16)
made, none = FlashAttention(attention_dropout=0.0)(qkv, causal=True)
assert made.shape == (2, 16, 4, 32) and none is None
"""
    capture(tmp_path, asked)
    with pytest.raises(CaptureError, match="of padded sequences"):
        capture(tmp_path, asked + "FlashAttention()(qkv, torch.ones(2, 16, device='cuda').bool())")


def test_a_real_number_that_nobody_has_is_not_zero(tmp_path: Path) -> None:
    """As a model asks whether its table of angles was filled; a table that the host knows is looked at.

    What ends the script there is called by another name, or the text would say which way it goes.
    """
    asked = """otherwise = lambda code: sys.exit(code)
table = torch.outer(torch.arange(32768.0), torch.ones(64)).cos().cuda()
if table[0, 0] == 0 or not table[0, 0] != 0 or table.sum().item() == 0:
    otherwise(5)
if not torch.zeros(2, 2)[0, 0] == 0:
    otherwise(6)
"""
    told = capture(tmp_path, asked).notes
    assert any("train.py:5 asks whether a number is 0" in note for note in told)
    with pytest.raises(CaptureError, match=r"train.py:9: whether a tensor is true"):
        capture(tmp_path, asked + "if table[0, 0] == 1:\n    pass")
