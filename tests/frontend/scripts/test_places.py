"""A tensor is where the script put it, and all who ask are told the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from echograph.errors import CaptureError
from echograph.frontend.scripts import device
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.recorder import COMMUNICATION
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

STEPS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, text: str, *, rank: int = 3, size: int = 16, local_size: int = 8) -> ScriptRun:
    path = folder / "train.py"
    path.write_text(text)
    return run_script(Script(path=path), World(rank=rank, size=size, local_size=local_size), TorchAdapter())


ASKED = """import torch, copy
here = torch.device("cuda", 3)
model = torch.nn.Linear(8, 8).to("cuda")
host = torch.ones(4)
there = host.cuda()
assert host.device.type == "cpu" and not host.is_cuda and host.is_cpu and host.get_device() == -1
for tensor in (
    there, host.to("cuda"), host.to(device="cuda:3"), host.to(3), host.to(there), torch.ones(2, device="cuda"),
    there + 1, 2 * there[1:], torch.zeros_like(there), there.new_ones(3), there.sum(), torch.cat([there, there]),
    there.detach(), there.clone().view(2, 2), model.weight, model.weight.data, copy.deepcopy(model).bias,
):
    assert tensor.device == here, tensor
    assert tensor.is_cuda and not tensor.is_cpu and tensor.get_device() == 3 and "cuda" in tensor.type()
for tensor in (there.cpu(), there.to("cpu"), there.to(host), host + 1):
    assert tensor.device.type == "cpu" and not tensor.is_cuda and "cuda" not in tensor.type()
for tensor in (copy.deepcopy(model).cpu().weight,):
    assert tensor.device.type == "cpu" and not tensor.is_cuda and "cuda" not in tensor.type()
assert torch.device(5) == torch.device("cuda", 5)
with torch.device("cuda"):
    assert torch.empty(2).device == here and torch.nn.Linear(2, 2).weight.device == here
torch.set_default_device("cuda")
assert torch.empty(2).is_cuda
torch.set_default_device("cpu")
weight = model.weight
assert model.to("cuda").to(here).cuda().weight is weight
assert model.to("cuda", torch.bfloat16).weight.is_cuda and model.float().weight.is_cuda
model(torch.ones(2, 8, device="cuda")).sum().backward()
assert model.weight.grad.device == here
host.data = there
assert host.is_cuda
"""


def test_all_who_ask_are_told_the_same(tmp_path: Path) -> None:
    assert run(tmp_path, ASKED + STEPS).recorder.recorded


def test_what_is_brought_to_the_gpu_leaves_its_operators_as_they_are(tmp_path: Path) -> None:
    """Moving is no operator, and the values of small tensors of the host go with it."""
    text = f"""import torch
model = torch.nn.Linear(8, 8)
{STEPS.replace("torch.ones(4, 8, device='cuda')", "torch.ones(4, 8)")}"""
    moving = text.replace("nn.Linear(8, 8)", "nn.Linear(8, 8).cuda()").replace("ones(4, 8)", "ones(4, 8).cuda()")

    def operators(script: str) -> list[str]:
        graph = run(tmp_path, script).recorder.graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    assert operators(moving) == operators(text)
    kept = (
        "import torch\nassert torch.arange(3).cuda().cpu().tolist() == [0, 1, 2]\nmodel = torch.nn.Linear(8, 8)\n"
    )
    assert run(tmp_path, kept + STEPS).recorder.recorded


MESHES = """import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group()
mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("a", "b", "c"))
assert mesh.device_type == "cuda" and "cuda" in repr(mesh)
flat = mesh["a", "b"]._flatten("ab")
assert flat.size() == 8 and flat.get_local_rank() == 1, flat
assert mesh["b"].mesh.tolist() == [1, 3, 5, 7]
model = torch.nn.Linear(8, 8).cuda()
"""


def test_the_host_has_one_memory(tmp_path: Path) -> None:
    text = """import torch
numbered = torch.device("cpu", 3)
total = torch.ones(4, device="cpu:3") + torch.ones(4).to(numbered) + torch.ones(4).to(device=numbered)
total = total + torch.ones(4)
assert total.device == torch.device("cpu")
model = torch.nn.Linear(8, 8).to(numbered).cuda()
"""
    assert run(tmp_path, text + STEPS).recorder.recorded


def test_meshes_are_of_the_gpu_and_are_flattened(tmp_path: Path) -> None:
    assert run(tmp_path, MESHES + STEPS).recorder.recorded


ON_THE_HOST = """import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, MixedPrecision, StateDictType
dist.init_process_group()
torch.cuda.set_device(dist.get_rank() % 8)
there = torch.ones(4, device="cuda", requires_grad=True)
here = (there * 2).cpu()
assert here.requires_grad and not here.is_cuda
here.sum().backward()
assert there.grad is not None
whole = StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
model = FullyShardedDataParallel(
    torch.nn.Linear(8, 8), device_id=dist.get_rank() % 8, mixed_precision=MixedPrecision(torch.bfloat16)
)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with FullyShardedDataParallel.state_dict_type(model, *whole):
        held = model.state_dict()
    assert dist.get_rank() or (held["weight"].shape == (8, 8) and held["weight"].device.type == "cpu")
"""


def test_what_is_brought_to_the_host_outlives_the_memory_that_it_was_in(tmp_path: Path) -> None:
    assert run(tmp_path, ON_THE_HOST, rank=0).recorder.recorded


HYBRID = """import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
dist.init_process_group()
torch.cuda.set_device(dist.get_rank() % 8)
layer = torch.nn.Linear(8, 8)
by_size = lambda module, recurse, nonwrapped_numel: True
hybrid = ShardingStrategy.HYBRID_SHARD
model = FullyShardedDataParallel(
    layer, sharding_strategy=hybrid, device_id=dist.get_rank() % 8, auto_wrap_policy=by_size
)
"""


def test_the_first_fsdp_gathers_within_machines_and_reduces_between_them(tmp_path: Path) -> None:
    """Of 72 elements, padded to 8 shares of 9, each rank reduces its 36 bytes with the one other machine."""
    recorder = run(tmp_path, HYBRID + STEPS).recorder
    calls = [node.meta[COMMUNICATION] for node in recorder.graph.nodes if COMMUNICATION in node.meta]
    assert {(call.op, call.ranks, call.nbytes) for call in calls} == {
        ("all_gather_into_tensor", tuple(range(8)), 288),
        ("reduce_scatter_tensor", tuple(range(8)), 288),
        ("all_reduce", (3, 11), 36),
    }


def test_integers_are_counted_as_a_gpu_counts_them(tmp_path: Path) -> None:
    """Of which nobody has the values: each as often as any other, with a note; and shapes follow from that."""
    text = """import torch
chosen = torch.empty(64, dtype=torch.int64, device="cuda")
counts = torch.histc(chosen, bins=6, min=0, max=6)
assert counts.tolist() == [11, 11, 11, 11, 10, 10]
assert torch.empty(64, 2).split(counts.view(3, 2).sum(1).tolist())[0].shape == (22, 2)
grid = torch.arange(8).view(2, 4)
assert (grid == 6).nonzero().tolist() == [[1, 2]]
model = torch.nn.Linear(8, 8)
"""
    assert any("spread evenly" in note for note in run(tmp_path, text + STEPS).recorder.notes)


def test_a_data_set_has_values(tmp_path: Path) -> None:
    text = """import torch
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        image = torch.rand(3, 100, 100)
        assert 0 < image.numpy().mean() < 1 and image.max() < 1
        return image.mean(dim=(1, 2)).repeat(3)[:8], i
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, i in DataLoader(Images(), batch_size=4, num_workers=4, pin_memory=True):
    assert x.shape == (4, 8) and not x.is_cuda
    first = i.tolist()[0]
    assert first % 4 == 0
    model(x.cuda()).sum().backward()
    optimizer.step()
"""
    recorder = run(tmp_path, text).recorder
    assert recorder.recorded
    assert recorder.sample is not None
    assert recorder.sample.shape == (4, 8)


def test_what_a_run_saved_it_loads_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """import torch
model = torch.nn.Linear(8, 8).cuda()
torch.save({"model": model.state_dict(), "step": 5}, "kept.pt")
loaded = torch.load("kept.pt")
assert loaded["step"] == 5 and loaded["model"]["weight"].shape == (8, 8)
assert loaded["model"]["weight"] is not model.weight
model.load_state_dict(loaded["model"])
import os
assert os.path.exists("kept.pt")
"""
    assert run(tmp_path, text + STEPS).recorder.recorded
    assert not (tmp_path / "kept.pt").exists()


def test_weights_of_safetensors_have_shapes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(
        {"weight": torch.zeros(8, 8), "bias": torch.zeros(8, dtype=torch.bfloat16)}, tmp_path / "w"
    )
    text = f"""import torch
from safetensors.torch import load_file
model = torch.nn.Linear(8, 8).cuda()
held = load_file({str(tmp_path / "w")!r}, device="cuda")
assert held["weight"].shape == (8, 8) and held["bias"].dtype == torch.bfloat16 and held["bias"].is_cuda
"""
    assert run(tmp_path, text + STEPS).recorder.recorded


def test_several_gpus_in_a_process_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"train\.py:2: torch\.nn\.DataParallel .*DistributedDataParallel"):
        run(tmp_path, "import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(8, 8))\n")


def test_a_generator_whose_state_ranks_tell_each_other(tmp_path: Path) -> None:
    text = """import copy, torch
import torch.distributed as dist
dist.init_process_group()
mine = torch.Generator(device="cuda").manual_seed(2)
for each in (mine, torch.default_generator):
    assert isinstance(each, torch.Generator)
    state = each.get_state().cuda()
    dist.broadcast(state, 0)
    if each is mine:
        each.set_state(state.cpu())
    else:
        torch.set_rng_state(state.cpu())
order = torch.randperm(16, generator=mine).tolist()
assert sorted(order) == list(range(16)) and order == torch.randperm(16, generator=mine.manual_seed(2)).tolist()
mesh = dist.init_device_mesh("cuda", (16,))
assert copy.deepcopy({"mesh": mesh.mesh})["mesh"].tolist() == list(range(16))
with torch.device("cuda"):
    assert copy.deepcopy(torch.arange(4, device="cpu")).tolist() == [0, 1, 2, 3]
model = torch.nn.Linear(8, 8).cuda()
"""
    assert run(tmp_path, text + STEPS).recorder.recorded


def test_a_class_of_parameters_is_what_it_is(tmp_path: Path) -> None:
    text = """import torch
class Named(torch.nn.Parameter):
    def __new__(cls, data):
        return torch.nn.Parameter.__new__(cls, data, True)
    def named(self, name):
        self.called = name
        return self
class Layer(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.weight = Named(self.weight.data).named("weight")
        kind = type(self.bias)
        self.bias = kind(self.bias.to("cuda"), **self.bias.__dict__, requires_grad=True)
model = Layer().cuda()
for each in (model.weight, dict(model.named_parameters())["weight"]):
    assert isinstance(each, Named) and isinstance(each, torch.nn.Parameter) and each.called == "weight"
assert not isinstance(model.bias, Named) and isinstance(model.bias, torch.nn.Parameter) and model.weight.is_cuda
assert type(model.weight.detach()) is not type(model.weight)
"""
    assert run(tmp_path, text + STEPS).recorder.recorded


def test_what_holds_tensors_is_copied_with_them(tmp_path: Path) -> None:
    """`dataclasses.asdict` of a DTensor copies its part and the ranks of its mesh."""
    (tmp_path / "train.py").write_text("""
import dataclasses, torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("nccl")
whole = distribute_tensor(torch.ones(8, 8, device="cuda"), init_device_mesh("cuda", (4,)), [Shard(0)])
Held = dataclasses.make_dataclass("Held", ["one", "several"])
copied = dataclasses.asdict(Held(whole, [torch.ones(3).cuda()]))
assert copied["one"].to_local().is_cuda and copied["one"].shape == (8, 8) and copied["several"][0].is_cuda
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
""")
    assert run_script(Script(path=tmp_path / "train.py"), World(size=4), TorchAdapter()).recorder.recorded


def test_a_copy_is_not_what_was_written_down_of_a_tensor() -> None:
    with FakeTensorMode():
        tensor = torch.ones(2)
    tensor.__dict__["_echograph_node"] = torch.fx.Graph().placeholder("tensor")
    assert "_echograph_node" not in vars(device._copied(tensor, {}))


QUANTISED = """import torch
from torch import nn
if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):  # as its package defines it
    @torch.library.custom_op("bitsandbytes::gemm_4bit", mutates_args=())
    def gemm(A: torch.Tensor, B: torch.Tensor, shapeB: list[int]) -> torch.Tensor: ...
    gemm.register_fake(lambda A, B, shapeB: A.new_empty(*A.shape[:-1], shapeB[0]))
class Packed(nn.Parameter):
    def __new__(cls, data, requires_grad=False):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.packed = False
        return made
    def cuda(self, device=None):
        return self.to("cuda" if device is None else device)
    def to(self, *args, **kwargs):
        if self.packed:
            return Packed(super().to(*args, **kwargs))
        self.data = torch.empty(self.numel() // 2, 1, dtype=torch.uint8, device="cuda")
        self.packed = True
        return self
class Linear(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.weight = Packed(self.weight.data)
    def forward(self, x):
        return torch.ops.bitsandbytes.gemm_4bit(x, self.weight, [self.out_features, self.in_features])
model = nn.Sequential(Linear(64, 32), nn.Linear(32, 4)).cuda()
weight = model[0].weight
assert isinstance(weight, Packed) and weight.packed and weight.is_cuda and weight.dtype == torch.uint8
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for step in range(3):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_weights_of_a_class_of_their_own_are_quantised_on_their_way_to_the_gpu(tmp_path: Path) -> None:
    """As those of 4 bits are, half a byte each, whose product is that of all weights."""
    path = tmp_path / "train.py"
    path.write_text(QUANTISED)
    job = capture_script(Script(path=path), World(), TorchAdapter()).graph
    assert int(job.ops.flops.sum()) == 2 * 8 * 64 * 32 + 2 * (2 * 8 * 32 * 4)
    assert job.tensors.nbytes[[t.name for t in job.tensors].index("0.weight")] == 64 * 32 // 2
