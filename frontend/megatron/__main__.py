"""Runs a Megatron script that is written for GPUs on the CPUs of this machine: small models, to try it out.

    torchrun --nproc-per-node 2 -m echograph.frontend.megatron pretrain.py --distributed-backend gloo ...

The script is not edited; its arguments, output and exit code are its own.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from echograph.frontend.megatron.shims import shimmed
from echograph.frontend.scripts import device
from echograph.frontend.scripts.world import World


def main() -> None:
    """Runs `sys.argv[1]` with what follows it."""
    if len(sys.argv) < 2:
        sys.exit("usage: torchrun ... -m echograph.frontend.megatron SCRIPT [arguments of the script]")
    rank, size, on_machine = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))
    )
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    with shimmed(), device.present(World(rank=rank, size=size, local_size=on_machine)):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
