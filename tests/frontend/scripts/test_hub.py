"""What a script writes to the Hugging Face hub is passed over, with a note, and answered as the hub would."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.errors import CaptureError
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

STEPS = """
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
"""
PUSHES = """
from huggingface_hub import CommitInfo, HfApi, create_repo, login, upload_folder, whoami
login(token="hf_none")
assert create_repo("small", exist_ok=True).repo_id == whoami()["name"] + "/small"
job = upload_folder(repo_id="lab/small", folder_path=".", run_as_future=True)
assert job.done() and isinstance(job.result(), CommitInfo)
made = HfApi().upload_file(path_or_fileobj=b"", path_in_repo="a", repo_id="lab/small", commit_message="said")
assert made.repo_url.repo_id == "lab/small" and made.commit_message == "said"
HfApi().create_tag("lab/small", tag="v1")
"""


def run(folder: Path, text: str) -> list[str]:
    (folder / "train.py").write_text(text)
    return run_script(Script(path=folder / "train.py"), World(), TorchAdapter()).recorder.notes


def test_what_is_pushed_is_passed_over(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    before = hub.HfApi.create_repo, hub.create_repo, hub.login
    notes = "\n".join(run(tmp_path, PUSHES + STEPS))
    for line, name in (
        (3, "login"),
        (4, "create_repo"),
        (5, "upload_folder"),
        (7, "upload_file"),
        (9, "create_tag"),
    ):
        assert f"train.py:{line} calls '{name}' of the Hugging Face hub: a capture writes nothing there" in notes
    assert (hub.HfApi.create_repo, hub.create_repo, hub.login) == before


def test_a_network_that_is_not_there_is_no_other_version(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="it is downloaded, and is not here"):
        run(tmp_path, 'raise RuntimeError("[Errno -2] Name or service not known")')
