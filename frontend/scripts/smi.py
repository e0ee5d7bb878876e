"""`nvidia-smi`, where the machine has none: scripts ask it for the memory of the GPUs that they find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.saved import kept_in
from echograph.frontend.scripts.values import NoteTaker

_COMMAND = "nvidia-smi"
# It ends as NVIDIA's does where it is asked for what the GPU of a capture has not.
_PROGRAM = """#!{python} -IS
import sys
fields, count = {fields!r}, {count}
asked = next((a.split("=", 1)[1] for a in sys.argv if a.startswith("--query-gpu=")), None)
form = next((a.split("=", 1)[1] for a in sys.argv if a.startswith("--format=")), "csv").split(",")
names = [name.strip() for name in (asked or "").split(",")]
if asked is None or any(name not in fields for name in names):
    sys.exit("nvidia-smi: the GPU of a capture answers --query-gpu of " + ", ".join(fields))
if "noheader" not in form:
    print(", ".join(names))
for gpu in range(count):
    values = [str(gpu) if name == "index" else fields[name] for name in names]
    print(", ".join(v.removesuffix(" MiB").removesuffix(" %") if "nounits" in form else v for v in values))
"""


@contextmanager
def answering(fields: Mapping[str, str], count: int, note: NoteTaker) -> Iterator[None]:
    """In the context, `nvidia-smi` answers `--query-gpu`; a machine that has it keeps its own.

    Args:
        fields: what it knows of a GPU, with units.
        count: GPUs of the machine.
        note: is told that it was asked.
    """
    if shutil.which(_COMMAND) is not None:
        yield
        return

    def telling(original: Callable[..., None]) -> Callable[..., None]:
        def start(popen: Any, args: Any, *given: Any, **named: Any) -> None:
            if _COMMAND in str(args):
                note(f"{_COMMAND} answers as the GPUs of a capture: nothing of their memory is in use")
            original(popen, args, *given, **named)

        return start

    with (
        tempfile.TemporaryDirectory(prefix="echograph-", dir=kept_in()) as folder,
        patched(subprocess.Popen, "__init__", telling),
    ):
        program = Path(folder, _COMMAND)
        program.write_text(_PROGRAM.format(python=sys.executable, fields=dict(fields), count=count))
        program.chmod(0o700)
        before = os.environ.get("PATH", "")
        os.environ["PATH"] = f"{before}{os.pathsep}{folder}"
        try:
            yield
        finally:
            os.environ["PATH"] = before
