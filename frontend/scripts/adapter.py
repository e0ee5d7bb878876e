"""What a framework is to a capture of scripts: its shims and hooks, its mesh, and which of its ranks differ.

An adapter of a framework is a class derived from `Adapter` in a module of its own and a line in `ADAPTERS`. It is
made once per capture and serves the runs of all ranks, one after the other:

    class MyAdapter(TorchAdapter):
        name = "mine"
        packages = {"my_framework": "mine"}                    # import name -> extra that installs it
        tested = {"my-framework": ("1.4", "1.5")}              # distribution -> from, up to but without

        @contextmanager
        def installed(self, world, recorder):
            with super().installed(world, recorder), patched(my_framework.Engine, "forward", ...):
                yield

        def axes(self, world):
            return {"pp": 2, "dp": world.size // 2}            # outermost first

Most derive from `torch_adapter.TorchAdapter`, which does what scripts of plain PyTorch need (devices, data
loaders, wrappers such as DDP, values that are read). A hook is a function of the framework that is wrapped with
`patched` and tells the recorder where in the step it is: `recorder.in_phase`, `in_micro_batch`, `in_chunk`,
`carrying`, `pausing`, `step_begins`, `step_ends` (`recorder.ScriptRecorder` says what each means).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import update_wrapper
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import product
from math import prod
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from echograph.errors import CaptureError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from echograph.frontend.scripts.recorder import ScriptRecorder
    from echograph.frontend.scripts.world import World


class Adapter:
    """A framework. Attributes are of the class.

    Attributes:
        name: in `ADAPTERS`.
        packages: modules that it needs, and the extra that brings each.
        tested: distributions and the versions that the adapter was tested with: from, up to but without.
        counts_optimizer_steps: whether a training step ends where an outermost `torch.optim.Optimizer.step` does;
            an adapter that says no calls `recorder.step_ends()` itself.
        steady_step: the first training step that is as all later ones.
        stack: the software stack of its scripts, a word of `models.stacks`; "": not known.
        host: the framework whose layers were measured in place (`profiler/devices/host_work.toml`) and which its
            scripts run; "": none of them.
        compiles: modules whose functions are compiled one by one (`torch.compile`) where they are imported.
        runs_alone: whether its scripts run on one GPU without a launcher.
    """

    name: ClassVar[str] = ""
    packages: ClassVar[Mapping[str, str]] = {}
    tested: ClassVar[Mapping[str, tuple[str, str]]] = {}
    counts_optimizer_steps: ClassVar[bool] = True
    steady_step: ClassVar[int] = 2
    stack: ClassVar[str] = ""
    host: ClassVar[str] = ""
    compiles: ClassVar[tuple[str, ...]] = ()
    runs_alone: ClassVar[bool] = False

    def check(self) -> list[str]:
        """What is to be said of the installed versions, a line each.

        Raises:
            MissingExtraError: a package is not installed.
        """
        for package, extra in self.packages.items():
            if importlib.util.find_spec(package) is None:
                raise MissingExtraError(package, extra, f"capturing {self.name} scripts")
        return [line for name, bounds in self.tested.items() if (line := _other_version(name, *bounds))]

    def arguments(self, arguments: Sequence[str], config: Path | None) -> Sequence[str]:
        """What the script finds behind its name, where the user gave a configuration of the framework besides.

        Raises:
            UsageError: the framework has no such configuration.
        """
        if config is not None:
            raise UsageError(f"--config is for DeepSpeed: give a {self.name} script its arguments behind --")
        return arguments

    def launched(self, script: Path, arguments: Sequence[str], world: World) -> Sequence[str]:
        """The arguments as the framework's launcher gives them to one rank; by default those of the user."""
        del script, world
        return arguments

    def installed(self, world: World, recorder: ScriptRecorder) -> AbstractContextManager[None]:
        """The framework's shims and hooks, in place for one run of the script.

        Entered before the script starts and left when it has ended, however it did; nothing of it may stay.
        """
        raise NotImplementedError

    def axes(self, world: World) -> Mapping[str, int] | None:
        """Axes of the mesh and their sizes, outermost first; asked after a run, before `installed` is left.

        None: the groups that were used tell the axes (`mesh.infer`).
        """
        return None

    def meshes(self, world: World) -> list[Mapping[str, int]]:
        """Meshes as `axes` says one; the first of which all groups are formulas is taken."""
        axes = self.axes(world)
        return [] if axes is None else [axes]

    def roles(self, world: World, axes: Mapping[str, int], messages: Sequence[str]) -> list[int]:
        """Ranks of which each does something else, and which together stand for all; begins with rank 0.

        Args:
            world: of the first run.
            axes: of the mesh.
            messages: axes along which rank 0 sends messages to single ranks.

        Returns:
            By default one rank for each place on the axes of messages, the first of each of the others.
        """
        places = product(*(range(size) if name in messages else (0,) for name, size in axes.items()))
        return sorted(_number(place, tuple(axes.values())) for place in places)


def _number(place: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(at * prod(sizes[i + 1 :]) for i, at in enumerate(place))


def _other_version(distribution: str, low: str, high: str) -> str:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
    if numbers_of(low) <= numbers_of(version) < numbers_of(high):
        return ""
    return f"{distribution} {version}: tested with {low} up to {high}, what the capture sees may be incomplete"


def numbers_of(version: str) -> tuple[int, ...]:
    """A version as what compares: (0, 16, 1) of "0.16.1+cpu"."""
    parts = version.split("+")[0].split(".")
    return tuple(int(digits) for part in parts if (digits := "".join(filter(str.isdigit, part[:4]))))


@contextmanager
def patched(owner: Any, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """In the context, `owner.name` is `around(original)`.

    Args:
        owner: a module or class.
        name: of its attribute.
        around: original -> what stands in for it.

    Raises:
        CaptureError: the owner has no such attribute: the framework moved it.
    """
    where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    if not hasattr(owner, name):
        raise CaptureError(f"{where} has no '{name}' in this version: install one that is tested")
    own = name in vars(owner)
    original = vars(owner)[name] if own else None
    before = getattr(owner, name)
    value = around(before)
    if isinstance(value, FunctionType) and isinstance(before, FunctionType) and value.__closure__:
        # Libraries ask for the arguments of what they call: what was made for this place passes for what it wraps.
        update_wrapper(value, before)
        # `getfullargspec` looks at nothing that is wrapped.
        vars(value)["__signature__"] = inspect.signature(before)
    patch = owner, name, own, original, value
    _PATCHES[id(patch)] = patch
    setattr(owner, name, value)
    try:
        yield
    finally:
        del _PATCHES[id(patch)]
        _put_back(owner, name, own, original)


def _put_back(owner: Any, name: str, own: bool, original: Any) -> None:
    if own:
        setattr(owner, name, original)
    else:
        delattr(owner, name)


_PATCHES: dict[int, tuple[Any, str, bool, Any, Any]] = {}


@contextmanager
def unpatched() -> Iterator[None]:
    """In the context, what is patched is as it was: for what keeps the functions that it finds."""
    undone = list(_PATCHES.values())
    for owner, name, own, original, _ in reversed(undone):
        _put_back(owner, name, own, original)
    try:
        yield
    finally:
        for owner, name, *_, value in undone:
            setattr(owner, name, value)


def replaced(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """In the context, `owner.name` is a value; as `patched`."""
    return patched(owner, name, lambda _: value)


@contextmanager
def once_imported(name: str, hooks: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """In the context, hooks of a module are in place from where it is imported: most scripts need few.

    Args:
        name: of the module.
        hooks: makes them, once the module is there.
    """
    with ExitStack() as stack:
        if name in sys.modules:
            stack.enter_context(hooks())
            yield
            return
        watch = _Watch(name, lambda: stack.enter_context(hooks()))
        sys.meta_path.insert(0, watch)
        try:
            yield
        finally:
            watch.end()


class _Watch(MetaPathFinder, Loader):
    """Finds a module as others do, and says when it has been imported."""

    def __init__(self, name: str, then: Callable[[], Any]) -> None:
        self._name, self._then = name, then
        self._loader: Any = None
        self._finding = False

    def end(self) -> None:
        """It watches no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the finders behind this one find, to be imported by way of this one."""
        if name != self._name or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        if spec is not None:  # of who imports it, or asks only whether it is there
            self._loader, spec.loader = spec.loader, self
        return spec

    def __getattr__(self, name: str) -> Any:
        """What else its own loader has: `runpy` asks for the code of a module that it runs."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader does, which it then has; and it is there, anew if it is imported once more."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Refuses ranks that the world does not have.

    Raises:
        UsageError: names the rank.
    """
    for rank in ranks:
        if not 0 <= rank < size:
            raise UsageError(f"--ranks {rank}: the world has ranks 0 to {size - 1}")
