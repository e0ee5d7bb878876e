"""The GPU that a script finds, what it cannot do, and scripts that find none: refused where they want one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from echograph.errors import CaptureError
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

BEGIN = """import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, text: str, *, gpus: bool = True) -> ScriptRun:
    path = folder / "train.py"
    path.write_text(text)
    return run_script(Script(path=path), World(size=16, gpus=gpus), TorchAdapter())


def refused(folder: Path, text: str, *, gpus: bool = True) -> str:
    with pytest.raises(CaptureError) as caught:
        run(folder, text, gpus=gpus)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


ONLY_A_REAL_ONE = {
    "CUDA graph": ("torch.cuda.CUDAGraph()", "CUDA graphs are not captured"),
    "graphed callables": ("torch.cuda.make_graphed_callables(model, (torch.ones(4, 8),))", "CUDA graphs"),
    "extension": ("import torch.utils.cpp_extension as e; e.load('x', ['x.cu'])", "torch.library.register_fake"),
    "runtime": ("import ctypes; ctypes.CDLL('libcudart.so.12')", "a real GPU"),
    "triton": ("import triton; triton.jit(lambda x: x)[1](1)", "torch.library.register_fake"),
    "other package": ("import no_such_package_here as it; it.run()", "install no_such_package_here"),
    "property": ("torch.cuda.get_device_properties(0).uuid", "no property 'uuid'"),
    "group of its own": ("dist.ProcessGroupNCCL(None, 0, 16)", "let init_process_group or new_group make it"),
    "what nobody answers": ("torch.cuda.current_blas_handle()", "does not answer it: leave it out"),
    "driver": ("import ctypes; ctypes.CDLL('libnvidia-ml.so.1')", "a real GPU"),
}


def test_options_of_groups_are_those_of_a_build_for_gpus(tmp_path: Path) -> None:
    asks = """import datetime
from torch.distributed.distributed_c10d import ProcessGroupNCCL
options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
options._timeout = datetime.timedelta(minutes=1)
options.config.cga_cluster_size = 2
group = dist.new_group(backend="nccl", pg_options=options)
assert not isinstance(group, ProcessGroupNCCL) and options.is_high_priority_stream
mesh = dist.init_device_mesh("cuda", (4, 4), mesh_dim_names=("a", "b"), backend_override={"a": ("nccl", options)})
weight = torch.ones(4).cuda()
"""
    each = "    dist.all_reduce(weight, group=group)\n    dist.all_reduce(weight, group=mesh.get_group('a'))\n"
    text = (
        BEGIN.replace('"gloo"', '"nccl"')
        .replace("model = ", f"{asks}model = ")
        .replace("    loss.b", f"{each}    loss.b")
    )
    groups = [
        node.meta["communication"].ranks
        for node in run(tmp_path, text).recorder.graph.nodes
        if "communication" in node.meta
    ]
    assert groups == [tuple(range(16)), (0, 4, 8, 12)]
    assert hasattr(torch.distributed, "ProcessGroupNCCL") is torch.distributed.is_nccl_available()


@pytest.mark.parametrize("what", ONLY_A_REAL_ONE)
def test_what_needs_a_real_gpu_ends_in_one_line(tmp_path: Path, what: str) -> None:
    call, said = ONLY_A_REAL_ONE[what]
    line = refused(tmp_path, BEGIN + f"    {call}\n")
    assert line.startswith("train.py:11: ")
    assert said in line


WANTS = {
    "moves a tensor": "torch.ones(2).cuda()",
    "moves to": "torch.ones(2).to('cuda:1')",
    "makes": "torch.ones(2, device='cuda')",
    "moves a model": "model.to('cuda')",
    "moves a model by name": "model.cuda()",
    "sets": "torch.cuda.set_device(0)",
    "stream": "torch.cuda.Stream()",
    "mesh": "dist.init_device_mesh('cuda', (16,))",
    "nccl": "dist.new_group([0, 1], backend='nccl')",
    "accelerator": "torch.accelerator.set_device_index(0)",
}


@pytest.mark.parametrize("what", WANTS)
def test_a_gpu_that_is_not_there(tmp_path: Path, what: str) -> None:
    assert run(tmp_path, BEGIN + f"    {WANTS[what]}\n").recorder.recorded
    line = refused(tmp_path, BEGIN + f"    {WANTS[what]}\n", gpus=False)
    assert line.startswith("train.py:11: ")
    assert "--device cpu" in line


ASKS = """import torch
assert torch.cuda.is_available() == torch.accelerator.is_available() == {gpus}
assert (torch.accelerator.current_accelerator() is not None) == {gpus}
assert torch.cuda.device_count() == torch.accelerator.device_count() == (8 if {gpus} else 0)
assert (torch.version.cuda is not None) == {gpus}
assert torch.distributed.is_nccl_available() == {gpus}
where = "cuda" if torch.cuda.is_available() else "cpu"
scaler = torch.amp.GradScaler(where)
def moved(x: torch.Tensor, device: torch.cuda.device | torch.device | None = None) -> torch.Tensor:
    return x.to(where)
with torch.autocast(where, dtype=torch.bfloat16):
    assert (moved(torch.ones(2, 2)) @ moved(torch.ones(2, 2))).dtype == torch.bfloat16
torch.manual_seed(0)
"""


@pytest.mark.parametrize("gpus", [True, False])
def test_a_script_that_asks_first_runs_with_and_without(tmp_path: Path, gpus: bool) -> None:
    assert run(tmp_path, ASKS.format(gpus=gpus) + BEGIN, gpus=gpus).recorder.recorded


GPU = """import torch
with torch.cuda.nvtx.range("step"), torch.cuda.device(0), torch.accelerator.device_index(1):
    torch.cuda.nvtx.mark("x")
free, total = torch.cuda.mem_get_info()
assert torch.cuda.memory.mem_get_info() == (free, total) and torch.cuda.utilization() == 0
torch.cuda.random.set_rng_state(torch.cuda.random.get_rng_state())
torch.cuda.random.manual_seed(torch.cuda.initial_seed() + torch.cuda.get_sync_debug_mode())
torch.cuda.memory.reset_peak_memory_stats()
assert torch.cuda.get_device_properties(0).total_memory == total
assert "H100" in torch.cuda.get_device_name()
print(torch.cuda.memory_stats()["active_bytes.all.peak"], torch.cuda.memory_summary(), torch.cuda.nccl.version())
assert torch.accelerator.current_accelerator().type == "cuda"
torch.accelerator.synchronize()
for given in (torch.autocast("cuda"), torch.autocast(device_type="cuda", enabled=True), torch.cuda.amp.autocast()):
    with given:
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
"""


def test_what_scripts_ask_a_gpu_is_answered(tmp_path: Path) -> None:
    assert run(tmp_path, GPU + BEGIN).recorder.recorded


APART = """import torch
asked = torch.cuda.init, torch.cuda.empty_cache, torch.cuda.set_device, torch.cuda.nvtx.mark
assert len(set(asked)) == len(asked)  # PyTorch's compiler looks functions up by what they are
"""


def test_functions_that_do_nothing_are_told_apart(tmp_path: Path) -> None:
    assert run(tmp_path, APART + BEGIN).recorder.recorded


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_one_operator_each_way(tmp_path: Path, kind: str) -> None:
    text = BEGIN.replace("torch.nn.Linear(8, 8)", f"torch.nn.{kind}(8, 8, batch_first=True)")
    text = text.replace("torch.ones(4, 8)", "torch.ones(2, 4, 8).cuda()").replace(".sum()", "[0].sum()")
    text = text.replace("optimizer = ", "model.cuda(); optimizer = ")
    recorder = run(tmp_path, text).recorder
    names = [str(node.target) for node in recorder.graph.nodes if "rnn" in str(node.target)]
    assert names == ["cudnn.rnn.default", "cudnn.rnn_backward.default"]
    assert not recorder.warnings


def test_recurrent_layers_of_other_kinds_are_told(tmp_path: Path) -> None:
    text = BEGIN.replace("torch.nn.Linear(8, 8)", "torch.nn.LSTM(8, 8, proj_size=4)").replace(
        ".sum()", "[0].sum()"
    )
    (told,) = run(tmp_path, text).recorder.warnings
    assert told.startswith("train.py:7 runs 'lstm' with projections step by step")


PACKED = """
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
model = torch.nn.{kind}(8, 16, bidirectional=True).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    rows = pack_padded_sequence(torch.ones(6, 3, 8, device="cuda"), {lengths}, enforce_sorted=False)
    assert rows.data.is_cuda and not rows.batch_sizes.is_cuda
    made = model(rows)[0]
    out, lengths = pad_packed_sequence(made)
    assert out.shape == {shape} and out.is_cuda
    (out.sum() + made.data.sum()).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3)])
@pytest.mark.parametrize("lengths", ["[2, 5, 3]", "torch.tensor([2, 5, 3])", "torch.tensor([2, 5, 3]).cuda()"])
def test_recurrent_layers_of_packed_sequences_are_one_operator_of_all_rows(
    tmp_path: Path, kind: str, gates: int, lengths: str
) -> None:
    if "cuda" in lengths:
        lengths += ".cpu()"
    text = PACKED.format(kind=kind, lengths=lengths, shape=(5, 3, 32))
    text = text.replace("out.shape", "lengths.tolist() == [2, 5, 3] and out.shape")
    recorder = run(tmp_path, text).recorder
    forward, backward = [node for node in recorder.graph.nodes if "rnn" in str(node.target)]
    assert not recorder.warnings
    shapes = [tuple(value.shape) for value in (forward.meta["val"][0], forward.args[0].meta["val"])]
    assert shapes == [(10, 1, 32), (10, 1, 8)]
    products = [tuple(weight.meta["val"].shape) for weight in forward.args[2]][:2]
    assert products == [(gates * 16, 8), (gates * 16, 16)] and backward.args[-1] is forward.args[-1]


def test_of_packed_sequences_whose_lengths_nobody_has_all_steps_are_taken(tmp_path: Path) -> None:
    lengths = "(torch.randn(3, 6, device='cuda') > 0).sum(1).cpu()"
    recorder = run(tmp_path, PACKED.format(kind="GRU", lengths=lengths, shape=(6, 3, 32))).recorder
    assert any("packs sequences, whose lengths values decide: all steps" in told for told in recorder.warnings)
    wrong = PACKED.format(kind="GRU", lengths="[7, 5, 3]", shape=(6, 3, 32))
    assert "Lengths [7, 5, 3] of 3 sequences" in refused(tmp_path, wrong)


TRACED = """
import torch
model = torch.jit.trace(torch.nn.Linear(8, 8).cuda(), torch.randn(4, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    made = model(torch.randn(4, 8).cuda())
    counted = torch.bincount(made.argmax(1), minlength=8)
    assert counted.shape == (8,)
    scores = made.view(4, 1, 8).log_softmax(-1)
    labels = torch.full((1, 2), 3).cuda()
    lengths = torch.tensor([4]), made.argmax(1)[:1] if step else torch.tensor([2])
    torch.nn.functional.ctc_loss(scores, labels, *lengths).backward()
    optimizer.step()
"""


def test_what_is_traced_counted_and_aligned(tmp_path: Path) -> None:
    recorder = run(tmp_path, TRACED).recorder
    names = [str(node.target) for node in recorder.graph.nodes]
    assert {"aten.addmm.default", "aten.bincount.default", "aten._ctc_loss.default"} <= set(names)
    (told,) = recorder.warnings
    assert "takes target_lengths of sequences, which values decide: all are 2" in told


OLDER = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    out = model(torch.randn(4, 8).cuda())
    flat = (out == 0).prod(-1, keepdim=True, dtype=torch.uint8)
    loss = torch.where(flat, torch.zeros(1).cuda(), out).where(flat, out).sum()
    print(loss.data[0], torch.zeros(1)[0][0].item())
    loss.backward()
    optimizer.step()
"""


def test_masks_of_bytes_and_the_first_of_a_number_are_as_they_were(tmp_path: Path) -> None:
    notes = " ".join(run(tmp_path, OLDER).recorder.notes)
    assert "where takes no mask of bytes any more" in notes
    assert "train.py:9 takes the first of a tensor without dimensions" in notes
    assert "IndexError" in refused(tmp_path, OLDER.replace("data[0]", "data[1]"))


def test_who_raises_says_why_himself_and_a_package_before_the_scripts_own_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements.txt").write_text("numpy==1.2\n")
    assert "numpy" not in refused(tmp_path, "raise ValueError('wrong')\n" + BEGIN)
    package = tmp_path / "site-packages" / "held"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "held.py").write_text("load = 1")
    text = f"import sys\nsys.path.append({str(tmp_path / 'core')!r})\nimport held\nheld.load\n"
    assert "the package held comes before the script's own core/held.py" in refused(tmp_path, text + BEGIN)


CONFIGURED = """import triton
configs = [triton.Config({"BLOCK": size}, num_warps=4) for size in (64, 32)]
least = min(configs, key=lambda config: config.kwargs["BLOCK"] * config.num_stages)
assert least.kwargs == {"BLOCK": 32} and least.num_warps == 4


@triton.autotune(configs=configs, key=[])
@triton.jit
def kernel():
    pass


"""


def test_configurations_of_triton_can_be_read_back(tmp_path: Path) -> None:
    assert run(tmp_path, CONFIGURED + BEGIN).recorder.recorded


def echoc(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from echograph.cli.echoc import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_captures_with_and_without_a_gpu(tmp_path: Path) -> None:
    script, job = tmp_path / "train.py", tmp_path / "job.pb"
    script.write_text(BEGIN + "    if loss > 3:\n        model.cuda()\n")
    given = ("capture", "torch", "--script", str(script), "--world-size", "16", "-o", str(job), "--json")
    for which, device, status in (("no", "cpu", 0), ("yes", "cuda", 0), ("yes", "cpu", 1)):
        done = echoc(*given, "--device", device, "--decide", f"train.py:11={which}")
        assert done.returncode == status, done.stderr
        if status == 0:
            assert json.loads(done.stdout)["ranks"] == 16
    assert done.stderr.splitlines()[-1].startswith("echoc: train.py:12: ")  # what takes long says so before
    assert "--decide train.py:11=" in echoc(*given).stderr
    assert echoc(*given, "--decide", "11").returncode == 2
    assert echoc(*given, "--device", "tpu").returncode == 2
    assert echoc("capture", "megatron", *given[2:], "--device", "cpu").returncode == 2
