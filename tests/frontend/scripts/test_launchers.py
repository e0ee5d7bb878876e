"""How scripts find their ranks and their backend, and where their data sets put samples."""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch

from echograph.errors import CaptureError
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.device import remedy
from echograph.frontend.scripts.recorder import COMMUNICATION
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.types import Collective, CollectiveKind, Payload

STEPS = """
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model({given}).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


ALONE = STEPS.format(given="torch.ones(2, 4)").replace("torch.nn.parallel.DistributedDataParallel(model)", "model")


def _run(folder: Path, text: str, world: World, *arguments: str) -> ScriptRun:
    script = folder / "train.py"
    script.write_text(text)
    return run_script(Script(path=script, arguments=arguments), world, TorchAdapter())


def _called(run: ScriptRun) -> list[tuple[str, int]]:
    nodes = run.recorder.graph.nodes
    return [(n.meta[COMMUNICATION].op, n.meta[COMMUNICATION].nbytes) for n in nodes if COMMUNICATION in n.meta]


@pytest.mark.parametrize(
    ("asked", "told"),
    [('"nccl"', "nccl"), ('"cpu:gloo,cuda:nccl"', "cpu:gloo,cuda:nccl"), ('"gloo"', "gloo"), ("", "undefined")],
)
def test_a_script_is_told_the_backend_that_it_asked_for(tmp_path: Path, asked: str, told: str) -> None:
    text = f"""import torch, torch.distributed as dist
dist.init_process_group({asked})
assert dist.get_backend() == {told!r}, dist.get_backend()
assert dist.get_backend(dist.new_group([0, 1])) == {told!r}
assert dist.get_backend(dist.new_group([0, 1], backend="gloo")) == "gloo"
assert "fake" not in dist.get_backend_config()
model = torch.nn.Linear(4, 4).cuda()
""" + STEPS.format(given="torch.ones(2, 4, device='cuda')")
    assert _called(_run(tmp_path, text, World(size=4))) == [("all_reduce", 80)]


def test_the_gradient_of_gathered_activations_is_scattered_as_nccl_does(tmp_path: Path) -> None:
    """PyTorch chooses by the backend's name, and emulates it by an all-to-all for all but NCCL."""
    text = """import torch, torch.distributed as dist, torch.distributed.nn
dist.init_process_group("nccl")
model = torch.nn.Linear(4, 4).cuda()
""" + STEPS.format(given="torch.ones(2, 4, device='cuda')").replace(".sum()", ".pipe()").replace(
        "model = torch.nn.parallel",
        """class Gathered(torch.Tensor): pass
torch.Tensor.pipe = lambda x: torch.cat(dist.nn.all_gather(x)).sum()
model = torch.nn.parallel""",
    )  # fmt: skip
    kinds = [op for op, _ in _called(_run(tmp_path, text, World(size=4)))]
    assert not any("all_to_all" in kind for kind in kinds)
    assert any("reduce_scatter" in kind for kind in kinds)


def test_ranks_of_mpi_are_those_of_the_job(tmp_path: Path) -> None:
    text = """import os, torch, torch.distributed as dist
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert (comm.rank, comm.Get_size(), comm.bcast("told"), comm.allgather(1)) == (3, 4, "told", [1] * 4)
os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size))
dist.init_process_group("nccl")
model = torch.nn.Linear(4, 4).cuda()
""" + STEPS.format(given="torch.ones(2, 4, device='cuda')")
    before = sys.modules.get("mpi4py")
    assert _called(_run(tmp_path, text, World(rank=3, size=4)))
    assert sys.modules.get("mpi4py") is before
    with pytest.raises(CaptureError, match=r"train.py:2: mpi4py's communicator is asked for 'Split'"):
        _run(tmp_path, "from mpi4py import MPI\nMPI.COMM_WORLD.Split(0, 1)", World(size=4))


RANKS = """import sys
import multiprocessing as mp
import torch, torch.distributed as dist

def work(rank, size):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    model = torch.nn.Linear(4, 4).cuda(rank)
""" + STEPS.format(given="torch.ones(2, 4, device='cuda')").replace("\n", "\n    ") + """
if __name__ == "__main__":
    if "spawn" in sys.argv:
        mp.set_start_method("spawn")
        assert mp.Manager().dict() is not None
    started = [mp.Process(target=work, args=(rank, 4)) for rank in range(4)]
    for one in started:
        one.start()
    if "join" in sys.argv:
        for one in started:
            one.join()
"""  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("join",), ("spawn",)])
def test_a_script_that_starts_a_process_for_each_rank_is_captured_as_one_of_them(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    multiprocessing.Lock()  # this process has chosen how it starts others
    chosen = multiprocessing.get_start_method(allow_none=True)
    assert _called(_run(tmp_path, RANKS, World(rank=2, size=4), *arguments)) == [("all_reduce", 80)]
    assert multiprocessing.get_start_method(allow_none=True) == chosen is not None


SAMPLES = """import numpy as np, torch
from torch.utils.data import DataLoader, Dataset
whole = torch.from_numpy(np.zeros(3_000_000, np.uint8))

class Samples(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return {sample}

model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in DataLoader(Samples(), batch_size=4):
    assert x.is_cuda == {gpu} and x.shape == (4, 9)
    model(x[:, 1:].cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("sample", "gpu"),
    [
        ("whole[i : i + 9].long().to('cuda')", True),
        ("torch.from_numpy(np.zeros(9, np.int64)).cuda()", True),
        ("torch.zeros(9, dtype=torch.long, device='cuda')", True),
        ("whole[i : i + 9].long()", False),
    ],
)
def test_samples_are_where_the_data_set_puts_them(tmp_path: Path, sample: str, gpu: bool) -> None:
    run = _run(tmp_path, SAMPLES.format(sample=sample, gpu=gpu), World())
    assert run.recorder.sample is not None
    assert tuple(run.recorder.sample.shape) == (4, 8)


def test_batch_normalisation_over_ranks_gathers_its_statistics(tmp_path: Path) -> None:
    text = """import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
""" + STEPS.format(given="torch.ones(2, 3, 8, 8, device='cuda')")
    run = _run(tmp_path, text, World(size=4))
    # Mean, inverse deviation and count of each rank; sums of the gradient and its product for each channel.
    sizes = [nbytes for op, nbytes in _called(run) if op.startswith(("all_gather", "all_reduce"))]
    assert sizes[0] == 4 * (2 * 8 + 1) * 4
    assert 2 * 8 * 4 in sizes[1:]


def test_buffers_that_ranks_are_told_are_no_activations(tmp_path: Path) -> None:
    """Those of batch normalisation, by DDP before each forward pass, and by the script."""
    text = """import torch, torch.distributed as dist
dist.init_process_group("nccl")
norm = torch.nn.BatchNorm2d(8).cuda()
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), norm).cuda()
told = norm.register_forward_pre_hook(lambda *_: dist.all_reduce(norm.running_mean))
""" + STEPS.format(given="torch.ones(2, 3, 8, 8, device='cuda')")
    (tmp_path / "train.py").write_text(text)
    job = capture_script(Script(path=tmp_path / "train.py"), World(size=4), TorchAdapter()).graph
    ops = map(job.ops.__getitem__, range(len(job.ops)))
    carried = Counter((op.collective, op.payload) for op in ops if isinstance(op, Collective))
    assert carried[CollectiveKind.BROADCAST, Payload.OTHER] == 2
    assert carried[CollectiveKind.ALL_REDUCE, Payload.OTHER] == 1
    assert {payload for _, payload in carried} == {Payload.GRADIENT, Payload.OTHER}


def test_a_package_without_files_is_imported_anew_for_every_rank(tmp_path: Path) -> None:
    (tmp_path / "parts" / "inner").mkdir(parents=True)
    (tmp_path / "parts" / "inner" / "model.py").write_text("import torch\nmade = lambda: torch.nn.Linear(4, 4)\n")
    text = """import torch, torch.distributed as dist
from parts.inner.model import made
dist.init_process_group("nccl")
rank, x = dist.get_rank(), torch.ones(2, 4, device="cuda", requires_grad=True)
model = made().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    if rank: dist.recv(x.data, rank - 1)
    y = model(x)
    if rank < 1: dist.send(y.detach(), rank + 1)
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    script = tmp_path / "train.py"
    script.write_text(text)
    job = capture_script(Script(path=script), World(size=2), TorchAdapter()).graph
    assert len(job.programs) == 2  # type: ignore[union-attr]
    assert not [name for name in sys.modules if name.startswith("parts.")]


def test_a_script_may_replace_what_makes_tensors_while_its_model_is_made(tmp_path: Path) -> None:
    text = """import torch, torch.distributed as dist
dist.init_process_group("nccl")
names = ("empty", "zeros", "ones", "full")
kept = {name: getattr(torch, name) for name in names}
def on_gpu(f):
    return lambda *a, **k: f(*a, **{**k, "device": torch.device("cuda"), "dtype": torch.bfloat16})
for name in names:
    setattr(torch, name, on_gpu(kept[name]))
angles = 1.0 / torch.arange(0, 8, 2, dtype=torch.float32, device="cuda")
model = torch.nn.Linear(4, 4)
for name in names:
    assert getattr(torch, name) is not kept[name]
    setattr(torch, name, kept[name])
assert model.weight.is_cuda and model.weight.dtype is torch.bfloat16 and angles.dtype is torch.float32
""" + STEPS.format(given="torch.ones(2, 4, device='cuda', dtype=torch.bfloat16)")
    assert _called(_run(tmp_path, text, World(size=4))) == [("all_reduce", 40)]


def test_messages_of_a_group_of_all_ranks_lie_along_the_axis_that_they_cross(tmp_path: Path) -> None:
    text = """import torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
pairs = [dist.new_group([i, i + 1]) for i in (0, 2)]
model = torch.nn.Linear(4, 4).cuda()
x = torch.ones(2, 4, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    if rank >= 2: dist.recv(x.data, rank - 2)
    y = model(x)
    dist.all_reduce(y.detach(), group=pairs[rank // 2])
    if rank < 2: dist.send(y.detach(), rank + 2)
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    script = tmp_path / "train.py"
    script.write_text(text)
    job = capture_script(Script(path=script), World(size=4), TorchAdapter()).graph
    assert [(axis.name, axis.size) for axis in job.mesh] == [("pp", 2), ("dp", 2)]  # type: ignore[union-attr]


def _raised(name: str, part: str) -> BaseException:
    try:
        getattr(importlib.import_module(name), part)
    except ImportError as error:
        return error
    except AttributeError:  # as `from name import part` has it
        return ImportError(f"cannot import name {part!r} from {name!r}", name=name)
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "part", "what"),
    [
        ("numpy.no_such", "part", f"numpy {numpy.__version__} has no such name: install the version"),
        ("numpy", "no_such_name", f"numpy {numpy.__version__} has no such name: install the version"),
        ("no_such_package.part", "", "install no_such_package beside echograph"),
        ("transformer_engine.no_such", "", "need a GPU"),
    ],
)
def test_a_package_that_is_missing_or_another_version_says_which(name: str, part: str, what: str) -> None:
    assert what in remedy(_raised(name, part), Path("train.py"))


def test_a_module_that_the_scripts_own_folder_lacks_is_no_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_helpers").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_helpers" / "there.py").touch()
    said = remedy(_raised("own_helpers.scheduler", "part"), tmp_path / "train.py")
    assert "its folder own_helpers has no scheduler" in said


def test_a_package_lies_where_pip_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install --target`: no folder is called site-packages."""
    (tmp_path / "placed_here").mkdir()
    (tmp_path / "placed_here" / "__init__.py").touch()
    (tmp_path / "placed_here-2.0.dist-info").mkdir()
    (tmp_path / "placed_here-2.0.dist-info" / "METADATA").write_text("Name: placed-here\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = remedy(_raised("placed_here", "gone"), Path("train.py"))
    assert "has no such name: install the version" in said


def test_a_package_of_the_script_that_asks_for_its_own_version_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another distribution may have a part of the same name."""
    (tmp_path / "own_parts").mkdir()
    (tmp_path / "own_parts" / "__init__.py").touch()
    (tmp_path / "setup.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("echograph.frontend.scripts.device.installed", lambda _: "own-parts-contributed 0.1")
    with pytest.raises(importlib.metadata.PackageNotFoundError) as caught:
        importlib.metadata.version("own_parts")
    assert "setup.py" in remedy(caught.value, tmp_path / "train.py")


def test_a_download_that_fails_says_of_what() -> None:
    """Python's own error does not."""
    with pytest.raises(urllib.error.URLError) as caught:
        urllib.request.urlopen(urllib.request.Request("http://no.such.host.invalid/words.txt"))
    assert remedy(caught.value, Path("train.py")).startswith("http://no.such.host.invalid/words.txt is downloaded")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Could not load this library: /there/site-packages/torchaudio/lib/a.so", "built for another PyTorch"),
        ("operator torchvision::nms does not exist", "built for another PyTorch"),
        ("There was no rule registered for HigherOrderOperator flex_attention", "scaled_dot_product_attention"),
        (
            "No module named 'a_simulator'. (HINT: you need to install it)",
            "install what it names beside echograph",
        ),
        ("CUDA_HOME is not set", "compiles kernels of its own"),
        ("Download failure for there.zip", "to where the script looks for it"),
        ("<urlopen error>", "to where the script looks for it (a cache counts, as HF_HOME's)"),
    ],
)
def test_an_error_of_a_package_says_what_to_do(text: str, what: str) -> None:
    assert what in remedy(RuntimeError(text), Path("train.py"))


LAUNCHED = """import os, sys, torch
assert sys.argv[1:] == {argv}, sys.argv
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("5", "16"), os.environ["RANK"]
torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(4, 4).cuda()
""" + STEPS.format(given="torch.ones(2, 4, device='cuda')")


@pytest.mark.parametrize("named", ["run", "module", "function"])
def test_what_a_launcher_was_to_start_runs_in_its_place(tmp_path: Path, named: str) -> None:
    started = tmp_path / "started.py"
    started.write_text(LAUNCHED.format(argv=["--lr", "3"]))
    arguments = ("--nproc-per-node", "8", "--nnodes", "2", str(started), "--lr", "3")
    world = World(size=16, rank=5)
    before = dict(os.environ), list(sys.argv), list(sys.path)
    if named == "module":
        script = Script.of_module("torch.distributed.run", arguments=arguments)
    else:
        script = Script(path=tmp_path / "launch.py", arguments=arguments)
        script.path.write_text(
            "from torch.distributed.run import main\nmain()\n"
            if named == "run"
            else "import sys, runpy\nfrom torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
            "def own(path):\n    sys.argv[1:] = sys.argv[-2:]\n    runpy.run_path(path, run_name='__main__')\n"
            "config = LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=8)\n"
            "elastic_launch(config, own)(sys.argv[5])\n"
        )
    assert _called(run_script(script, world, TorchAdapter())) == [("all_reduce", 80)]
    assert (dict(os.environ), list(sys.argv), list(sys.path)) == before


def test_the_older_launcher_says_which_rank_it_is_of_its_machine(tmp_path: Path) -> None:
    """As `--local-rank`, which scripts of before know as `--local_rank`."""
    started = tmp_path / "started.py"
    started.write_text(
        LAUNCHED.format(argv=["--local-rank=5", "--lr", "3"])
        + "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n"
        "parser.add_argument('--lr')\nassert parser.parse_args().local_rank == 5\n"
    )
    arguments = ("--nproc-per-node", "8", "--nnodes", "2", str(started), "--lr", "3")
    script = Script.of_module("torch.distributed.launch", arguments=arguments, whole=True)
    run = run_script(script, World(size=16, rank=5), TorchAdapter())
    assert any("it is the script's --local_rank" in note for note in run.recorder.notes)


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run(['torchrun', *given], check=True, env=os.environ | {'LR': '3'})",
        "subprocess.Popen([sys.executable, '-u', '-m', 'torch.distributed.run', *given]).wait()",
        "subprocess.run(shlex.join(['torchrun', *given]), shell=True, check=True)",
        "assert os.system(shlex.join(['torchrun', *given])) == 0",
        "os.execvp('torchrun', ['torchrun', *given])",
        "os.execvpe('/bin/torchrun', ['torchrun', *given], os.environ | {'LR': '3'})",
        "subprocess.run(['accelerate', 'launch', '--multi_gpu', '--num_processes', '8', *given[2:]], check=True)",
    ],
)
def test_what_a_script_starts_by_torchrun_runs_in_its_place(tmp_path: Path, start: str) -> None:
    started = tmp_path / "started.py"
    started.write_text(LAUNCHED.format(argv=["--lr", "3"]))
    if "accelerate" in start:
        pytest.importorskip("accelerate")
    text = f"""import os, shlex, subprocess, sys
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
given = ["--nproc-per-node", "8", {str(started)!r}, "--lr", "3"]
{start}
"""
    before = dict(os.environ), list(sys.argv), list(sys.path), Path.cwd()
    assert _called(_run(tmp_path, text, World(size=16, rank=5))) == [("all_reduce", 80)]
    assert (dict(os.environ), list(sys.argv), list(sys.path), Path.cwd()) == before


def test_a_script_that_torchrun_started_and_that_ended_is_a_process_that_ended(tmp_path: Path) -> None:
    started = tmp_path / "started.py"
    started.write_text("import os\nos.environ['SAW'] = os.environ['TOLD']\n")
    text = (
        f"""import os, subprocess, torch
ended = subprocess.Popen(["torchrun", {str(started)!r}], env=os.environ | {{"TOLD": "it"}})
assert ended.wait() == 0 and os.environ["SAW"] == "it"
model = torch.nn.Linear(4, 4)
"""
        + ALONE
    )
    assert _run(tmp_path, text, World(size=1)).recorder.recorded


def test_what_accelerate_starts_for_one_gpu_runs_in_its_place(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    started = tmp_path / "started.py"
    started.write_text(
        "import os, sys, torch\nassert sys.argv[1:] == ['--lr', '3'] and 'RANK' not in os.environ\n"
        "assert os.environ['ACCELERATE_MIXED_PRECISION'] == 'bf16'\nmodel = torch.nn.Linear(4, 4)\n" + ALONE
    )
    arguments = ("--num_processes", "1", "--mixed_precision", "bf16", str(started), "--lr", "3")
    script = Script.of_module("accelerate.commands.launch", arguments=arguments)
    assert run_script(script, World(size=1, launched=False), TorchAdapter()).recorder.recorded


def test_objects_are_exchanged_by_the_arguments_that_pytorch_has(tmp_path: Path) -> None:
    text = """import torch
import torch.distributed as dist
dist.init_process_group("nccl")
got, all_of_them, gathered, told = [None], [None] * 4, [None] * 4, ["it"]
dist.scatter_object_list(scatter_object_output_list=got, scatter_object_input_list=list("abcd"), src=0, group=None)
dist.all_gather_object(object_list=all_of_them, obj=1, group=None)
dist.gather_object(obj=2, object_gather_list=gathered, dst=0, group=None)
dist.broadcast_object_list(object_list=told, src=0, group=None, device=None)
assert (got, all_of_them, gathered, told) == (["a"], [1] * 4, [2] * 4, ["it"])
model = torch.nn.Linear(4, 4).cuda()
""" + STEPS.format(given="torch.ones(2, 4, device='cuda')")
    assert _run(tmp_path, text, World(size=4)).recorder.recorded


@pytest.mark.parametrize(
    "taking",
    [
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local-rank', type=int)\n",
    ],
)
def test_a_script_is_told_its_rank_by_the_name_that_it_takes(tmp_path: Path, taking: str) -> None:
    """PyTorch's first launcher says --local-rank since its release 2, and said --local_rank before."""
    text = "import torch\ntorch.distributed.init_process_group('gloo')\nmodel = torch.nn.Linear(4, 4)\n"
    text += STEPS.format(given="torch.ones(2, 4)")
    asked = "assert parser.parse_args().local_rank == 3\n"
    (tmp_path / "train.py").write_text(taking + asked + text)
    arguments = ["--nproc_per_node=4", str(tmp_path / "train.py")]
    script = Script.of_module("torch.distributed.launch", arguments=arguments)
    run = run_script(script, World(rank=3, size=4), TorchAdapter())
    assert run.recorder.recorded


def test_errors_name_the_lines_of_what_was_launched(tmp_path: Path) -> None:
    started = tmp_path / "there" / "started.py"
    started.parent.mkdir()
    started.write_text("import torch\n1 / 0\n")
    text = "from torch.distributed.run import main\nmain()\n"
    with pytest.raises(CaptureError, match=r"^started.py:2: ZeroDivisionError.*--debug"):
        _run(tmp_path, text, World(size=8), "--nproc-per-node", "8", str(started))
    with pytest.raises(CaptureError, match=r"gone\.py: no such file"):
        _run(tmp_path, text, World(size=8), "--nproc-per-node", "8", "gone.py")


def test_what_deepspeeds_launcher_was_to_start_runs_in_its_place(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    started = tmp_path / "started.py"
    started.write_text(LAUNCHED.format(argv=["--local_rank=5", "--lr", "3"]))
    text = f"import deepspeed.launcher.runner as runner\nrunner.main([{str(started)!r}, '--lr', '3'])\n"
    assert _called(_run(tmp_path, text, World(size=16, rank=5))) == [("all_reduce", 80)]


def test_types_of_tensors_have_their_old_names(tmp_path: Path) -> None:
    text = """import torch
made = torch.cuda.LongTensor([1, 2])
assert made.tolist() == [1, 2] and made.is_cuda and isinstance(made, torch.cuda.LongTensor)
sized = torch.cuda.FloatTensor(3, 4)
assert sized.shape == (3, 4) and isinstance(sized, torch.cuda.FloatTensor)
assert not isinstance(made, torch.cuda.FloatTensor) and not isinstance(torch.ones(2), torch.cuda.FloatTensor)
half = torch.zeros(2).type(torch.cuda.HalfTensor)
assert half.is_cuda and half.dtype == torch.float16
model = torch.nn.Linear(4, 4).cuda()
""" + STEPS.format(given="torch.ones(2, 4, device='cuda')").replace(
        "model = torch.nn.parallel.DistributedDataParallel(model)", ""
    )
    assert _called(_run(tmp_path, text, World(size=1))) == []


def test_data_parallel_over_one_gpu_is_the_model(tmp_path: Path) -> None:
    text = "import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(4, 4).cuda())\n" + STEPS.format(
        given="torch.ones(2, 4)"
    ).replace("model = torch.nn.parallel.DistributedDataParallel(model)", "")
    run = _run(tmp_path, text, World(size=1))
    assert sum(n.target is torch.ops.aten.addmm.default for n in run.recorder.graph.nodes) == 1
