"""What lives through the steps of a script: parameters, buffers, gradients, optimizer state, each with its name.

Tensors are told apart by the memory that they lie in, since wrappers of all kinds (DDP's buckets, FSDP's and
ZeRO's flat parameters) make further tensors of the same memory. What ranks have shares of is known with the groups
of ranks that share it: of PyTorch's own wrappers here, of frameworks as their adapters say
(`LivingTensors.state_providers`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.multiprocessing import reductions
from torch.optim import Optimizer

from echograph.frontend.pytorch import annotate
from echograph.frontend.scripts.collectives import ranks_of

SharingGroups = tuple[tuple[int, ...], ...]
"""Global ranks of each group over whose ranks the elements of a tensor are divided."""


def groups_of(tensor: Tensor) -> SharingGroups:
    """The groups of a DTensor's shards; none of another tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    shards = [i for i, p in enumerate(tensor.placements) if not (p.is_replicate() or p.is_partial())]  # type: ignore[attr-defined]
    return tuple(ranks_of(mesh.get_group(i)) for i in shards if mesh.size(i) > 1)


def fsdp_shards(root: nn.Module) -> Iterator[tuple[Tensor, SharingGroups, int]]:
    """Parameters that the first FSDP divides, with the groups that have shares and the elements of the whole."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in FullyShardedDataParallel.fsdp_modules(root):
        handle: Any = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat, over = handle.flat_param, (ranks_of(handle.process_group),)
        yield flat, over, sum(flat._numels)
        if flat._params is not None:
            for parameter, elements in zip(flat._params, flat._numels, strict=True):
                yield parameter, over, elements


_BLOCK = 512  # PyTorch's allocator rounds up to it
# Of wrappers, whose names are no part of a model's.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_DDP = "module"


class LivingTensors:
    """Which memory holds what.

    Attributes:
        roots: modules that a script called, which no other module did.
        optimizers: those that stepped.
        made_optimizers: those that the script made.
        trained: trainable elements, where an adapter counted them.
        state_providers: asked where a step begins, to say what an adapter knows of what lives then (`name`,
            `divide`).
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.made_optimizers: list[Optimizer] = []
        self.trained: int | None = None
        self.state_providers: list[Callable[[], None]] = []
        # By identity: what a module says of itself as a key may change (a metric's is of its values).
        self._paths: dict[int, tuple[nn.Module, str]] = {}
        self._told: list[tuple[Tensor, str, str]] = []
        self._known: dict[int, tuple[str, str, SharingGroups, Any]] = {}
        self._divided: dict[int, tuple[Tensor, SharingGroups, int]] = {}
        self._nodes: dict[int, tuple[Node, Any]] = {}
        self._fresh: dict[int, tuple[Node, Any]] = {}
        self._names: dict[int, str] = {}
        self._lies: dict[Node, int] = {}
        self._renewed: dict[int, tuple[Node | None, Any]] = {}
        self._unknown = 0
        self._kept: dict[int, tuple[int, Any]] = {}

    # -- who is there ----------------------------------------------------------------------------------------

    def add_root(self, module: nn.Module) -> None:
        """A module that nothing but the script called."""
        if id(module) in self._paths:
            return
        parts = {path: plain(path) for path, _ in module.named_modules()}
        # A second model of a script (a teacher, say) is told from the first by its class.
        prefix = type(module).__name__ if self.roots and any(True for _ in module.parameters()) else ""
        self.roots.append(module)
        for path, part in module.named_modules():
            self._paths.setdefault(id(part), (part, ".".join(filter(None, (prefix, parts[path])))))

    def path_of(self, module: nn.Module) -> str:
        """Dotted path of a module in its root."""
        return self._paths.get(id(module), (module, ""))[1]

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer that steps."""
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)

    def name(self, tensor: Tensor, role: str, name: str) -> None:
        """Says what a tensor is; counts from the next `take_stock` on, and at once if that has been."""
        self._told.append((tensor, role, name))
        if self._known:
            self._keep(tensor, role, name)
            node = self.node_at(tensor)
            if node is not None and node.op == "placeholder" and node.meta[annotate.ROLE] == annotate.INPUT:
                node.meta |= {annotate.ROLE: role, annotate.FQN: name}

    def call(self, parameter: Tensor, name: str) -> None:
        """Says what an optimizer's own parameter is called, and so its moments (`name.exp_avg`)."""
        self._names[id(parameter)] = name

    def divide(self, tensor: Tensor, over: Iterable[Sequence[int]], elements: int | None = None) -> None:
        """Says that a tensor is this rank's share.

        Args:
            tensor: the share.
            over: global ranks of each group whose ranks have a share each.
            elements: of the whole; None: as many from each rank.
        """
        groups = tuple(tuple(ranks) for ranks in over if len(ranks) > 1)
        whole = tensor.numel() * prod(map(len, groups)) if elements is None else elements
        self._divided[id(tensor)] = tensor, groups, whole

    def shares_of(self, tensor: Tensor) -> SharingGroups:
        """Global ranks of each group over whose ranks the elements of a tensor are divided."""
        told = self._divided.get(id(tensor))
        return groups_of(tensor) if told is None else told[1]

    def forget_step(self) -> None:
        """What a step did that is not recorded after all: no node stands for anything."""
        for known in (self._known, self._nodes, self._fresh, self._lies, self._renewed, self._kept):
            known.clear()
        self._unknown = 0

    def take_stock(self) -> None:
        """Looks up all that lives through steps; called where a step begins."""
        for root in self.roots:
            for share in fsdp_shards(root):
                self.divide(*share)
        for tell in self.state_providers:
            tell()
        for tensor, role, name in self._told:
            self._keep(tensor, role, name)
        for parameter, name in self.parameters():
            self._names.setdefault(id(parameter), name)
            self._keep(parameter, annotate.PARAMETER, name)
            if parameter.grad is not None:
                self._keep(parameter.grad, annotate.GRADIENT, f"{name}.grad", self.shares_of(parameter))
        for root in self.roots:
            prefix = self.path_of(root)
            for path, buffer in root.named_buffers():
                self._keep(buffer, annotate.BUFFER, ".".join(filter(None, (prefix, plain(path)))))
        for optimizer in self.optimizers:
            self._take_state(optimizer)
        self._take_kept()

    def _take_state(self, optimizer: Optimizer) -> None:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = self._names.setdefault(id(parameter), f"master.{number}")
            # What no module has is a copy that the optimizer keeps, or a share of one.
            self._keep(parameter, annotate.OPTIMIZER_STATE, name)
            if parameter.grad is not None:
                self._keep(parameter.grad, annotate.GRADIENT, f"{name}.grad")
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    over = self.shares_of(parameter) if value.numel() == parameter.numel() else ()
                    self._keep(value, annotate.OPTIMIZER_STATE, f"{name}.{slot}", over)

    def kept_bytes(self) -> int:
        """What was there where the step began, and is no tensor of it; asked where the step ends.

        A step drops the gradients that it makes anew, and what a module keeps until it runs the next time.
        """
        return sum(nbytes for key, (nbytes, _) in self._kept.items() if key not in self._nodes)

    def _take_kept(self) -> None:
        """Looks up gradients, and what modules hold by plain attributes."""
        values = (value for root in self.roots for module in root.modules() for value in vars(module).values())
        held = [part for value in values for part in (value if isinstance(value, list | tuple) else (value,))]
        held += [p for each in self.optimizers for group in each.param_groups for p in group["params"]]
        held += [parameter for parameter, _ in self.parameters()]
        tensors = [tensor for tensor in held if isinstance(tensor, Tensor)]
        for tensor in (*tensors, *map(_gradient, tensors)):
            storage = None if tensor is None else _storage(tensor)
            if storage is not None and not isinstance(tensor, nn.Parameter):
                self._kept[storage._cdata] = -(-storage.nbytes() // _BLOCK) * _BLOCK, storage

    def _keep(self, tensor: Tensor, role: str, name: str, shares: SharingGroups | None = None) -> None:
        storage = _storage(tensor)
        if storage is not None:
            over = self.shares_of(tensor) if shares is None else shares
            self._known.setdefault(storage._cdata, (role, name, over, storage))

    def parameter_count(self) -> int:
        """Trainable elements of the roots, tied ones once; of what ranks have shares of, the whole.

        A root that no optimizer has anything of, where one has of another, is an average or a teacher.
        """
        if self.trained is not None:
            return self.trained
        groups = (group for optimizer in self.made_optimizers for group in optimizer.param_groups)
        held = {id(parameter) for group in groups for parameter in group["params"]}
        trained = [root for root in self.roots if any(id(p) in held for p in root.parameters())] or self.roots
        found = {id(p): p for root in trained for p in root.parameters() if p.requires_grad}
        return sum(self._divided[k][2] if k in self._divided else p.numel() for k, p in found.items())

    def parameters(self) -> Iterator[tuple[Tensor, str]]:
        """Parameters of the roots as they are now, with their names, each once."""
        for root in self.roots:
            prefix = self.path_of(root)
            for path, parameter in root.named_parameters():
                yield parameter, ".".join(filter(None, (prefix, plain(path))))

    # -- nodes of a graph ------------------------------------------------------------------------------------

    def node_at(self, tensor: Tensor) -> Node | None:
        """The node that made, or first stood for, the memory that a tensor lies in."""
        storage = _storage(tensor)
        found = None if storage is None else self._nodes.get(storage._cdata)
        return None if found is None else found[0]

    def made(self, tensor: Tensor, node: Node, of: Tensor | None = None) -> None:
        """A node stands for a tensor, and so for its memory, or for that of another tensor."""
        storage = _storage(tensor if of is None else of)
        if storage is not None:
            self._lies.setdefault(node, storage._cdata)
            if storage._cdata not in self._nodes:
                # Not held, so that it lives as long as in the script; no other takes its address.
                weak: Any = reductions.StorageWeakRef
                self._nodes[storage._cdata] = self._fresh[storage._cdata] = node, weak(storage)

    def living(self) -> list[Node]:
        """The nodes that made memory of the step which is still there: somebody holds a tensor that lies in it."""
        self._fresh = {key: found for key, found in self._fresh.items() if not found[1].expired()}
        return [node for key, (node, _) in self._fresh.items() if key not in self._renewed]

    def renew(self, storage: Any, last: Node | None) -> None:
        """Memory that was given back is taken again, after the last node so far: it holds something else now."""
        key = storage._cdata
        self._known.pop(key, None)
        self._nodes.pop(key, None)
        self._fresh.pop(key, None)
        self._renewed[key] = last, storage

    def is_renewed(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was taken again in the step."""
        storage = _storage(tensor) if self._renewed else None
        return storage is not None and storage._cdata in self._renewed

    def stands(self, node: Node, tensor: Tensor) -> bool:
        """Whether a node that stood for a tensor still does.

        It does not once the tensor has been given other memory (`parameter.data = ...`), or its memory was given
        back and taken again.
        """
        storage, lies = _storage(tensor), self._lies.get(node)
        if storage is None or lies is None:
            return True
        last, _ = self._renewed.get(storage._cdata, (None, None))
        return bool(lies == storage._cdata and (last is None or last < node))

    def describe(self, tensor: Tensor) -> tuple[str, str, SharingGroups]:
        """Role and name of what was there before the step, and the groups of ranks that have shares of it."""
        storage = _storage(tensor)
        known = None if storage is None else self._known.get(storage._cdata)
        if known is None:
            self._unknown += 1
            return annotate.INPUT, f"input_{self._unknown}", ()
        return known[:3]

    @staticmethod
    def whole(tensor: Tensor) -> Callable[[], Tensor] | None:
        """Of a part of some memory, what makes a tensor of the whole; None for a tensor that is all there is."""
        storage = _storage(tensor)
        elements = 0 if storage is None else storage.nbytes() // tensor.element_size()
        if elements <= tensor.numel():
            return None
        dtype = tensor.dtype
        return lambda: torch.empty(elements, dtype=dtype, device="cpu")


def plain(path: str) -> str:
    """A module's or parameter's path without the names of wrappers."""
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    while parts and parts[0] == _DDP:
        parts = parts[1:]
    return ".".join(parts)


def _gradient(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # one of several views of memory that was written since, as FSDP's before a step
        return None


def _storage(tensor: Tensor) -> Any:
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
