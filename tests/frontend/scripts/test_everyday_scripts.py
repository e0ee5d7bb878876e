"""What training scripts do besides training: it runs, unedited, and the step is the one that would be done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echograph.errors import CaptureError
from echograph.frontend.pytorch.annotate import PHASE
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.collectives import Communication
from echograph.frontend.scripts.recorder import COMMUNICATION, MICRO_BATCH
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.graph import JobGraph

TRAIN = """import argparse, copy, json, os, random
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from parts.model import Model

parser = argparse.ArgumentParser()
parser.add_argument("--init", default="env://")
parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))
parser.add_argument("--length", type=int, default=16)
args = parser.parse_args()
settings = json.loads(Path(__file__).with_name("settings.json").read_text())
torch.cuda.set_device(args.local_rank)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("nccl", init_method=args.init, rank=rank, world_size=world)
torch.manual_seed(rank); np.random.seed(rank); random.seed(rank)


class Tokens(Dataset):
    def __init__(self):
        self.tokens = np.memmap("tokens.bin", dtype=np.uint16, mode="r")

    def __len__(self):
        return (len(self.tokens) - 1) // args.length

    def __getitem__(self, i):
        i = i * args.length
        x = torch.from_numpy(self.tokens[i : i + args.length + 1].astype(np.int64))
        return x[:-1], x[1:]


data = Tokens()
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=settings["batch"], sampler=sampler, num_workers=4, pin_memory=True)
model = Model(settings["width"]).cuda()
ema = copy.deepcopy(model)
model = torch.compile(DDP(model, device_ids=[args.local_rank]))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
scaler = torch.amp.GradScaler("cuda")
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        start.record()
        x, y = x.cuda(non_blocking=True), y.to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        if not torch.isfinite(loss):
            raise SystemExit("loss is not a number")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        with torch.no_grad():
            for mine, averaged in zip(model.parameters(), ema.parameters()):
                averaged.lerp_(mine, 0.01)
        end.record()
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0:
            rate = scheduler.get_last_lr()[0]
            print(f"{step} {total.item():.3f} {norm.item():.2f} {rate:.1e} {start.elapsed_time(end)}")
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
        step += 1
        if step == 3:
            break
    else:
        continue
    break
print("ended")
"""
MODEL = """import torch
from .head import Head

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = torch.nn.Embedding(65536, width)
        self.head = Head(width)

    def forward(self, x):
        return self.head(self.embed(x))
"""
HEAD = """import torch

class Head(torch.nn.Linear):
    def __init__(self, width):
        super().__init__(width, 512)
        torch.nn.init.trunc_normal_(self.weight, std=0.02)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, text in (("__init__", ""), ("model", MODEL), ("head", HEAD)):
        (parts / f"{name}.py").write_text(text)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "settings.json").write_text('{"batch": 4, "width": 32}')
    (tmp_path / "tokens.bin").write_bytes(bytes(2 * 16 * 4 * 16 * 3 + 2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str, world: World, step: int = 2, whole: bool = False) -> ScriptRun:
    script = Script(path=folder / "train.py", arguments=arguments, step=step, whole=whole)
    return run_script(script, world, TorchAdapter())


def calls(run: ScriptRun) -> list[Communication]:
    return [node.meta[COMMUNICATION] for node in run.recorder.graph.nodes if COMMUNICATION in node.meta]


def test_a_step_is_recorded_whatever_is_around_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(folder, world=World(rank=9, size=16))
    assert made.recorder.sample is not None
    assert tuple(made.recorder.sample.shape) == (4, 16)  # what NumPy cut out of the file
    elements = 65536 * 32 + 512 * 32 + 512
    reduced = [call for call in calls(made) if call.op in ("all_reduce", "allreduce_")]
    assert sum(call.nbytes for call in reduced) == 4 * (elements + 1)  # gradients, and the loss for the log
    assert capsys.readouterr().out == ""


def test_the_first_step_of_all_ranks_of_one_machine(folder: Path) -> None:
    made = run(folder, "--init", f"file://{folder}/rendezvous", world=World(rank=5, size=6, local_size=6), step=1)
    assert calls(made)[0].ranks == tuple(range(6))
    assert not (folder / "rendezvous").exists()


@pytest.mark.slow
def test_it_may_go_on_to_its_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(folder, "--init", "tcp://10.0.0.1:29500", world=World(size=16), whole=True)
    assert made.recorder.steps == 3
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["0", "1", "2", "ended"]
    assert not (folder / "last.pt").exists()


@pytest.mark.slow
def test_ranks_that_are_named(folder: Path) -> None:
    script = Script(path=folder / "train.py")
    job = capture_script(script, World(size=4), TorchAdapter(), ranks=(0, 1, 2, 3)).graph
    assert isinstance(job, JobGraph)
    assert [dict(program.coordinates) for program in job.programs] == [{"dp": rank} for rank in range(4)]
    with pytest.raises(CaptureError, match="do not stand for all ranks"):
        capture_script(script, World(size=4), TorchAdapter(), ranks=(1, 3))


def test_a_rank_has_what_another_one_told_it(tmp_path: Path) -> None:
    """Of two stages, the first alone reads a file; the second is run after it, and has what that broadcast."""
    text = """import torch
import torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
told = [{"width": 8}, "words"] if rank == 0 else [None, None]
dist.broadcast_object_list(told, src=0)
width = told[0]["width"]
model = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x = torch.zeros(4, width, device="cuda", requires_grad=True)
    if rank % 2:
        dist.recv(x.data, src=rank - 1)
    out = model(x)
    if rank % 2 == 0:
        dist.send(out, dst=rank + 1)
    out.sum().backward()
    optimizer.step()
"""
    path = tmp_path / "train.py"
    path.write_text(text)
    job = capture_script(Script(path=path), World(size=2), TorchAdapter()).graph
    assert isinstance(job, JobGraph)
    assert len(job.programs) == 2


def test_an_optimizer_that_steps_for_its_states_ends_no_training_step(tmp_path: Path) -> None:
    text = """import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters())
get_optimizer_state_dict(model, optimizer)
for step in range(3):
    model(torch.ones(4 + step, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    path = tmp_path / "train.py"
    path.write_text(text)
    recorder = run_script(Script(path=path), World(), TorchAdapter()).recorder
    assert recorder.sample is not None
    assert tuple(recorder.sample.shape) == (5, 8)


HOOKED = """import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 20).cuda())
{hook}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 40).cuda()).sum().backward()
    optimizer.step()
"""
HOOKS = {
    "": [4 * 820],
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)": [2 * 820],
    "model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)": [2 * 820],
    "model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook)": [
        80,
        80,
        160,
    ],
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_ddp_exchange_what_they_say(tmp_path: Path, hook: str) -> None:
    (tmp_path / "train.py").write_text(HOOKED.format(hook=hook))
    run = run_script(Script(path=tmp_path / "train.py", step=4), World(size=4), TorchAdapter())
    calls: list[Communication] = [
        node.meta[COMMUNICATION] for node in run.recorder.graph.nodes if COMMUNICATION in node.meta
    ]
    assert sorted(call.nbytes for call in calls) == sorted(HOOKS[hook])


@pytest.mark.parametrize("given", ["closure", "closure=closure"])
def test_what_an_optimizer_calls_for_the_loss_is_no_part_of_its_step(tmp_path: Path, given: str) -> None:
    """As Lightning trains, with accumulation: the last micro-batch is worked out within the optimizer's step."""
    (tmp_path / "train.py").write_text(f"""import torch
net = torch.nn.Linear(8, 4).cuda()
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
def closure():
    loss = net(torch.randn(2, 8).cuda()).square().mean()
    loss.backward()
    return loss
for _ in range(3):
    optimizer.zero_grad()
    closure()
    optimizer.step({given})
""")
    run = run_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter())
    nodes = [node for node in run.recorder.graph.nodes if PHASE in node.meta]
    made = [(node.meta[PHASE], node.meta.get(MICRO_BATCH), str(node.target)) for node in nodes]
    products = [(phase, batch) for phase, batch, name in made if name.startswith(("aten.addmm.", "aten.mm."))]
    assert products == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert {name.split(".")[1] for phase, _, name in made if phase == "optimizer"} <= {
        "_fused_adamw_",
        "_foreach_add_",
    }
    assert not run.recorder.warnings


def test_a_hook_that_compresses_later_is_told(tmp_path: Path) -> None:
    hook = "model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1, 3), powerSGD_hook.powerSGD_hook)"
    (tmp_path / "train.py").write_text(HOOKED.format(hook=hook))
    for step, told in ((2, ["--step 5"]), (4, [])):
        run = run_script(Script(path=tmp_path / "train.py", step=step), World(size=4), TorchAdapter())
        assert [re.search(r"--step \d+", line)[0] for line in run.recorder.warnings if "PowerSGD" in line] == told


CUT = """import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Linear(40, 20).cuda()
whole = torch.zeros(820, device="cuda")
memory, begin = whole.untyped_storage(), 0
for parameter in model.parameters():
    end = begin + 4 * parameter.numel()
    part = memory[begin:end]
    gradient = torch.empty([], device=part.device).set_(source=part)
    parameter.grad = gradient.view_as(parameter)
    assert parameter.grad.untyped_storage()._cdata == memory._cdata
    assert 4 * parameter.grad.storage_offset() == begin
    begin = end
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 40).cuda()).sum().backward()
    dist.all_reduce(whole)
    optimizer.step()
    whole.zero_()
"""


def test_gradients_lie_in_the_memory_that_a_script_cut_for_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CUT)
    run = run_script(Script(path=tmp_path / "train.py"), World(size=4), TorchAdapter())
    calls = [node.meta[COMMUNICATION] for node in run.recorder.graph.nodes if COMMUNICATION in node.meta]
    assert [call.nbytes for call in calls] == [4 * 820]


MASKED = """import torch

layer = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
mask = torch.tensor([True, False, True]).cuda()
for _ in range(3):
    whole = torch.zeros(3, 4, device="cuda")
    whole[mask] = layer(torch.randn(2, 4).cuda())
    whole.sum().backward()
    assert layer.weight.grad.shape == (4, 4)
    optimizer.step()
"""


def test_a_value_that_is_put_where_a_known_mask_is_true_has_a_gradient(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MASKED)
    run = run_script(Script(path=tmp_path / "train.py"), World(), TorchAdapter())
    assert run.recorder.recorded


COPIED = """import copy
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 8).cuda()).sum().backward()
    optimizer.step()
    kept = copy.deepcopy(model)
    assert kept.weight.grad is not model.weight.grad and kept.weight.grad.shape == (8, 8)
    assert kept.weight.grad.device == kept.weight.device == model.weight.device
"""


def test_a_model_is_copied_with_its_gradients(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COPIED)
    assert run_script(Script(path=tmp_path / "train.py"), World(), TorchAdapter()).recorder.recorded


OWN_PRINT = """import builtins
import torch
assert type(print) is type(open) is type(len)
plain = builtins.print
builtins.print = lambda *said, clean=False, **how: plain(*said, **how)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    print("step", step, clean=True)
"""


def test_functions_of_python_are_of_their_types_and_a_script_may_have_its_own(tmp_path: Path) -> None:
    before = print, open
    (tmp_path / "train.py").write_text(OWN_PRINT)
    assert run_script(Script(path=tmp_path / "train.py"), World(), TorchAdapter()).recorder.recorded
    assert (print, open) == before


def test_what_stands_in_for_a_function_has_its_arguments(tmp_path: Path) -> None:
    """Scripts make objects of settings, by the arguments that classes have."""
    (tmp_path / "train.py").write_text(
        "import inspect, torch\nfrom torch.utils.data import DataLoader\n"
        "names = inspect.getfullargspec(DataLoader.__init__).args\n"
        "assert names[:3] == ['self', 'dataset', 'batch_size'], names\n"
        "given = {name: 2 for name in names if name == 'batch_size'}\n"
        "model = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x in DataLoader(torch.ones(8, 8), **given):\n    model(x).sum().backward()\n    optimizer.step()\n"
    )
    assert run_script(Script(path=tmp_path / "train.py"), World(), TorchAdapter()).recorder.samples == 2


def test_a_loader_with_a_constructor_of_its_own_loads_here(tmp_path: Path) -> None:
    """As torchdata's `StatefulDataLoader` has."""
    package = tmp_path / "torchdata" / "stateful_dataloader"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from .stateful_dataloader import StatefulDataLoader\n")
    (package / "stateful_dataloader.py").write_text(
        "from torch.utils.data import DataLoader\nclass StatefulDataLoader(DataLoader):\n"
        "    def __init__(self, dataset, batch_size=1, shuffle=None, sampler=None, batch_sampler=None,\n"
        "                 num_workers=0, collate_fn=None, pin_memory=False, *, prefetch_factor=None):\n"
        "        assert not num_workers and not pin_memory and prefetch_factor is None\n"
        "        super().__init__(dataset, batch_size)\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torchdata.stateful_dataloader import StatefulDataLoader\n"
        "model = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x in StatefulDataLoader(torch.ones(8, 8), 2, num_workers=4, pin_memory=True, prefetch_factor=2):\n"
        "    model(x).sum().backward()\n    optimizer.step()\n"
    )
    assert run_script(Script(path=tmp_path / "train.py"), World(), TorchAdapter()).recorder.samples == 2


SIZES = """import torch
sizes = torch.LongTensor([5, 7]).to("cuda")
plane = torch.nn.Parameter(torch.randn((1, 2, sizes[0], sizes[1]), device="cuda"))
assert sizes.tolist() == [5, 7] and plane.shape == (1, 2, 5, 7)
assert torch.FloatTensor([1.5, 2.0]).cuda().sum().item() == 3.5
optimizer = torch.optim.SGD([plane], lr=0.1)
for step in range(2):
    plane.sum().backward()
    optimizer.step()
"""


def test_sizes_that_an_old_constructor_holds_are_known(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SIZES)
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded


def test_a_mesh_and_a_model_take_their_arguments_by_name(tmp_path: Path) -> None:
    """Whatever they are called: `mesh`, `module`, `engine`."""
    (tmp_path / "train.py").write_text("""
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, module, engine, tensor):
        return self.layer(tensor)

dist.init_process_group("nccl")
DeviceMesh(device_type="cuda", mesh=torch.arange(8).view(2, 4), mesh_dim_names=("a", "b"))
model = torch.nn.parallel.DistributedDataParallel(module=Model().cuda())
optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
for step in range(3):
    model(module=1, engine=2, tensor=torch.ones(2, 4).cuda()).sum().backward()
    optimizer.step()
""")
    run = run_script(Script(path=tmp_path / "train.py"), World(size=8), TorchAdapter())
    assert run.meshes == [{"a": 2, "b": 4}]


def test_constants_of_torchscript_are_held_against_each_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.one, self.two = torch.full((4,), 2.0), torch.full((4,), 2.0)

    def forward(self, x):
        return self.layer(x) * self.one * self.two

model = torch.jit.script(Model())
assert not torch.ops.aten.equal(model.one, model.two) and torch.ops.aten.equal(model.one, model.one)
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model.layer(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
""")
    assert run_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter()).recorder.recorded


def test_what_a_model_draws_on_the_host_after_a_step_is_known(tmp_path: Path) -> None:
    """As an invertible layer that is made again for a checkpoint asks for the sign of its rotation."""
    (tmp_path / "train.py").write_text("""
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    for size in (3, 3, 4):  # the first of its shape that is recorded, and another
        if torch.det(torch.FloatTensor(size, size).normal_()) < 0:
            torch.zeros(size).neg_()
""")
    assert run_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter()).recorder.recorded


def test_gradients_that_are_differentiated_are_of_the_backward_pass(tmp_path: Path) -> None:
    """As a penalty of a gradient's norm: nothing of it is computed anew."""
    (tmp_path / "train.py").write_text("""
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(32, 8, device="cuda").requires_grad_()
    out = model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + (slope / slope.norm() - 1).pow(2).reshape(32, -1).sum(1).mean(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    run = run_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter())
    products = [
        node for node in run.recorder.graph.nodes if str(node.target) in ("aten.addmm.default", "aten.mm.default")
    ]
    phases = [node.meta["phase"] for node in products]
    assert "recompute" not in {node.meta.get("phase") for node in run.recorder.graph.nodes}
    # Two layers; their gradients by the input; the same differentiated by gradient and weight; that of the sum.
    assert (phases.count("forward"), phases.count("backward")) == (2, 9)
    assert {node.meta["module"] for node in products} == {"0", "2"}
    capture_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter())


def test_an_optimizer_keeps_the_parameters_of_a_model_that_is_converted_later(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = list(map(id, model.parameters()))
model.weight.grad = torch.zeros(4, 4)
model.half().cuda()
assert model.weight.grad.dtype == torch.float16
model.float()
assert before == list(map(id, model.parameters())) and model.weight.grad.dtype == torch.float32
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    assert all(p.grad is not None for p in optimizer.param_groups[0]["params"])
    optimizer.step()
""")
    run = run_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter())
    assert [node for node in run.recorder.graph.nodes if node.meta.get("phase") == "optimizer"]
