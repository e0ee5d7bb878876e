"""CUDA graphs of Megatron: which operations the host launches together.

A capture runs the operations of a graph one by one, since they are the same, and marks them: the host pays for the
first of each graph alone. What a graph costs besides (copies into its own inputs, memory that it keeps, the steps
before it is made) is not there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from echograph.errors import CaptureError

_LAYER = r"(?:.*\.)?layers\.\d+"
_PARTS = {
    "attn": r"(?:input_layernorm|self_attention|pre_cross_attn_layernorm|cross_attention)",
    "mlp": r"(?:mlp\.(?:linear_fc1|linear_fc2|activation_func))",
    "moe": r"(?:pre_mlp_layernorm|mlp)",
    "moe_router": r"(?:pre_mlp_layernorm|mlp\.router|mlp\.shared_experts)",
    "mamba": r"(?:mixer|norm)",
}
_NONE: dict[str, Any] = {"cuda_graph_impl": "none", "cuda_graph_modules": [], "cuda_graph_scope": None,
                         "inference_cuda_graph_scope": None}  # fmt: skip
_SAVED = "the host launches what is in CUDA graphs at once: a graph's copies of its inputs are left out"
_PREPROCESS = "; of moe_preprocess, the host is taken to issue every operation"


def graph_of(impl: str, parts: Iterable[str]) -> Callable[[str], str]:
    """A function: the path of a module -> the graph that its operations are in; "" for none.

    Args:
        impl: "local" or "transformer_engine": a graph a layer, or a part of it; "full_iteration": one for all.
        parts: of layers; none: whole ones.

    Raises:
        CaptureError: there is no such part.
    """
    if impl == "full_iteration":
        return lambda _: "step"
    names = [name for name in parts if name != "moe_preprocess"]
    unknown = [name for name in names if name not in _PARTS]
    if unknown:
        known = ", ".join((*_PARTS, "moe_preprocess"))
        raise CaptureError(f"--cuda-graph-modules {unknown[0]}: a capture knows {known}")
    patterns = {name: re.compile(rf"({_LAYER})\.{_PARTS[name]}(?:\.|$)") for name in names}
    whole = re.compile(rf"({_LAYER})(?:\.|$)")

    def graph(module: str) -> str:
        for name, pattern in (patterns or {"layer": whole}).items():
            found = pattern.match(module)
            if found:
                return f"{found[1]} {name}"
        return ""

    return graph


def taken(config: Any, tell: Callable[[Callable[[str], str]], None], note: Callable[[str], None]) -> None:
    """Tells which graphs a `TransformerConfig` asks for, and has the script run as if it asked for none.

    Args:
        config: after its own checks.
        tell: is told which graph a module's operations are in.
        note: for the user.
    """
    impl = getattr(config, "cuda_graph_impl", "none") or "none"
    if impl == "none":
        return
    named = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ()
    parts = [str(getattr(part, "name", part)) for part in ([named] if isinstance(named, str) else named)]
    tell(graph_of("full_iteration" if "full_iteration" in parts else impl, [p for p in parts if p != "full"]))
    note(_SAVED + (_PREPROCESS if "moe_preprocess" in parts else ""))
    for setting, none in _NONE.items():
        for holder in (config, _arguments()):
            if hasattr(holder, setting):
                setattr(holder, setting, none)


def _arguments() -> Any:
    """Megatron-LM's own, which it asks as well."""
    variables = sys.modules.get("megatron.training.global_vars")
    return getattr(variables, "_GLOBAL_ARGS", None)
