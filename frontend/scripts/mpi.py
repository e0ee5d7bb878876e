"""What mpi4py tells a script of the ranks that `mpirun` started: stands in for it, installed or not, in a run.

Ranks are taken to have the same objects. A communicator of some of the ranks is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from echograph.errors import CaptureError

_NAMES = ("mpi4py", "mpi4py.MPI")


class Communicator:
    """`MPI.COMM_WORLD` of pickled objects, those methods whose names are in small letters.

    Args:
        rank: of the script.
        size: ranks of the job.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def Get_rank(self) -> int:
        """The rank."""
        return self.rank

    def Get_size(self) -> int:
        """How many ranks there are."""
        return self.size

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """What another rank tells is what this one has."""
        del root
        return obj

    def barrier(self) -> None:
        """There is nobody to wait for."""

    Barrier = barrier

    def allgather(self, sendobj: Any) -> list[Any]:
        """One for each rank."""
        return [sendobj] * self.size

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """One for each rank, on one of them."""
        return self.allgather(sendobj) if self.rank == root else None

    def scatter(self, sendobj: Any = None, root: int = 0) -> Any:
        """The rank's own, where this one has them."""
        del root
        return None if sendobj is None else sendobj[self.rank]

    def allreduce(self, sendobj: Any, op: Any = "SUM") -> Any:
        """The sum over the ranks; of equal ones the largest, smallest, ... is the same."""
        return sendobj * self.size if op == "SUM" else sendobj

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(
            f"mpi4py's communicator is asked for '{name}', which is not captured: let ranks communicate by "
            "torch.distributed"
        )


@contextmanager
def present(rank: int, size: int) -> Iterator[None]:
    """In the context, `from mpi4py import MPI` gives the ranks of the job.

    Args:
        rank: of the script.
        size: ranks of the job.
    """
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "mpi4py"}
    package, mpi = (ModuleType(name) for name in _NAMES)
    for module in (package, mpi):
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    contents: dict[str, Any] = {"COMM_WORLD": Communicator(rank, size), "COMM_SELF": Communicator(0, 1)}
    contents |= {op: op for op in ("SUM", "MAX", "MIN", "LAND", "LOR")}
    vars(mpi).update(contents, Is_initialized=lambda: True, Init=lambda: None, Finalize=lambda: None)
    vars(package).update(MPI=mpi, __path__=[])
    sys.modules |= dict(zip(_NAMES, (package, mpi), strict=True))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
            del sys.modules[name]
        sys.modules |= before
