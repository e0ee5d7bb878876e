"""Reads an ONNX file: nodes, inputs, weights and small constants, checked and with every dimension a number.

Weights are shapes: what lies in external files is never opened, and of what lies in the file itself only integers
and scalars that a shape may depend on are looked at. Local functions are inlined, as long as what comes out stays
of a sane size.

Module paths of ONNX nodes and names of their weights, so that repeated layers are seen as such. Where a node says
in which module it stands:

    metadata `echograph.module`             "encoder.layer.3"                                 our exporter
    metadata `pkg.torch.onnx.name_scopes`   "['', 'encoder', 'encoder.layer.3', 'addmm_1']"   torch.export based
    metadata `namespace`                    "encoder: Encoder/encoder.layer.3: Layer/addmm_1: aten.addmm.default"
    its name                                "/encoder/layer.3/MatMul", or "encoder/layer_3/MatMul"
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from echograph.errors import FormatError, InputError, MissingExtraError, UsageError
from echograph.ir.files import read_whole

if TYPE_CHECKING:
    import numpy as np
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto


def parse(path: Path) -> ModelProto:
    """A file as the message it holds; files with external data are not opened.

    Raises:
        InputError: the file cannot be read, holds no model, or names data outside its folder, or a device or pipe.
        MissingExtraError: the `onnx` package is not installed.
    """
    try:
        import onnx
    except ImportError:
        raise MissingExtraError("onnx", "onnx", "reading ONNX models") from None
    data = read_whole(path, "give the path of an ONNX model")
    try:
        # Other than `onnx.load`, this looks for no file beside it.
        model = onnx.ModelProto.FromString(data)
    except Exception:  # protobuf's own, which only ir/serde may name
        raise FormatError(f"{path}: not an ONNX model, or truncated: export it again") from None
    if not model.graph.node or not _is_text(model):
        raise FormatError(f"{path}: holds no ONNX graph, or text that is none: export the model again")
    for tensor in _external(model):
        _check_place(path, tensor)
    return model


def _external(message: Any) -> Iterator[TensorProto]:
    """The tensors, wherever in a message, whose data are in another file."""
    for entry, value in message.ListFields():
        if entry.type == entry.TYPE_MESSAGE:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _external(part)
    if message.DESCRIPTOR.name == "TensorProto" and len(message.external_data):
        yield message


def _check_place(path: Path, tensor: TensorProto) -> None:
    """Other programs open what a model names: what lies outside its folder is no part of it.

    Raises:
        FormatError: the tensor's data are outside the model's folder, or in a device or a pipe.
    """
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    where = f"{path}: tensor '{tensor.name[:40]}': its data are in '{location[:80]}'"
    if (
        not location
        or "\0" in location
        or PurePosixPath(location).is_absolute()
        or PureWindowsPath(location).anchor
    ):
        raise FormatError(f"{where}, no path below the model's folder: export the model again")
    folder = path.resolve().parent
    try:
        place = (folder / location.replace("\\", "/")).resolve()
        outside = not place.is_relative_to(folder)
        odd = not outside and place.exists() and not (place.is_file() or place.is_dir())
    except (OSError, RuntimeError):
        outside = odd = True
    if outside:
        raise FormatError(
            f"{where}, outside the model's folder: put the data beside the model and export it again"
        )
    if odd:
        raise FormatError(f"{where}, a device or a pipe: export the model again")


def _is_text(message: Any) -> bool:
    """Whether all text of a message is: ONNX's schema does not check, and gives bytes where it is not."""
    for entry, value in message.ListFields():
        texts = () if entry.type != entry.TYPE_STRING else [value] if isinstance(value, str | bytes) else value
        parts = () if entry.type != entry.TYPE_MESSAGE else [value] if hasattr(value, "ListFields") else value
        if any(isinstance(text, bytes) for text in texts) or not all(_is_text(part) for part in parts):
            return False
    return True


MAX_NODES = 1_000_000
OWN_DOMAIN = "echograph"
"""Of functions that stand for operators of a step graph: their calls stay what they are."""
_FunctionKey = tuple[str, str]


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
    sizes: dict[_FunctionKey, int] = {}
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
    except Exception as error:  # of compiled code, which raises whatever C++ threw
        line = (str(error).strip().splitlines() or ["no reason given"])[0][:200]
        raise InputError(
            f"{source}: its functions cannot be inlined ({line}): export it without functions"
        ) from None


def _measure(
    key: _FunctionKey, bodies: dict[_FunctionKey, list[_FunctionKey]], sizes: dict[_FunctionKey, int], source: str
) -> None:
    """Nodes that a function becomes; depth first on a stack of our own, since files may nest at will."""
    open_calls: set[_FunctionKey] = set()
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


_PRODUCTS = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (0, 1, 2), "MatMul": (0, 1), "Gather": (0,), "PRelu": (1,),
    "BatchNormalization": (1, 2), "LayerNormalization": (1, 2), "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2), "RMSNormalization": (1,), "LSTM": (1, 2, 3), "GRU": (1, 2, 3),
    "RNN": (1, 2, 3), "FusedConv": (1, 2), "FusedMatMul": (0, 1), "FusedGemm": (0, 1, 2), "Attention": (1, 2),
}  # fmt: skip
_QUANTISED = {
    "DequantizeLinear": (0,), "QLinearConv": (3, 8), "QLinearMatMul": (3,), "MatMulInteger": (1,),
    "ConvInteger": (1,), "QGemm": (3, 6), "DynamicQuantizeMatMul": (1,), "MatMulIntegerToFloat": (1,),
    "MatMulNBits": (1,), "DynamicQuantizeLSTM": (1, 2),
}  # fmt: skip
_SCALES = {
    "DequantizeLinear": (1,), "QuantizeLinear": (1,), "QLinearConv": (1, 4, 6), "QLinearMatMul": (1, 4, 6),
    "QGemm": (1, 4, 7), "DynamicQuantizeMatMul": (2,), "MatMulIntegerToFloat": (2, 3), "MatMulNBits": (2,),
    "DynamicQuantizeLSTM": (8, 10), "BatchNormalization": (3, 4),
}  # fmt: skip
_NUMBERS = {"Resize": (1, 2), "Upsample": (1,)}


class Readers:
    """What the nodes of a graph, and of the graphs within it, read as what.

    Attributes:
        weights: values read where a layer has its weights.
        quantised: values read where a layer has integers for its weights.
        fixed: running statistics, and scales of integers: what is not trained.
        numbers: values that decide on a shape, and what those are computed from.
    """

    def __init__(self, graph: GraphProto) -> None:
        nodes = list(walk(graph))
        self.weights = _read(nodes, _PRODUCTS)
        self.quantised = _read(nodes, _QUANTISED)
        self.fixed = _read(nodes, _SCALES)
        self.numbers = _behind(_read(nodes, _NUMBERS), nodes)


def walk(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of the graphs that they hold; on a stack, since files may nest at will."""
    stack = [graph]
    while stack:
        for node in stack.pop().node:
            yield node
            stack.extend(a.g for a in node.attribute if a.HasField("g"))


def _read(nodes: Iterable[NodeProto], positions: dict[str, tuple[int, ...]]) -> set[str]:
    return {
        node.input[at]
        for node in nodes
        for at in positions.get(node.op_type, ())
        if at < len(node.input) and node.input[at]
    }


def _behind(names: set[str], nodes: list[NodeProto]) -> set[str]:
    """The values and all that they are computed from."""
    makers = {output: node for node in nodes for output in node.output}
    found: set[str] = set()
    open_names = list(names)
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += makers[name].input if name in makers else ()
    return found


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


MAX_KNOWN = 2**16
"""Elements of the largest tensor whose values are kept: shapes depend on few, a small mask has thousands."""
MAX_ELEMENTS, MAX_DIMENSIONS = 2**56, 32
PARAMETER = "PARAMETER"
_OWNED = (PARAMETER, "BUFFER", "CONSTANT_TENSOR")
_KINDS = ("pkg.torch.export.graph_signature.InputSpec.kind", "echograph.role")
_DTYPE, _STATED = "echograph.dtype", {"bf16": 16}
_DATA = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_MAX_DEPTH = 16  # of graphs within graphs
_DEFAULT_DOMAINS = ("", "ai.onnx")
_FLOATS = (1, 10, 11, 16)  # of TensorProto.DataType
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxValue:
    """A tensor that the model is given.

    Attributes:
        name: its name in the file.
        dtype: ONNX element type (`TensorProto.DataType`).
        shape: extents.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxWeight(OnnxValue):
    """A tensor that the model owns.

    Attributes:
        path: its dotted name as a parameter of a module.
        trainable: whether a gradient is wanted: a float of several elements that is no running statistic.
        quantised: integers that stand for a layer's weights.
        constant: the value of a node `Constant`, and not an initializer.
    """

    path: str
    trainable: bool
    quantised: bool = False
    constant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A graph that a node of control flow holds.

    Attributes:
        inputs: names of the values that it is given.
        nodes: in an order in which they can run; they read values of the graph around it too.
        outputs: names of its results.
    """

    inputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxNode:
    """An operation.

    Attributes:
        name: its name, or what it makes where it has none.
        operator: operator type, after its domain and a dot where that is not ONNX's own.
        inputs: names of the values it reads; "" for one left out.
        outputs: names of the values it makes.
        attributes: name -> int, float, str, list of these, or a numpy array.
        module: dotted path of the module it stands in.
        bodies: the graphs that a node of control flow holds, by attribute.
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    module: str
    bodies: Mapping[str, Body] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxModel:
    """What a file holds.

    Attributes:
        source: the file's name, for messages.
        name: of the file, without its suffix.
        opset: version of ONNX's own operators.
        inputs: what a step is given, in order.
        weights: what the model owns.
        constants: values of small tensors, by name.
        nodes: in an order in which they can run.
        outputs: names of the results.
        types: ONNX type and shape that the file states of values, where it does: name -> value.
    """

    source: str
    name: str
    opset: int
    inputs: tuple[OnnxValue, ...]
    weights: tuple[OnnxWeight, ...]
    constants: Mapping[str, np.ndarray[Any, Any]]
    nodes: tuple[OnnxNode, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, OnnxValue]


def read(path: Path, dims: Mapping[str, int] | None = None) -> OnnxModel:
    """Reads a model.

    Args:
        path: an `.onnx` file.
        dims: value of each symbolic dimension, by its name or as `INPUT.POSITION`; one that is negative or has
            no name has the second alone.

    Raises:
        InputError: the file cannot be read, or the model breaks a rule of ONNX.
        UsageError: a symbolic dimension has no value, or a value names none.
        MissingExtraError: the `onnx` package is not installed.
    """
    model = inline_functions(parse(path), path.name)
    reader = _Reader(path.name, model.graph, dict(dims or {}))
    opset = next((o.version for o in model.opset_import if o.domain in _DEFAULT_DOMAINS), 0)
    return reader.read(path.stem, opset or _newest_opset())


def _newest_opset() -> int:
    from onnx.defs import onnx_opset_version

    return onnx_opset_version()


class _Reader:
    """State of one reading: which names are known so far."""

    def __init__(self, source: str, graph: GraphProto, dims: dict[str, int]) -> None:
        self.source = source
        self.graph = graph
        self.dims = dims
        self.unbound: dict[str, None] = {}
        self.known_dims: dict[str, None] = {}
        self.places: set[str] = set()
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.owned: dict[str, OnnxValue] = {}
        self.kinds: dict[str, str] = {}
        self.readers = Readers(graph)
        self.of_constants: set[str] = set()
        self.taken = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        self.taken.update(name for node in graph.node for name in node.output)
        self.has_weights = any(t.data_type in _FLOATS and prod(t.dims) > 1 for t in graph.initializer)

    def read(self, stem: str, opset: int) -> OnnxModel:
        graph = self.graph
        for tensor in graph.initializer:
            self._initializer(tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            raise InputError(f"{self.source}: initializer '{sparse.values.name}' is sparse: export it dense")
        stated = {v.name: v for v in (*graph.value_info, *graph.output, *graph.input)}
        self.kinds = {name: kind for name, info in stated.items() if (kind := _kind(info))}
        given = [v for v in graph.input if v.name not in self.owned and v.name not in self.constants]
        for info in given:
            if info.name in self.kinds:
                self.owned[info.name] = self._value(info, "weight")
        inputs = tuple(self._value(v, "input") for v in given if v.name not in self.owned)
        available = {v.name for v in inputs} | self.owned.keys() | self.constants.keys() | {""}
        nodes = tuple(self._nodes(graph, available, {}, stated))
        self._check_dims()
        made = {name for node in nodes for name in node.outputs}
        known = made | self.owned.keys() | self.constants.keys() | {v.name for v in inputs}
        outputs = tuple(v.name for v in graph.output)
        if missing := next((name for name in outputs if name not in known), None):
            raise InputError(f"{self.source}: no node makes the output '{missing}': export the model again")
        return OnnxModel(
            source=self.source,
            name=stem,
            opset=opset,
            inputs=inputs,
            weights=tuple(self._weights(nodes)),
            constants=self.constants,
            nodes=nodes,
            outputs=outputs,
            types=dict(self._types(made, stated)),
        )

    # -- values --------------------------------------------------------------------------------------------

    def _initializer(self, name: str, tensor: TensorProto) -> None:
        """A weight, or a number: `tensor.name` is what the nodes call it, `name` what it is called here."""
        shape = self._sane(tuple(tensor.dims), f"initializer '{name}'")
        data = _array(self.source, name, tensor) if _may_be_known(tensor, shape) else None
        asked = data is not None and (data.dtype.kind in "iub" or tensor.name in self.readers.numbers)
        if data is not None and (data.size == 1 or (asked and tensor.name not in self.readers.quantised)):
            self.constants[name] = data
        else:
            self.owned[name] = OnnxValue(name=name, dtype=tensor.data_type, shape=shape)

    def _value(self, info: ValueInfoProto, what: str) -> OnnxValue:
        if not info.type.HasField("tensor_type"):
            kind = info.type.WhichOneof("value") or "nothing"
            raise InputError(f"{self.source}: {what} '{info.name}' is a {kind}: export it with tensors alone")
        tensor = info.type.tensor_type
        if not tensor.HasField("shape"):
            raise InputError(f"{self.source}: {what} '{info.name}' has no shape: export the model with shapes")
        extents = []
        for position, dim in enumerate(tensor.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                extents.append(dim.dim_value)
            else:
                extents.append(self._bound(dim.dim_param, f"{info.name}.{position}"))
        shape = self._sane(tuple(extents), f"{what} '{info.name}'")
        return OnnxValue(name=info.name, dtype=_stated_type(info.metadata_props, tensor.elem_type), shape=shape)

    def _sane(self, shape: tuple[int, ...], what: str) -> tuple[int, ...]:
        if min(shape, default=0) < 0 or prod(shape) > MAX_ELEMENTS or len(shape) > MAX_DIMENSIONS:
            shown = str(list(shape))[:100]
            raise InputError(
                f"{self.source}: {what} has the shape {shown}, which is of no machine: give sane sizes"
            )
        return shape

    def _bound(self, name: str, place: str) -> int:
        """The size of a dimension without one: what is said of its place, or of its name."""
        self.places.add(place)
        name = place if place in self.dims or not name else name
        self.known_dims[name] = None
        value = self.dims.get(name)
        if value is None:
            self.unbound[name] = None
        elif value < 1:
            raise UsageError(f"--dim {name}={value}: give a size of at least 1")
        return 1 if value is None else value

    def _check_dims(self) -> None:
        if self.unbound:
            names = list(self.unbound)
            shown = ", ".join(names[:_SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > _SHOWN else "")
            raise UsageError(
                f"{self.source}: symbolic dimensions without a size: {shown}: give each, as "
                f"echoc compile --onnx {self.source} --dim {names[0]}=8"
            )
        if unknown := next((name for name in self.dims if name not in self.known_dims.keys() | self.places), None):
            known = ", ".join(list(self.known_dims)[:_SHOWN]) or "none: every size is in the file"
            raise UsageError(f"--dim {unknown}={self.dims[unknown]}: {self.source} has no such dimension: {known}")

    def _types(self, made: Iterable[str], stated: Mapping[str, ValueInfoProto]) -> Iterator[tuple[str, OnnxValue]]:
        for name in made:
            info = stated.get(name)
            if info is None or not info.type.tensor_type.HasField("shape"):
                continue
            dims = info.type.tensor_type.shape.dim
            extents = [d.dim_value if d.HasField("dim_value") else self.dims.get(d.dim_param, -1) for d in dims]
            if min(extents, default=0) >= 0:
                dtype = _stated_type(info.metadata_props, info.type.tensor_type.elem_type)
                yield name, OnnxValue(name=name, dtype=dtype, shape=tuple(extents))

    # -- nodes ---------------------------------------------------------------------------------------------

    def _nodes(
        self,
        graph: GraphProto,
        available: set[str],
        names: Mapping[str, str],
        stated: Mapping[str, ValueInfoProto],
        depth: int = 0,
    ) -> Iterator[OnnxNode]:
        """The nodes of a graph in order.

        Args:
            graph: the model's own, or one that a node holds.
            available: what can be read; gains what the nodes make.
            names: of a graph within a graph, what its values are called here.
            stated: values whose shape the file states.
            depth: how many graphs are around this one.
        """
        makers = {name for node in graph.node for name in node.output}
        for position, proto in enumerate(graph.node):
            if self._is_weight(proto, names):
                available.update(names.get(name, name) for name in proto.output)
                continue
            node = self._node(proto, position, names)
            for name in node.inputs:
                if name not in available:
                    self._undeclared(name, node, makers, stated)
                    available.add(name)
            if repeated := next((n for n in node.outputs if n and n in available), None):
                raise InputError(
                    f"{self.source}: node '{node.name}' makes '{repeated}' again: give every value one maker"
                )
            bodies = {a.name: a.g for a in proto.attribute if a.HasField("g")}
            if bodies:
                made = {key: self._body(node, body, available, names, depth) for key, body in bodies.items()}
                node = replace(node, bodies=made)
            available.update(node.outputs)
            yield node

    def _body(
        self, node: OnnxNode, graph: GraphProto, available: set[str], names: Mapping[str, str], depth: int
    ) -> Body:
        """A graph within a node, its values under names that no other graph has."""
        if depth == _MAX_DEPTH:
            raise InputError(f"{self.source}: node '{node.name}': graphs are nested more than {_MAX_DEPTH} deep")
        given = [v.name for v in graph.input]
        own = [*given, *(t.name for t in graph.initializer), *(o for n in graph.node for o in n.output if o)]
        inner = {**names, **{name: self._unique(name, node.name) for name in own}}
        for tensor in graph.initializer:
            self._initializer(inner[tensor.name], tensor)
        seen = available | {inner[name] for name in own[: len(given) + len(graph.initializer)]}
        stated = {inner.get(v.name, v.name): v for v in (*graph.value_info, *graph.output)}
        nodes = tuple(self._nodes(graph, seen, inner, stated, depth + 1))
        outputs = tuple(inner.get(v.name, v.name) for v in graph.output)
        if missing := next((name for name in outputs if name not in seen), None):
            raise InputError(f"{self.source}: node '{node.name}' ({node.operator}): nothing makes '{missing}'")
        return Body(inputs=tuple(inner[name] for name in given), nodes=nodes, outputs=outputs)

    def _unique(self, name: str, owner: str) -> str:
        unique, number = name, 0
        while unique in self.taken:
            number += 1
            unique = f"{owner}.{name}" if number == 1 else f"{owner}.{name}.{number}"
        self.taken.add(unique)
        return unique

    def _undeclared(
        self, name: str, node: OnnxNode, makers: set[str], stated: Mapping[str, ValueInfoProto]
    ) -> None:
        """A value that neither an earlier node nor an initializer makes: a weight of a file without weights."""
        if name in makers:
            raise InputError(
                f"{self.source}: node '{node.name}' ({node.operator}) reads '{name}', which it or a later node "
                "makes: ONNX has no cycles, and its nodes stand in the order in which they run"
            )
        if name not in stated:
            raise InputError(
                f"{self.source}: node '{node.name}' ({node.operator}) reads '{name}', which nothing makes and "
                "whose shape stands nowhere: export the model with its initializers, or with them as inputs"
            )
        self.owned[name] = self._value(stated[name], "weight")

    def _node(self, proto: NodeProto, position: int, names: Mapping[str, str]) -> OnnxNode:
        name = proto.name or next((o for o in proto.output if o), f"node {position}")
        attributes = {}
        for attribute in proto.attribute:
            if attribute.HasField("g"):
                continue
            try:
                attributes[attribute.name] = _attribute(self.source, name, attribute)
            except ValueError:
                raise InputError(
                    f"{self.source}: node '{name}' has an attribute '{attribute.name[:80]}' without a value: "
                    "export the model again"
                ) from None
        if proto.op_type == "Cast" and "to" in attributes:
            attributes["to"] = _stated_type(proto.metadata_props, attributes["to"])
        outputs = tuple(names.get(output, output) for output in proto.output)
        prefix = "" if proto.domain in _DEFAULT_DOMAINS else f"{proto.domain}."
        return OnnxNode(
            name=name,
            operator=prefix + proto.op_type,
            inputs=tuple(names.get(name, name) for name in proto.input),
            outputs=outputs,
            attributes=attributes,
            module=module_path(proto),
        )

    def _is_weight(self, proto: NodeProto, names: Mapping[str, str]) -> bool:
        """Whether a node is a constant that the model owns: a weight, or too large for its numbers to matter.

        Exporters that know no initializers write weights as nodes `Constant`; those that do write numbers so.
        """
        if proto.op_type != "Constant" or proto.domain not in _DEFAULT_DOMAINS or len(proto.output) != 1:
            return False
        tensor = next((a.t for a in proto.attribute if a.HasField("t")), None)
        if tensor is None:
            return False
        own, shape = proto.output[0], tuple(tensor.dims)
        name = names.get(own, own)
        readers = self.readers
        counts = prod(shape) > 1 and own not in readers.numbers
        floats = counts and tensor.data_type in _FLOATS and (own in readers.weights or not self.has_weights)
        weight = floats or (counts and own in readers.quantised)
        if not weight and _may_be_known(tensor, shape):
            return False
        shape = self._sane(shape, f"constant '{name}'")
        self.owned[name] = OnnxValue(name=name, dtype=tensor.data_type, shape=shape)
        self.of_constants.add(name)
        if not weight:
            self.kinds[name] = "BUFFER"
        return True

    def _weights(self, nodes: Iterable[OnnxNode]) -> Iterator[OnnxWeight]:
        users: dict[str, OnnxNode] = {}
        for node in all_nodes(nodes):
            for name in node.inputs:
                users.setdefault(name, node)
            for body in node.bodies.values():
                for name in body.outputs:
                    users.setdefault(name, node)
        taken: Counter[str] = Counter()
        for name in users:  # in the order in which they are read, as a module's parameters mostly are
            value = self.owned.get(name)
            if value is None:
                continue
            path = base = parameter_name(value.name, users[value.name].module, users[value.name].operator)
            while path in taken:
                path = f"{base}.{taken[base]}"
                taken[base] += 1
            taken[path] += 1
            kind = self.kinds.get(value.name)
            fixed = value.name in self.readers.fixed or prod(value.shape) <= 1
            yield OnnxWeight(
                name=value.name,
                dtype=value.dtype,
                shape=value.shape,
                path=path,
                trainable=kind == PARAMETER if kind else not fixed,
                quantised=value.name in self.readers.quantised and value.dtype not in _FLOATS,
                constant=value.name in self.of_constants,
            )


def all_nodes(nodes: Iterable[OnnxNode]) -> Iterator[OnnxNode]:
    """Nodes and those of the graphs that they hold, each after the one that holds it."""
    for node in nodes:
        yield node
        for body in node.bodies.values():
            yield from all_nodes(body.nodes)


def _kind(info: ValueInfoProto) -> str:
    """What a file says that a value is, where it is a weight: PyTorch's exporter and ours do; else ""."""
    kinds = (p.value.upper() for p in info.metadata_props if p.key in _KINDS)
    return next((kind for kind in kinds if kind in _OWNED), "")


def _stated_type(metadata: Iterable[Any], dtype: int) -> int:
    """An element type, or what the metadata say that it stands for."""
    return next((_STATED[p.value] for p in metadata if p.key == _DTYPE and p.value in _STATED), dtype)


def _may_be_known(tensor: TensorProto, shape: tuple[int, ...]) -> bool:
    from onnx import TensorProto as Proto

    return tensor.data_location != Proto.EXTERNAL and 0 <= prod(shape) <= MAX_KNOWN


def _array(source: str, name: str, tensor: TensorProto) -> np.ndarray[Any, Any] | None:
    """Values of a tensor in the file; None where there are none, as in a file without weights."""
    import numpy as np
    from onnx import numpy_helper

    if prod(tensor.dims) and not any(len(getattr(tensor, field)) for field in _DATA):
        return None
    try:
        data = np.asarray(numpy_helper.to_array(tensor))
    except Exception:
        raise InputError(f"{source}: '{name}': its data do not fit its shape {list(tensor.dims)}") from None
    return data if data.dtype.kind in "iubfc" else data.astype(np.float32) if data.dtype.kind == "V" else None


def _attribute(source: str, node: str, attribute: Any) -> Any:
    from onnx import helper

    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "data_type") and hasattr(value, "dims"):
        return _array(source, node, value) if _may_be_known(value, tuple(value.dims)) else None
    if isinstance(value, int | float):
        return value
    try:
        items = list(value)
    except TypeError:
        return value
    return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in items]
