"""Fake process groups: the environment that a launcher would set, and groups of ranks that answer at once."""

from __future__ import annotations

import copy
import inspect
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from echograph.errors import CaptureError, UsageError
from echograph.frontend.scripts import mpi
from echograph.frontend.scripts.adapter import patched, replaced

MAX_SIZE = 1 << 17
Place = Callable[[], Hashable]
"""Says where in training the script is."""
Shared = tuple[tuple[int, ...], Hashable, int]
"""A call in which ranks add up or gather: of which ranks, where in training, the how many-th of these there."""
NO_GPU = (
    "asks for a GPU, and --device cpu captures without: leave that out, or ask torch.cuda.is_available() first"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank of a job, as a launcher (`torchrun`) places it.

    Attributes:
        rank: which one the script runs as.
        size: ranks of the job.
        local_size: ranks of a machine.
        gpus: whether it has a GPU for each of them.
        launched: whether a launcher started it, and told it ranks by its environment; else `python` alone did.
        decided: which way the script goes at lines (`file.py:line`) where a tensor's value decides, or how many
            elements it finds there.
        asked: those of `decided` that the script came to; worlds that are copies share it.
        told: objects that ranks which ran before told all others; worlds that are copies share it.
        unlike: calls to which ranks give different integers: what comes out of them is not known.
        given: what the rank gave to such calls; None where it is no integer that the host knows.
        rested: lines of the script that read integers which rest on ranks having given the same.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 8
    gpus: bool = True
    launched: bool = True
    decided: Mapping[str, bool | int] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set, compare=False, repr=False)
    told: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict, compare=False, repr=False)
    unlike: frozenset[Shared] = frozenset()
    given: dict[Shared, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    rested: list[str] = field(default_factory=list, init=False, compare=False, repr=False)
    _calls: Counter[tuple[Any, ...]] = field(default_factory=Counter, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE or not 0 <= self.rank < self.size or self.local_size < 1:
            raise UsageError(
                f"rank {self.rank} of {self.size}, {self.local_size} a machine: give 1 to {MAX_SIZE:,} ranks, at "
                "least one a machine"
            )

    @property
    def local_rank(self) -> int:
        """Number of the rank on its machine."""
        return self.rank % self.local_size

    @property
    def environment(self) -> dict[str, str]:
        """What `torchrun` tells a process by its environment."""
        on_machine = min(self.local_size, self.size)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(on_machine),
            "GROUP_RANK": str(self.rank // self.local_size),
            "GROUP_WORLD_SIZE": str(-(-self.size // self.local_size)),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "echograph",
        }

    @contextmanager
    def entered(self, place: Place) -> Iterator[None]:
        """In the context, this process is the rank; groups that were made in it are gone after it.

        Args:
            place: where in training the script is.
        """
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        before = dict(os.environ)
        if self.launched:
            os.environ.update(self.environment)
        else:
            for name in self.environment:  # of whatever the capture itself runs under
                os.environ.pop(name, None)
        self._calls.clear()
        try:
            with ExitStack() as stack:
                enter = stack.enter_context
                enter(mpi.present(self.rank, self.size))
                enter(patched(distributed_c10d, "rendezvous", self._rendezvous))
                asked: dict[Any, str] = {}
                enter(patched(distributed_c10d, "_new_process_group_helper", partial(self._fake_group, asked)))
                enter(patched(distributed_c10d, "_get_default_timeout", _of_gloo))
                enter(replaced(distributed_c10d, "_store_based_barrier", _nothing))
                for owner in (distributed_c10d, dist):
                    enter(replaced(owner, "broadcast_object_list", self._tell))
                    enter(patched(owner, "broadcast", self._tell_values))
                    enter(patched(owner, "all_reduce", partial(_added_up, self, place)))
                    for name in filter(partial(hasattr, owner), _GATHERS):
                        enter(patched(owner, name, partial(_gathered, self, place)))
                    for name in filter(partial(hasattr, owner), _EXCHANGES):
                        enter(patched(owner, name, partial(_exchanged, self, place)))
                    enter(patched(owner, "get_backend", lambda f: _backend(asked, f)))
                    enter(patched(owner, "get_backend_config", partial(self._backend_config, asked)))
                    for name, stand_in in _ALONE.items():
                        enter(replaced(owner, name, stand_in))
                yield
        finally:
            if dist.is_initialized():
                _destroy()
            os.environ.clear()
            os.environ.update(before)

    def _tell(
        self, object_list: list[Any], src: int | None = None, group: Any = None, *_: Any, **given: Any
    ) -> None:
        """Broadcasts objects: those of a rank that ran before, as it was the n-th of a group to tell.

        Where it did not run, ranks are taken to have the same.
        """
        src, call = self._call("objects", src, group, given)
        if self.rank == src:
            with suppress(Exception):  # what cannot be copied is not told
                self.told[call] = copy.deepcopy(object_list)
        elif call in self.told:
            object_list[:] = copy.deepcopy(self.told[call])

    def _call(
        self, kind: str, src: int | None, group: Any, given: Mapping[str, Any]
    ) -> tuple[int, tuple[Any, ...]]:
        """Who tells, and the name of the call: the n-th of its kind in which that rank tells that group."""
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(group))
        if src is None:
            src = ranks[given.get("group_src") or 0]
        self._calls[kind, src, ranks] += 1
        return src, (kind, src, ranks, self._calls[kind, src, ranks])

    def alike(self, given: Any, group: Any, place: Hashable) -> Any:
        """What the host knows of a value that ranks add up or gather, where all are taken to give the same.

        It is kept, for that of another rank to be held against; where those are `unlike`, nobody knows.
        """
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(group))
        self._calls["shared", ranks, place] += 1
        call = ranks, place, self._calls["shared", ranks, place]
        self.given[call] = None if given is None or given.is_floating_point() else given
        return None if call in self.unlike else given

    def _tell_values(self, original: Any) -> Any:
        """A broadcast of values that the host knows: who tells keeps them, ranks that run later have them."""
        from echograph.frontend.pytorch.known_values import copied, know, told

        def broadcast(tensor: Any, src: int | None = None, group: Any = None, *args: Any, **given: Any) -> Any:
            known = told(tensor)
            work = original(tensor, src, group, *args, **given)
            first, call = self._call("values", src, group, given)
            if self.rank == first:
                self.told[call] = [known]
            elif call in self.told:
                known = self.told[call][0]
            else:
                known = None
            if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
                know(tensor, copied(known))
            return work

        return broadcast

    def _rendezvous(self, original: Any) -> Any:
        del original
        here = os.getpid()

        def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            if os.getpid() != here:
                os._exit(0)  # a rank of its own, which the script forked: it is not this one
            if not self.launched and url.startswith("env://") and "RANK" not in os.environ and rank == -1:
                raise KeyError("RANK")
            if world_size not in (-1, self.size) or rank not in (-1, self.rank):
                raise CaptureError(
                    f"the script starts its process group as rank {rank} of {world_size}, and is run as rank "
                    f"{self.rank} of {self.size}: give --world-size {max(1, world_size)}"
                )
            yield FakeStore(), self.rank, self.size

        return rendezvous

    def _fake_group(self, asked: dict[Any, str], original: Any) -> Any:
        """Makes every process group one of the backend "fake", whose operations end at once.

        Which one the script asked for is written down, since it is told that it has that (`_backend`).
        """
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.distributed import distributed_c10d
        from torch.testing._internal.distributed.fake_pg import FakeStore

        def make(size: int, rank: int, ranks: Any, backend: Any, store: Any, name: Any, **named: Any) -> Any:
            del store
            if not self.gpus and str(backend) == "nccl":
                raise CaptureError(f"the backend 'nccl' {NO_GPU}")
            named |= {"backend_options": None, "device_id": None}
            fake = distributed_c10d.Backend("fake")
            with unset_fake_temporarily():
                made = original(size, rank, ranks, fake, FakeStore(), name, **named)
            # A group that nobody says the backend of takes that of all ranks, which PyTorch knows as "fake".
            whole = next(iter(asked.values()), str(backend))
            asked[made[0]] = whole if str(backend) == "fake" else str(backend)
            return made

        return make

    def _backend_config(self, asked: Mapping[Any, str], original: Any) -> Any:
        """`get_backend_config`, of what was asked for."""

        def config(group: Any = None) -> str:
            from torch.distributed import distributed_c10d

            there = original(group)
            named = asked.get(group or distributed_c10d._get_default_group())
            if named is None or (named == "undefined" and not self.gpus):
                return str(there)
            known = "cuda:nccl" if named == "undefined" else named
            return str(distributed_c10d.BackendConfig(distributed_c10d.Backend(known)))

        return config


def _destroy() -> None:
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        dist.destroy_process_group()


def _backend(asked: Mapping[Any, str], original: Any) -> Any:
    """`get_backend`, by which scripts and PyTorch itself choose among operations: what was asked for."""

    def backend(group: Any = None) -> Any:
        from torch.distributed import distributed_c10d

        there = original(group)
        return distributed_c10d.Backend(asked.get(group or distributed_c10d._get_default_group(), there))

    return backend


def _nothing(*_: Any, **__: Any) -> None:
    """There is nobody to wait for."""


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *_: Any, **__: Any
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def differing(one: World, other: World) -> frozenset[Shared]:
    """The calls to which two ranks that ran gave different integers."""
    both = [(call, given) for call, given in one.given.items() if given is not None and other.rank in call[0]]
    return frozenset(call for call, given in both if not _equal(given, other.given.get(call)))


def _equal(one: Any, other: Any) -> bool:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        # One that ended before it, or has another shape, says nothing.
        return other is None or one.shape != other.shape or bool((one == other).all())


def _added_up(world: World, place: Place, original: Any) -> Any:
    """`all_reduce` of values that the host knows: ranks are taken to have the same."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import _disable_current_modes

    from echograph.frontend.pytorch.known_values import rewritten, told

    kinds = dist.ReduceOp
    same = (kinds.AVG, kinds.MAX, kinds.MIN, kinds.BAND, kinds.BOR)

    def all_reduce(tensor: Any, op: Any = kinds.SUM, group: Any = None, async_op: bool = False) -> Any:
        made = world.alike(told(tensor) if op == kinds.SUM or op in same else None, group, place())
        if made is not None and op == kinds.SUM:
            with _disable_current_modes():
                made = made * dist.get_world_size(group)
        with rewritten([tensor], tensor, made):
            return original(tensor, op, group, async_op)

    return all_reduce


def _gathered(world: World, place: Place, original: Any) -> Any:
    """`all_gather`, into a list or one tensor, of values that the host knows: ranks are taken to have the same."""
    from echograph.frontend.pytorch.known_values import rewritten, told

    def gather(*args: Any, **kwargs: Any) -> Any:
        # The functions name their arguments in different ways, in this order.
        output, given = (*args, *kwargs.values())[:2]
        made = world.alike(told(given), kwargs.get("group", args[2] if len(args) > 2 else None), place())
        with rewritten(output if isinstance(output, list) else [output], given, made):
            return original(*args, **kwargs)

    return gather


def _exchanged(world: World, place: Place, original: Any) -> Any:
    """`all_to_all_single` of integers that the host knows, in equal parts: ranks are taken to give the same."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import _disable_current_modes

    from echograph.frontend.pytorch.known_values import rewritten, told

    asked = inspect.signature(original)

    def exchange(*args: Any, **kwargs: Any) -> Any:
        said = asked.bind(*args, **kwargs).arguments
        output, given, group = said["output"], said["input"], said.get("group")
        whole = not said.get("output_split_sizes") and not said.get("input_split_sizes")
        if not whole or given.is_floating_point() or output.shape != given.shape:
            return original(*args, **kwargs)
        made = world.alike(told(given), group, place())
        if made is not None:
            with _disable_current_modes():
                made = made.reshape(dist.get_world_size(group), -1)[dist.get_rank(group)]
                made = made.repeat(dist.get_world_size(group)).reshape(given.shape)
        with rewritten([output], given, made):
            return original(*args, **kwargs)

    return exchange


def _of_gloo(original: Any) -> Any:
    """The default time limit, without a warning that this PyTorch has no NCCL."""
    return lambda _: original("gloo")


_EXCHANGES = ("all_to_all_single",)
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single")
# Ranks are taken to have the same objects: these tell settings to each other, before training.
_ALONE: dict[str, Any] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "monitored_barrier": _nothing,
}
