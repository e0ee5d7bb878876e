"""A capture imports what its script needs, and its hooks are there from where that is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echograph.frontend.scripts.adapter import once_imported, replaced

PLAIN = """import sys, torch
import torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear({width}, {width}, bias=False).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.ones(4, {width}, device="cuda")).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    heavy = ("torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.fsdp", "torch.utils.cpp_extension")
    assert not (found := [name for name in heavy if name in sys.modules]), found
"""


def capture(folder: Path, script: str) -> tuple[int, int, str]:
    """Exit status, peak of memory in KiB, and what stderr says of a capture for eight ranks."""
    (folder / "train.py").write_text(script)
    words = ["capture", "torch", "--script", "train.py", "--world-size", "8", "-o", "job.pb"]
    code = "from echograph.cli.echoc import main; main()"
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
    return status, used.ru_maxrss, (folder / "errors").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "wait4"), reason="this system cannot tell what a process used")
def test_a_plain_script_imports_no_compiler_and_writes_no_memory_of_buckets(tmp_path: Path) -> None:
    status, small, errors = capture(tmp_path, PLAIN.format(width=64))
    assert status == 0, errors
    status, large, errors = capture(tmp_path, PLAIN.format(width=16384))  # 1 GiB of gradients
    assert status == 0, errors
    assert large - small < 200 * 2**10


def test_hooks_are_there_from_the_import_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_late.py").write_text("answer = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_late", raising=False)
    finders = list(sys.meta_path)

    @contextmanager
    def hooks() -> Iterator[None]:
        with replaced(sys.modules["made_late"], "answer", 2):
            yield

    for _ in range(2):  # the second time it is there from the start
        with once_imported("made_late", hooks):
            import made_late  # type: ignore[import-not-found]

            assert made_late.answer == 2
            assert made_late.__loader__ is made_late.__spec__.loader
            assert type(made_late.__loader__).__name__ == "SourceFileLoader"
        assert made_late.answer == 1
        assert sys.meta_path == finders
    del sys.modules["made_late"]
    with once_imported("made_late", hooks):
        pass
    assert "made_late" not in sys.modules
    assert sys.meta_path == finders
