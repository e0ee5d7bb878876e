"""Module paths of ONNX nodes and names of their weights, so that repeated layers are seen as such.

Where a node says in which module it stands:

    metadata `echograph.module`             "encoder.layer.3"                                 our exporter
    metadata `pkg.torch.onnx.name_scopes`   "['', 'encoder', 'encoder.layer.3', 'addmm_1']"   torch.export based
    metadata `namespace`                    "encoder: Encoder/encoder.layer.3: Layer/addmm_1: aten.addmm.default"
    its name                                "/encoder/layer.3/MatMul", or "encoder/layer_3/MatMul"
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import NodeProto

MAX_PATH = 200
_MODULE = "echograph.module"
_SCOPES = "pkg.torch.onnx.name_scopes"
_NAMESPACE = "namespace"
_NUMBERED = re.compile(r"_(\d+)$")
_PLAIN = re.compile(r"[\w-]+(\.[\w-]+)*")
_MADE_UP = re.compile(r"(val_|_val_|const_?)?\d+")


def module_path(node: NodeProto) -> str:
    """Dotted path of the module that a node stands in; "" for the model itself."""
    metadata = {p.key: p.value for p in node.metadata_props}
    if _MODULE in metadata:
        path = metadata[_MODULE]
    elif _SCOPES in metadata:
        path = _last_scope(metadata[_SCOPES])
    elif _NAMESPACE in metadata:
        scopes = metadata[_NAMESPACE].split("/")
        path = scopes[-2].partition(":")[0] if len(scopes) > 1 else ""
    else:
        path = _dotted(node.name.rpartition("/")[0])
    return _clean(path)


def parameter_name(name: str, module: str, operator: str) -> str:
    """Dotted name of a weight: its own, or where an exporter made that up, one after the node that reads it.

    Args:
        name: in the file.
        module: path of the module that reads it first.
        operator: of the node that reads it first.
    """
    own = _dotted(name.removesuffix(":0"))
    if _PLAIN.fullmatch(own) and not _MADE_UP.fullmatch(own) and len(own) <= MAX_PATH:
        return own
    return f"{module}.{operator}" if module else operator


def _dotted(name: str) -> str:
    scopes = name.split("/")
    if len(scopes) == 1 or not scopes[0]:
        # PyTorch's older exporter says a list before what is in it: "/layers/layers.3".
        pairs = zip(scopes, [*scopes[1:], ""], strict=True)
        return ".".join(scope for scope, inner in pairs if scope and not inner.startswith(f"{scope}."))
    return ".".join(_NUMBERED.sub(r".\1", scope) for scope in scopes)


def _last_scope(text: str) -> str:
    if len(text) > 100 * MAX_PATH:
        return ""
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str):
        return scopes[-2]
    return ""


def _clean(path: str) -> str:
    parts = [re.sub(r"[^\w-]", "_", part.strip()) for part in path.split(".")]
    return ".".join(part for part in parts if part)[:MAX_PATH]
