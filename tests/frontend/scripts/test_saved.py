"""Of weights that others wrote, shapes and types are read, by whichever function asks."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from echograph.errors import CaptureError
from echograph.frontend.scripts.process import CaptureProcess
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.saved import _MARK, Overwritten, put_back
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

LOADED = """import inspect, torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import DataLoader
assert list(inspect.signature(DataLoader.__init__).parameters)[1:3] == ["dataset", "batch_size"]
with safe_open("w.safetensors", framework="pt", device="cuda:0") as file:
    assert sorted(file.keys()) == ["bias", "weight"] and file.metadata() == {"format": "pt"}
    assert file.get_slice("weight").get_shape() == [4, 8] and file.get_slice("weight").get_dtype() == "BF16"
    assert file.get_slice("weight")[:2].shape == (2, 8)
    held = {name: file.get_tensor(name) for name in file.keys()}
assert held["weight"].is_cuda and load_file("w.safetensors")["bias"].dtype == torch.float32
model = torch.nn.Linear(8, 4).bfloat16().cuda()
model.load_state_dict(held)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(4, 8, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
"""


def test_headers_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors")
    import torch
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    tensors = {"weight": torch.ones(4, 8, dtype=torch.bfloat16), "bias": torch.ones(4)}
    save_file(tensors, "w.safetensors", metadata={"format": "pt"})
    original = safetensors.safe_open
    path = tmp_path / "train.py"
    path.write_text(LOADED)
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded
    assert safetensors.safe_open is original


STREAMED = """import io, torch
model = torch.nn.Linear(8, 4).cuda()
stream = io.BytesIO()
torch.save({"model": model.state_dict(), "seen": 3}, stream)
with open("kept.pt", "wb") as file:
    file.write(stream.getvalue())
stream.seek(0)
for held in (torch.load(stream), torch.load("kept.pt"), torch.load(open("kept.pt", "rb"))):
    assert held["seen"] == 3 and held["model"]["weight"].shape == (4, 8)
    model.load_state_dict(held["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_what_is_saved_into_a_stream_is_where_its_bytes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(STREAMED)
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded
    assert sorted(file.name for file in tmp_path.iterdir()) == ["train.py"]
    (tmp_path / "kept.pt").write_bytes(_MARK + b"0" * 32)
    path.write_text("import torch\ntorch.load('kept.pt')\n")
    with pytest.raises(CaptureError, match=r"^train\.py:2: .*kept\.pt: a capture that has ended wrote it"):
        run_script(Script(path=path), World(), TorchAdapter())


WRITTEN = """import io, torch
from pathlib import Path
model = torch.nn.Linear(8, 4).cuda()
stream = io.BytesIO()
torch.save(model.state_dict(), stream)
Path("{name}").write_bytes(stream.getvalue())
with open("{name}.2", "wb") as file:
    torch.save(model.state_dict(), file)
with open("own.bin", "wb") as file:
    file.write(b"new")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_files_that_were_there_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(WRITTEN.format(name="last.pt"))
    for name in ("last.pt", "last.pt.2", "own.bin"):
        (tmp_path / name).write_bytes(b"a day's training")
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded
    assert {name: (tmp_path / name).read_bytes() for name in ("last.pt", "last.pt.2")} == {
        "last.pt": b"a day's training", "last.pt.2": b"a day's training",
    }  # fmt: skip
    assert (tmp_path / "own.bin").read_bytes() == b"new"  # the script's own doing
    path.write_text(WRITTEN.format(name="other.pt") + "    raise ValueError\n")
    with pytest.raises(CaptureError):
        run_script(Script(path=path), World(), TorchAdapter())
    assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "os.execv('/bin/true', ['true'])"])
def test_of_a_script_that_ends_its_process_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("import os\n" + WRITTEN.format(name="last.pt").partition("optimizer")[0] + end + "\n")
    (tmp_path / "last.pt").write_bytes(b"a day's training")
    with CaptureProcess(Script(path=path), World(), TorchAdapter()) as running, pytest.raises(CaptureError):
        running.result()
    assert (tmp_path / "last.pt").read_bytes() == b"a day's training"
    assert not (tmp_path / "last.pt.2").exists()


def test_processes_keep_files_in_one_folder(tmp_path: Path) -> None:
    """A forked process knows of what was kept before, and not of what its parent keeps."""
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("parent", "child"):
        (tmp_path / name).write_text(name)
        Overwritten(kept).opening(str(tmp_path / name), "w")
    assert sorted(path.read_text() for path in kept.glob("*/*") if path.read_text() in ("parent", "child")) == [
        "child", "parent",
    ]  # fmt: skip
    put_back(kept)
    assert not kept.exists()


MOVED = """import os, shutil, torch
model = torch.nn.Linear(8, 4).cuda()
torch.save(model.state_dict(), "new.pt")
assert os.path.getsize("new.pt")
shutil.copyfile("new.pt", "best.pt")
os.replace("new.pt", "last.pt")
os.makedirs("part")
torch.save({"seen": 3}, "part/model.pt")
os.rename("part", "whole")
assert torch.load("whole/model.pt") == {"seen": 3} and torch.load("best.pt")["weight"].shape == (4, 8)
model.load_state_dict(torch.load("last.pt", weights_only=True))
try:
    torch.load("new.pt")
except FileNotFoundError:
    pass
else:
    raise SystemExit(5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_what_is_saved_is_copied_and_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(MOVED)
    for name in ("last.pt", "best.pt"):
        (tmp_path / name).write_bytes(b"a day's training")
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert files == {"last.pt", "best.pt", "train.py"}
    assert {(tmp_path / name).read_bytes() for name in ("last.pt", "best.pt")} == {b"a day's training"}


TOGETHER = """import torch, torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
dist.init_process_group("cpu:gloo,cuda:nccl")
model = torch.nn.Linear(8, 8).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    all_of_it = {"model": of_model, "optimizer": of_optimizer}
    checkpoints.save(all_of_it, checkpoint_id=f"saved/{step}")
    checkpoints.async_save(all_of_it, checkpoint_id=f"beside/{step}").result()
    checkpoints.load(all_of_it, checkpoint_id=f"saved/{step}")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    model(torch.ones(2, 8).cuda()).sum().backward()
    optimizer.step()
"""


def test_ranks_write_no_checkpoint_together_and_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(TOGETHER)
    recorder = run_script(Script(path=path), World(size=4), TorchAdapter()).recorder
    assert any("torch.distributed.checkpoint writes nothing" in note for note in recorder.notes)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["train.py"]


SAFE = """import torch
from safetensors.torch import load_file, save_file, save_model
model = torch.nn.Linear(2048, 2048).cuda()
save_model(model, "model.safetensors", {"format": "pt"})
save_file({"half": torch.ones(3, 5).half()}, "new.safetensors")
assert load_file("new.safetensors")["half"].shape == (3, 5)
model.load_state_dict(load_file("model.safetensors"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 2048).cuda()).sum().backward()
    optimizer.step()
"""


def test_files_of_safetensors_that_a_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tensors have no memory that could be written, and what lay there before is as it was."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SAFE)
    (tmp_path / "model.safetensors").write_bytes(b"a day's training")
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", "train.py"]
    assert (tmp_path / "model.safetensors").read_bytes() == b"a day's training"


PICKLED = """import pickle, subprocess, sys, torch
from torch.utils._python_dispatch import _disable_current_modes
with _disable_current_modes():
    held = torch.tensor([3.0, 4.0])
told = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).tolist())"
made = subprocess.run([sys.executable, "-c", told], input=pickle.dumps(held), capture_output=True, check=True)
assert made.stdout == b"[3.0, 4.0]\\n", made.stdout
model = torch.nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_values_of_the_host_are_pickled_for_another_process(tmp_path: Path) -> None:
    """A process that was forked before, as of a data set's map, does not know what is kept here."""
    path = tmp_path / "train.py"
    path.write_text(PICKLED)
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded


def test_what_a_small_file_of_the_users_holds_is_known(tmp_path: Path) -> None:
    """Constants, indices; it lies where the script puts it. Weights keep their shapes alone."""
    torch.save((torch.arange(7), {"eye": torch.eye(3)}, torch.zeros(2000, 1000)), tmp_path / "given.pt")
    (tmp_path / "train.py").write_text(
        """
import torch
index, (eye,), weights = (lambda a, b, c: (a, b.values(), c))(*torch.load("given.pt"))
assert not torch.equal(eye, torch.zeros_like(eye))
assert torch.load("given.pt", map_location="cuda")[0].is_cuda
model = torch.nn.Linear(16, int(index.max()) + 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    (model(torch.ones(2, 16, device="cuda")).sum() + weights.cuda().sum()).backward()
    optimizer.step()
""".replace("given.pt", str(tmp_path / "given.pt"))
    )
    run = run_script(Script(path=tmp_path / "train.py"), World(size=1), TorchAdapter())
    assert any(tuple(node.meta["val"].shape) == (2, 7) for node in run.recorder.graph.nodes if "val" in node.meta)
    assert not run.recorder.warnings


MAKES_PICKLES = """import pickle, torch
data = {"sizes": torch.arange(3), "scale": torch.tensor(2.5), "weight": torch.nn.Parameter(torch.ones(2))}
with open("data.pkl", "wb") as file:
    pickle.dump(data, file)
torch.save(data, "data.pt")
"""
MAKES_PICKLES = """import pickle, torch
data = {"sizes": torch.arange(3), "scale": torch.tensor(2.5), "weight": torch.nn.Parameter(torch.ones(2))}
with open("data.pkl", "wb") as file:
    pickle.dump(data, file)
torch.save(data, "data.pt")
"""
OWN_PICKLES = """import io, pickle, gzip, torch
with open("data.pkl", "rb") as file:
    data = pickle.load(file)
assert data["sizes"].tolist() == [0, 1, 2] and data["scale"].item() == 2.5 and data["weight"].requires_grad
with open("data.pt", "rb") as file:
    assert torch.load(file)["sizes"].tolist() == [0, 1, 2]
with open("data.pt", "rb") as file:
    assert torch.load(io.BytesIO(file.read()))["sizes"].tolist() == [0, 1, 2]
model = torch.nn.Linear(8, 4).cuda()
for name, opened in (("data.pkl", open), ("new.pkl", open), ("new.pkl.gz", gzip.open)):
    with opened(name, "wb") as file:
        pickle.dump({"lr": 0.1, "model": model.state_dict()}, file)
    with opened(name, "rb") as file:
        assert pickle.load(file)["model"]["weight"].shape == (4, 8)
with open("settings.pkl", "wb") as file:
    pickle.dump({"lr": 0.1}, file)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_what_is_pickled_has_values_if_it_had_and_leaves_no_file_if_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("make.py").write_text(MAKES_PICKLES)
    runpy.run_path("make.py")
    whole = Path("data.pkl").read_bytes()
    Path("train.py").write_text(OWN_PICKLES)
    run = run_script(Script(path=tmp_path / "train.py"), World(), TorchAdapter())
    assert Path("data.pkl").read_bytes() == whole
    left = ["data.pkl", "data.pt", "make.py", "settings.pkl", "train.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    (told,) = (note for note in run.recorder.notes if "it is gone, or as it was before" in note)
    assert all(name in told for name in ("data.pkl", "new.pkl", "new.pkl.gz"))
