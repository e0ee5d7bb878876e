"""Inlines the local functions of an ONNX model, as long as what comes out stays of a sane size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echograph.errors import InputError

if TYPE_CHECKING:
    from onnx import ModelProto

MAX_NODES = 1_000_000
OWN_DOMAIN = "echograph"
"""Of functions that stand for operators of a step graph: their calls stay what they are."""
Key = tuple[str, str]


def inline_functions(model: ModelProto, source: str) -> ModelProto:
    """The model with each call of a local function replaced by the function's nodes.

    Args:
        model: is not changed.
        source: the file's name, for messages.

    Raises:
        InputError: a function calls itself, or the model would have more than `MAX_NODES` nodes.
    """
    if not model.functions:
        return model
    bodies = {(f.domain, f.name): [(n.domain, n.op_type) for n in f.node] for f in model.functions}
    sizes: dict[Key, int] = {}
    for key in bodies:
        _measure(key, bodies, sizes, source)
    total = sum(sizes.get((n.domain, n.op_type), 1) for n in model.graph.node)
    if total > MAX_NODES:
        raise InputError(
            f"{source}: {total} nodes with its functions inlined, more than {MAX_NODES}: export a part"
        )
    from onnx import inliner

    try:
        kept = [(f.domain, f.name) for f in model.functions if f.domain == OWN_DOMAIN]
        return inliner.inline_selected_functions(model, kept, exclude=True)
    except Exception as error:
        line = (str(error).strip().splitlines() or ["no reason given"])[0][:200]
        raise InputError(
            f"{source}: its functions cannot be inlined ({line}): export it without functions"
        ) from None


def _measure(key: Key, bodies: dict[Key, list[Key]], sizes: dict[Key, int], source: str) -> None:
    """Nodes that a function becomes; depth first on a stack of our own, since files may nest at will."""
    open_calls: set[Key] = set()
    stack = [key]
    while stack:
        current = stack[-1]
        if current in sizes:
            open_calls.discard(stack.pop())
            continue
        open_calls.add(current)
        missing = [callee for callee in bodies[current] if callee in bodies and callee not in sizes]
        if not missing:
            sizes[current] = min(MAX_NODES + 1, sum(sizes.get(callee, 1) for callee in bodies[current]))
        elif missing[0] in open_calls:
            raise InputError(f"{source}: function '{missing[0][1]}' calls itself: export it without functions")
        else:
            stack.append(missing[0])
