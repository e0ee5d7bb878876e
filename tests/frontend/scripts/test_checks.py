"""What a capture counted is held against the script: a warning names the line; if strict, it is the end."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from echograph.errors import CaptureError
from echograph.frontend.pytorch.annotate import OPTIMIZER, PHASE
from echograph.frontend.scripts import capture
from echograph.frontend.scripts.adapter import replaced
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.fakes import Fakes
from echograph.frontend.scripts.recorder import COMMUNICATION, ScriptRecorder
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.formats import Imported

DDP = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group()
model = torch.nn.Linear(8, 8).cuda()
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def warned(folder: Path, text: str, size: int = 4, *, strict: bool = False) -> tuple[str, ...]:
    path = folder / "train.py"
    path.write_text(text)
    return capture_script(Script(path=path, strict=strict), World(size=size), TorchAdapter()).warnings


def test_a_script_as_it_should_be_is_warned_of_nothing(tmp_path: Path) -> None:
    assert warned(tmp_path, DDP) == ()


def test_a_wrapper_that_divides_nothing(tmp_path: Path) -> None:
    text = DDP.replace("Parallel(model)", "Parallel(model, process_group=dist.new_group([dist.get_rank()]))")
    found = warned(tmp_path, text)
    assert len(found) == 2
    assert found[0].startswith("train.py:6: DistributedDataParallel has a group of one rank, of 4 in the world")
    assert found[1].startswith("train.py:10: all groups that communicate in this step have one rank")
    assert warned(tmp_path, text, size=1) == ()


def test_parameters_that_ddp_is_to_find_unused_get_no_gradient(tmp_path: Path) -> None:
    """It all-reduces its bucket, zeros among it, and which of four parameters were used, 32 bits each."""
    model = """torch.nn.Linear(8, 8).cuda()
model.spare = torch.nn.Linear(8, 4).cuda()
"""
    text = DDP.replace("torch.nn.Linear(8, 8).cuda()\n", model).replace("l(model)", "l(model, {})")
    path = tmp_path / "train.py"
    path.write_text(text.format("find_unused_parameters=True"))
    run = run_script(Script(path=path), World(size=4), TorchAdapter())
    calls = [n.meta[COMMUNICATION] for n in run.recorder.graph.nodes if COMMUNICATION in n.meta]
    assert [(call.op, call.nbytes, call.dtype) for call in calls] == [
        ("all_reduce", 4 * (8 * 8 + 8 + 8 * 4 + 4), torch.float32),
        ("all_reduce", 4 * 4, torch.int32),
    ]
    assert sorted(run.recorder.ungraded) == ["spare.bias", "spare.weight"]
    assert not any("fill_" in str(node.target) for node in run.recorder.graph.nodes)  # the host marks them
    path.write_text(text.format("static_graph=True"))
    assert len(run_script(Script(path=path), World(size=4), TorchAdapter()).recorder.ungraded) == 2
    path.write_text(text.format(""))
    with pytest.raises(CaptureError, match="Expected to have finished reduction in the prior iteration"):
        run_script(Script(path=path), World(size=4), TorchAdapter())


def test_an_average_of_the_model_is_not_trained(tmp_path: Path) -> None:
    """Its parameters may want gradients, as a copy's do; the model trains 8 x 8 + 8, its average none."""
    text = DDP.replace("optimizer =", "import copy; average = copy.deepcopy(model.module); optimizer =")
    text = text.replace("    optimizer.step()", "    optimizer.step()\n    average(torch.ones(4, 8).cuda())")
    path = tmp_path / "train.py"
    path.write_text(text)
    made = capture_script(Script(path=path), World(size=4), TorchAdapter()).graph
    assert made.workload.parameters == 8 * 8 + 8


def test_a_step_in_which_nobody_communicates(tmp_path: Path) -> None:
    text = DDP.replace("model = DistributedDataParallel(model)", "pass")
    (found,) = warned(tmp_path, text)
    assert found.startswith("train.py:10: no rank communicates in this step of 4 ranks")
    with pytest.raises(CaptureError, match=r"^train\.py:10: no rank communicates .*\(--strict\)$"):
        warned(tmp_path, text, strict=True)
    assert warned(tmp_path, text, size=1, strict=True) == ()


ASKING = """import torch
from transformers import BertConfig
from torchvision import datasets, transforms
BertConfig.from_pretrained("some-lab/small-bert")
images = datasets.MNIST("nowhere", download=True, transform=transforms.ToTensor())
model = torch.nn.Linear(784, 10).cuda()
model.load_state_dict(torch.hub.load_state_dict_from_url("https://somewhere/linear.pth"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader(images, batch_size=8):
    loss = torch.nn.functional.cross_entropy(model(x.cuda().flatten(1)), y.cuda())
    loss.backward()
    rate = 0.1 if loss > 1 else 0.2
    optimizer.step()
"""


def test_what_is_said_and_never_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    pytest.importorskip("datasets")
    path = tmp_path / "train.py"
    path.write_text(ASKING)
    small = {"architectures": ["BertForPreTraining"], "hidden_size": 32, "num_attention_heads": 2}

    def told(decided: dict[str, bool | int], *misspelt: str, strict: bool = False) -> tuple[str, ...]:
        data = dict.fromkeys(("MNIST", *misspelt))
        weights = dict.fromkeys(("some-lab/small-bert", *(f"some-lab/{name}" for name in misspelt)), small)
        made = Fakes(data=data, weights=weights, files=frozenset(("linear.pth", *(f"{n}.pth" for n in misspelt))))
        script = Script(path=path, strict=strict, fakes=made)
        return capture_script(script, World(size=1, decided=decided), TorchAdapter()).warnings

    assert told({"train.py:12": True}) == ()
    assert told({"train.py": True}) == ()
    found = told({"train.py:12": True, "train.py:11": True, "other.py": False}, "CIFAR10")
    assert [line.partition(": ")[0] for line in found] == [
        "--decide train.py:11", "--decide other.py", "--fake-data CIFAR10", "--fake-weights some-lab/CIFAR10",
        "--fake-weights CIFAR10.pth",
    ]  # fmt: skip
    assert "no value decided anything there" in found[0] and "never asked for it" in found[2]
    with pytest.raises(CaptureError, match=r"^--decide other\.py: no value decided .*\(--strict\)$"):
        told({"train.py:12": True, "other.py": False}, strict=True)


def test_a_parameter_that_no_backward_pass_reaches(tmp_path: Path) -> None:
    left = "model = torch.nn.Linear(8, 8).cuda(); model.left = torch.nn.Parameter(torch.ones(3).cuda())"
    text = DDP.replace("model = torch.nn.Linear(8, 8).cuda()", left)
    (found,) = warned(tmp_path, text.replace("model = DistributedDataParallel(model)", "pass"), size=1)
    assert found.startswith("train.py:10: the optimizer steps, and a parameter gets no gradient (left)")


LOADER = """import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.ones(64, 8), batch_size=8):
    model(x{part}).sum().backward()
    optimizer.step()
"""


def test_samples_that_are_not_those_of_the_loader(tmp_path: Path) -> None:
    assert warned(tmp_path, LOADER.format(part=""), size=1) == ()
    assert warned(tmp_path, LOADER.format(part="[:4]"), size=1) == ()
    (found,) = warned(tmp_path, LOADER.format(part="[:3]"), size=1)
    assert found.startswith(
        "train.py:5: the loader gives batches of 8, and of the model's first input 3 samples are read"
    )


RANKS = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
dist.init_process_group()
rank = dist.get_rank()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.layer({part})
model = DistributedDataParallel(Model().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.ones(64, 8, dtype=torch.{dtype}), batch_size=8):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


def given_whole(folder: Path, part: str) -> Imported:
    path = folder / "train.py"
    path.write_text(RANKS.format(part=part, dtype="uint8" if "255" in part else "float32"))
    return capture_script(Script(path=path), World(size=4), TorchAdapter())


@pytest.mark.parametrize(
    "part",
    [
        "x[2 * rank : 2 * rank + 2]", "x[rank::4]", "(x.float() / 255)[2 * rank : 2 * rank + 2]",
        "x.chunk(4)[rank]", "torch.stack((x[2 * rank], x[2 * rank + 1]))",
    ],
)  # fmt: skip
def test_a_model_that_takes_its_ranks_part_of_the_whole_batch(tmp_path: Path, part: str) -> None:
    found = given_whole(tmp_path, part)
    assert found.graph.workload.batch_size == 2
    assert found.warnings == ()
    assert (
        "train.py:15 gives the model 8 samples, of which the step of a rank reads 2: these are counted"
        in found.notes
    )


@pytest.mark.parametrize("part", ["x[:2] + x.mean()", "torch.cat(x.chunk(4))", "x[:4].repeat(2, 1) + x.flip(0)"])
def test_a_model_that_takes_parts_and_reads_all(tmp_path: Path, part: str) -> None:
    found = given_whole(tmp_path, part)
    assert found.graph.workload.batch_size == 8
    assert found.warnings == ()


def test_a_model_that_takes_what_is_no_ranks_part(tmp_path: Path) -> None:
    (told,) = given_whole(tmp_path, "x[1:4]").warnings
    assert told.startswith(
        "train.py:15: the loader gives batches of 8, and of the model's first input 3 samples are read"
    )


def test_a_last_batch_that_is_fetched_ahead_is_not_that_of_the_step(tmp_path: Path) -> None:
    text = """import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(DataLoader(torch.ones(19, 8), batch_size=8))
x = next(batches)
for _ in range(2):
    loss = model(x).sum()
    x = next(batches)
    loss.backward()
    optimizer.step()
"""
    assert warned(tmp_path, text, size=1) == ()


def test_what_acts_before_it_learns_counts_no_samples(tmp_path: Path) -> None:
    """Reinforcement learning collects with a few environments, and learns from a batch of what was kept."""
    text = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, *, state):
        return self.layer(state)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    with torch.no_grad():
        model(state=torch.ones(3, 8))
    target = model(state=torch.ones(64, 8))
    target.sum().backward()
    optimizer.step()
"""
    path = tmp_path / "train.py"
    path.write_text(text)
    assert capture_script(Script(path=path), World(), TorchAdapter()).graph.workload.batch_size == 64


def test_what_prepares_data_counts_no_samples(tmp_path: Path) -> None:
    """A module without parameters, as torchvision's transforms are, runs for each image of a data set."""
    text = """import torch
from torch.utils.data import DataLoader, Dataset
class Normalize(torch.nn.Module):
    def forward(self, x):
        return x - 1
class Images(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return Normalize()(torch.ones(3, 4))
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Images(), batch_size=8):
    model(x).sum().backward()
    optimizer.step()
"""
    path = tmp_path / "train.py"
    path.write_text(text)
    captured = capture_script(Script(path=path), World(), TorchAdapter())
    assert captured.warnings == ()
    assert captured.graph.workload.batch_size == 8


CONTAINER = """import torch
class Both(torch.optim.Optimizer):
    def __init__(self, parts):
        parts = list(parts)
        self.parts = [torch.optim.SGD([p], lr=0.1) for p in parts]
        super().__init__(parts, {})
    def step(self, closure=None):
        for part in self.parts:
            part.step()
model = torch.nn.Linear(8, 8)
optimizer = Both(model.parameters())
for step in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


def test_an_optimizer_of_optimizers_steps_once(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(CONTAINER)
    run = run_script(Script(path=path), World(), TorchAdapter())
    assert run.recorder.steps == 2
    updates = [n for n in run.recorder.graph.nodes if n.meta.get(PHASE) == OPTIMIZER]
    assert len(updates) == 2


def test_a_module_runs_as_python_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trainer_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("WIDTH = 8\n")
    text = DDP.replace("import torch\n", "import torch\nfrom .sizes import WIDTH\nassert __package__\n", 1)
    (package / "train.py").write_text(text.replace("(8, 8)", "(WIDTH, 8)"))
    monkeypatch.chdir(tmp_path)
    job = capture_script(Script.of_module("trainer_of_a_test.train"), World(size=4), TorchAdapter()).graph
    assert job.workload.parameters == 72


def test_stand_ins_are_there_for_a_run_alone(tmp_path: Path) -> None:
    text = """import torch, triton, triton.backends, triton.language as tl
from triton.runtime.autotuner import OutOfResources; assert "cpu" not in triton.backends.backends
from flash_attn import flash_attn_func
@triton.autotune(configs=[triton.Config({})], key=[])
@triton.jit
def mine(x, n: tl.constexpr):
    pass
model = torch.nn.Linear(64, 64).cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = model(torch.ones(2, 16, 64).cuda().bfloat16()).view(2, 16, 4, 16)
    flash_attn_func(x, x, x, causal=True).sum().backward()
    optimizer.step()
"""
    path = tmp_path / "train.py"
    path.write_text(text)
    run = run_script(Script(path=path), World(), TorchAdapter())
    assert any("scaled_dot_product_flash_attention" in str(node.target) for node in run.recorder.graph.nodes)
    assert any("flash_attn is not installed" in note for note in run.recorder.notes)
    path.write_text(text.replace("    optimizer.step()", "    mine[1](x, 3)"))
    with pytest.raises(CaptureError, match=r"train\.py:13: the kernel mine is written in Triton"):
        run_script(Script(path=path), World(), TorchAdapter())


SEVERAL = """import torch
from flash_attn import flash_attn_varlen_func
from flash_attn.layers.rotary import RotaryEmbedding
from xformers.ops import memory_efficient_attention, fmha, unbind, index_select_cat, scaled_index_add
import grouped_gemm.ops as grouped
try:
    from xformers.ops import cross_entropy
except ImportError:
    cross_entropy = None
assert cross_entropy is None

class Turned(RotaryEmbedding):
    def forward(self, qkv):
        return super().forward(qkv)

model = torch.nn.Linear(64, 64).cuda().bfloat16()
experts = torch.nn.Parameter(torch.ones(4, 64, 32, device="cuda", dtype=torch.bfloat16))
turned = Turned(16).cuda()
optimizer = torch.optim.SGD([*model.parameters(), experts], lr=0.1)
ends = torch.tensor([0, 8, 16, 28], dtype=torch.int32).cuda()
for step in range(3):
    x = model(torch.ones(32, 64, device="cuda", dtype=torch.bfloat16))
    q = x.view(32, 4, 16)
    one = flash_attn_varlen_func(q, q, q, ends, ends, 12, 12, causal=True)
    short, long = torch.ones(2, 5, 64, device="cuda"), torch.ones(1, 6, 64, device="cuda")
    mask, packed = fmha.BlockDiagonalMask.from_tensor_list([short.bfloat16(), long.bfloat16()])
    qkv = model(packed).view(1, 16, 1, 4, 16).expand(1, 16, 3, 4, 16)
    other = memory_efficient_attention(*unbind(turned(qkv), 2), attn_bias=mask)
    parts = mask.split(other.flatten(2))
    assert [tuple(part.shape) for part in parts] == [(2, 5, 64), (1, 6, 64)]
    kept = [torch.tensor([1]).cuda(), torch.tensor([0]).cuda()]
    rows = index_select_cat([part.flatten(1) for part in parts], kept)
    assert rows.shape == (5 * 64 + 6 * 64,)
    x = scaled_index_add(x, torch.tensor([3, 1]).cuda(), x[:2], scaling=model.weight[0], alpha=2.0)
    sent, back = grouped.permute(x, torch.zeros(32, 2, dtype=torch.int32, device="cuda"))
    made = grouped.gmm(sent, experts, torch.tensor([16, 16, 16, 16]), trans_b=False)
    out = grouped.unpermute(made, back, torch.ones(32, 2, device="cuda"))
    assert sent.shape == (64, 64) and out.shape == (32, 32)
    (one.sum() + rows.sum() + out.sum()).backward()
    optimizer.step()
"""


def test_attention_of_several_lengths_and_products_of_experts(tmp_path: Path) -> None:
    """Three sequences of 8, 8 and 12, and two of 5 with one of 6: a kernel for each run of equal ones."""
    path = tmp_path / "train.py"
    path.write_text(SEVERAL)
    recorder = run_script(Script(path=path), World(), TorchAdapter()).recorder
    kernels = [
        node.args[0].meta["val"].shape[:3]
        for node in recorder.graph.nodes
        if str(node.target).startswith("aten._scaled_dot_product_flash_attention.")
    ]
    assert [tuple(shape) for shape in kernels] == [(2, 4, 8), (1, 4, 12), (2, 4, 5), (1, 4, 6)]
    assert sum("grouped_mm" in str(node.target) for node in recorder.graph.nodes) == 3
    told = " ".join(recorder.notes)
    assert "xformers is not installed" in told and "grouped_gemm is not installed" in told
    unknown = SEVERAL.replace(
        "ends = torch.tensor([0, 8, 16, 28], dtype=torch.int32)", "ends = torch.empty(4, dtype=torch.int32)"
    )
    path.write_text(unknown)
    with pytest.raises(CaptureError, match="sequences whose lengths only values tell"):
        run_script(Script(path=path), World(), TorchAdapter())


def test_what_derives_from_a_name_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("from flash_attn.modules.mha import MHA\nclass Mine(MHA): pass\nMine()\n")
    with pytest.raises(CaptureError, match=r"train\.py:3: Mine derives from MHA"):
        run_script(Script(path=path), World(), TorchAdapter())


SHARED = """import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
many = torch.tensor([{of}]).cuda()
dist.all_reduce(many{op})
for step in range(3):
    {ask}
    model(torch.ones(4, 8).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("op", ["", ", op=dist.ReduceOp.MAX"])
def test_what_depends_on_the_rank_is_not_taken_to_be_alike(tmp_path: Path, op: str) -> None:
    path = tmp_path / "train.py"
    world = World(size=4)

    def captured(of: str, ask: str) -> Imported:
        path.write_text(SHARED.format(of=of, op=op, ask=ask))
        return capture_script(Script(path=path), world, TorchAdapter())

    for of in ("dist.get_rank() + 1", "int(__import__('os').environ['RANK'])"):
        for ask in ("if many.item() > 0: pass", "if many[0] == 3: pass"):
            with pytest.raises(CaptureError, match=r"train\.py:9: .*--decide"):
                captured(of, ask)
        assert any("1 stands for it" in note for note in captured(of, "print(many.item())").notes)
    assert captured("5", f"assert many.item() == {20 if not op else 5}").notes
    # A rank is run for it only where somebody asks.
    assert not any("ranks told" in note for note in captured("dist.get_rank()", "pass").notes)


@pytest.mark.parametrize("alike", [True, False])
def test_a_rank_that_is_held_against_another_goes_through_short_steps_unless_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    class Framework(TorchAdapter):
        @contextmanager
        def installed(self, world: World, recorder: ScriptRecorder) -> Iterator[None]:
            with super().installed(world, recorder), replaced(torch, "is_storage", lambda: recorder.is_early):
                yield

    def counted(script: Script, world: World, adapter: Any, results: Any, *passing: Any) -> Any:
        ran.append((world.rank, *(kind.__name__ for kind in passing)))
        return run_script(script, world, adapter, results, *passing)

    ran: list[Any] = []
    monkeypatch.setattr(capture, "run_script", counted)
    path = tmp_path / "train.py"
    counts = "torch.tensor([1 if torch.is_storage() else MORE], device='cuda')".replace(
        "MORE", "1" if alike else "8"
    )
    ask = f"many = {counts}; dist.all_reduce(many); assert int(many) in (2, 16)"
    path.write_text(SHARED.format(of="5", op="", ask=ask))
    capture_script(Script(path=path), World(size=2), Framework())
    assert ran == [(0,), (1, "BriefRecorder"), (1, "PassingRecorder")][: 2 if alike else 3]


def test_what_ranks_gather_of_their_own_numbers_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = SHARED.format(of="dist.get_rank() // 2 + 1", op="", ask="if all_of[0].item() == 1: pass")
    gathers = "all_of = [torch.zeros_like(many) for _ in range(4)]\ndist.all_gather(all_of, many)"
    path.write_text(text.replace("dist.all_reduce(many)", gathers))
    with pytest.raises(CaptureError, match=r"train\.py:\d+: .*--decide"):
        capture_script(Script(path=path), World(size=4), TorchAdapter())


@pytest.mark.parametrize(
    ("taken", "used", "what"),
    [
        (
            "from flash_attn.losses.cross_entropy import CrossEntropyLoss",
            "CrossEntropyLoss(x, x)",
            "CrossEntropyLoss",
        ),
        ("from flash_attn import no_such_kernel", "no_such_kernel(x)", "no_such_kernel"),
        (
            "from flash_attn.ops.fused_dense import FusedDense",
            "class Mine(FusedDense): pass\nMine(8)",
            "FusedDense",
        ),
        ("from flash_attn import flash_attn_func", "flash_attn_func(x, x, x, window_size=(4, 0))", "a window"),
        ("from flash_attn import flash_attn_with_kvcache", "flash_attn_with_kvcache(x)", "a cache of keys"),
    ],
)
def test_what_is_not_known_of_flash_attn_is_refused_by_name(
    tmp_path: Path, taken: str, used: str, what: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{taken}\nx = torch.ones(2, 16, 4, 16).cuda().bfloat16()\n{used}\n")
    with pytest.raises(CaptureError, match=rf"^train\.py:\d: [^\n]*{what}[^\n]*$"):
        run_script(Script(path=path), World(), TorchAdapter())


@pytest.mark.parametrize(
    ("asked", "raises", "what"),
    [
        ("torch==1.0.0", "torch.nn.Linear(1, 1)._handles", "requirements.txt asks for torch==1.0.0, and"),
        (
            "numpy<1.0  # old",
            "from numpy import no_such; no_such()",
            r"no such name: .*requirements.txt asks for numpy<1.0, and",
        ),
        ("torch==1.0.0", "torch.nn.Linear(1, 1, of=3)", "requirements.txt asks for torch==1.0.0, and"),
        (
            "torch==1.0.0\npackaging==1.0",
            "from packaging.version import Version; Version()",
            "requirements.txt asks for packaging==1.0, and",
        ),
        (
            "torch>=2.0,<9\nnumpy>=1.0\nno_such_package==1",
            "torch.nn.Linear(1, 1)._handles",
            "the script raised it",
        ),
        # Python's own module raises, for a package that called it.
        (
            "torch==1.0.0",
            "torch.hub.load_state_dict_from_url('nothing', model_dir='.')",
            "requirements.txt asks for torch==1.0.0, and",
        ),
        ("packaging==1.0", "__import__('packaging').no_such", "requirements.txt asks for packaging==1.0, and"),
        (
            "",
            "__import__('packaging').no_such",
            r"packaging [\d.]+ is here, and the script may be written for another",
        ),
        (
            "",
            "from packaging.version import Version; Version(of=3)",
            r"packaging [\d.]+ is here, and the script may",
        ),
        (
            "no_such_package==1.2",
            "import no_such_package; no_such_package.run()",
            r"install no_such_package beside echograph \(requirements.txt asks for no_such_package==1.2\)",
        ),
        ("numpy<1.0", "torch.distributed.barrier()", r"RANK and WORLD_SIZE .* the script made no group"),
        ("", "torch.ones(3, 2).t().view(-1)", "as on real ranks: what it views does not lie in memory so"),
        ("torch==1.0.0", "open('nowhere.txt')", "No such file .*: what it looks for is not there"),
        ("", "import pynvml; pynvml.nvmlInit()", "install nvidia-ml-py beside echograph"),
        # What a package is imported from may have another name.
        (
            "yaml>=1",
            "from yaml import no_such; no_such()",
            r"PyYAML [\d.]+ has no such name: .*\(requirements.txt asks for yaml>=1\)",
        ),
        ("", "open('data/train.txt')", "what it looks for is not there: give it where the script's README says"),
        ("", "import os; assert os.path.exists('stats.npz')", "AssertionError: .*what it looks for is not there"),
        (
            "",
            "raise TypeError('Descriptors cannot be created directly')",
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION",
        ),
        ("", "from yaml import no_such; no_such()", r"PyYAML [\d.]+ has no such name"),
        (
            "",
            "import sys; open('training/packaging.py', 'w').close(); del sys.modules['packaging']; "
            "from packaging import no_such; no_such()",
            r"the script's own packaging\.py comes before the package packaging [\d.]+",
        ),
        ("", "from xformers.ops import no_such", "what stands in for it has no such name"),
        # What a package raises that the repository asks nothing of may be for another that it has.
        ("numpy<1.0", "__import__('yaml').safe_load('{')", "requirements.txt asks for numpy<1.0, and"),
        ("", "__import__('yaml').safe_load('{')", r"PyYAML [\d.]+ is here, and the script may"),
        ("", "import own.version", r"own.version is no file of the repository, whose setup.py may write it"),
    ],
)
def test_an_error_says_which_version_the_repository_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, raises: str, what: str
) -> None:
    monkeypatch.chdir(tmp_path)  # what is downloaded in part stays there
    monkeypatch.setitem(sys.modules, "packaging", importlib.import_module("packaging"))  # which one shadows
    (tmp_path / ".git").mkdir()
    (tmp_path / "requirements.txt").write_text(asked)
    folder = tmp_path / "training"
    (folder / "own").mkdir(parents=True)
    (folder / "own/__init__.py").touch()
    (folder / "setup.py").touch()
    path = folder / "train.py"
    path.write_text(f"import torch\n{raises}\n")
    with pytest.raises(CaptureError, match=rf"^train\.py:2: .*{what}"):
        run_script(Script(path=path), World(), TorchAdapter())


@pytest.mark.parametrize(
    ("wanted", "what"), [(">=3.99", r"asks for Python >=3\.99, and 3\."), (">=3.9", "raised it")]
)
def test_what_is_written_for_a_newer_python(tmp_path: Path, wanted: str, what: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "own"\nrequires-python = "{wanted}"\n')
    (tmp_path / "newer.py").write_text("def first[T](items: list[T] -> T:\n")
    path = tmp_path / "train.py"
    path.write_text("import newer\n")
    with pytest.raises(CaptureError, match=rf"^newer\.py:1: SyntaxError: .*{what}"):
        run_script(Script(path=path), World(), TorchAdapter())


def test_a_script_that_leaves_by_itself_is_not_asked_for_a_step(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args(['--no-such'])\n")
    with pytest.raises(
        CaptureError, match=r"train.py: unrecognized arguments: --no-such: its arguments stand behind --"
    ):
        run_script(Script(path=path), World(), TorchAdapter())


def test_what_compiles_kernels_of_its_own_says_that_it_is_not_captured(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("assert False, 'CUDA_HOME is not found'\n")
    with pytest.raises(CaptureError, match="compiles kernels of its own for a GPU"):
        run_script(Script(path=path), World(), TorchAdapter())


def test_memory_that_is_not_there_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\none, other = torch.ones(4, 4).cuda(), torch.ones(4, 4).cuda()\n"
        "at = [part.untyped_storage().data_ptr() for part in (one, one[1:], other)]\n"
        "assert at[0] == at[1] != at[2]\nassert torch._C._cuda_getCurrentRawStream(0) == 0\n"
    )
    with pytest.raises(CaptureError, match="ended after 0 training steps"):
        run_script(Script(path=path), World(), TorchAdapter())
    assert not hasattr(torch._C, "_cuda_getCurrentRawStream") or torch.version.cuda is not None


APEX = """import torch
{importing}
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).cuda()
torch.distributed.init_process_group("nccl")
model = apex.parallel.convert_syncbn_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
optimizer = LARC(optimizer, trust_coefficient=0.001, clip=False)
model, optimizer = apex.amp.initialize(model, optimizer, opt_level="{level}")
model = apex.parallel.DistributedDataParallel(model)
for step in range(3):
    with apex.amp.scale_loss(model(torch.ones(4, 64).cuda()).float().sum(), optimizer) as loss:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(apex.amp.master_params(optimizer), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_apex_is_stood_in_for_where_a_script_cannot_do_without(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    importing = "import apex\nfrom apex.parallel.LARC import LARC"
    path.write_text(APEX.format(importing=importing, level="O1"))
    run = run_script(Script(path=path), World(size=4), TorchAdapter())
    targets = [str(node.target) for node in run.recorder.graph.nodes]
    products = [node for node in run.recorder.graph.nodes if "addmm" in str(node.target)]
    assert [node.meta["val"].dtype for node in products] == [torch.float16]
    assert sum("norm" in target and "batch" not in target for target in targets) >= 8  # two of each parameter
    assert any("apex is not installed" in note for note in run.recorder.notes)
    path.write_text(APEX.format(importing=importing, level="O2"))
    with pytest.raises(CaptureError, match=r"^train\.py:9: apex\.amp's O2 is not known"):
        run_script(Script(path=path), World(size=4), TorchAdapter())
    path.write_text("try:\n    import apex\nexcept ImportError:\n    raise SystemExit(7)\n")
    with pytest.raises(CaptureError, match="No module named 'apex'") as left:
        run_script(Script(path=path), World(size=4), TorchAdapter())
    assert left.value.exit_code == 7


def test_kernels_of_the_hub_are_flash_attention_or_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = """import torch
from kernels import get_kernel
attention = get_kernel("{name}", version=1).flash_attn_interface
x = torch.ones(2, 16, 4, 16).cuda().bfloat16()
assert attention.flash_attn_func(x, x, x, causal=True).shape == x.shape
"""
    path.write_text(text.format(name="kernels-community/flash-attn3"))
    with pytest.raises(CaptureError, match="ended after 0 training steps"):
        run_script(Script(path=path), World(), TorchAdapter())
    path.write_text(text.format(name="kernels-community/activation"))
    with pytest.raises(CaptureError, match=r"^train\.py:3: kernels-community/activation is compiled"):
        run_script(Script(path=path), World(), TorchAdapter())


def test_a_part_that_is_to_be_compiled_first(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "__init__.py").write_text("from .core import run")
    (tmp_path / "fast" / "core.pyx").touch()
    (tmp_path / "train.py").write_text("import fast")
    with pytest.raises(
        CaptureError, match=r"^fast/__init__\.py:1: .*fast\.core is compiled from the .* folder fast"
    ):
        run_script(Script(path=tmp_path / "train.py"), World(), TorchAdapter())
