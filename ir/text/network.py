"""A graph as a network of nodes and edges (networkx), and back: what GML and GraphML hold.

Every tensor and every operation of the folded tables is a node, and what refers to them is edges:

    reads     tensor -> operation     `position` among its inputs
    makes     operation -> tensor     `position` among its outputs
    after     operation -> operation  `position` among its dependencies
    forward   operation -> operation  that differentiates it or computes it again
    alias     tensor -> tensor        that shares its memory

All else of a row is attributes of its node, and what belongs to no row is attributes of the network, as `records`
writes them. These formats hold numbers and text alone, so a list or an object stands as JSON text.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from echograph.errors import FormatError, InputError, MissingExtraError
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.text.records import Record, block_head, from_record, header, plain

if TYPE_CHECKING:
    import networkx as nx

MAX_ROWS = 1_000_000
"""Rows of both tables; a network keeps some kilobytes for each in memory."""

_NODE_JSON = ("shape", "sharded", "durations", "attributes")
_NETWORK_JSON = ("workload", "passes", "streams", "mesh", "groups", "strings", "attributes", "blocks", "programs")
_LISTS = {"reads": "inputs", "makes": "outputs", "after": "deps"}
_SINGLE = {"alias": "alias_of", "forward": "forward_op"}
_TABLES = {"tensor": "tensors", "operation": "ops"}


def to_network(graph: Graph) -> nx.MultiDiGraph[str]:
    """The graph as nodes and edges; nodes are called `%row name` and `@row name`.

    Raises:
        MissingExtraError: networkx is not installed.
        InputError: the graph has more rows than `MAX_ROWS`.
    """
    networkx = _networkx()
    rows = len(graph.tensors) + len(graph.ops)
    if rows > MAX_ROWS:
        raise InputError(f"the graph has {rows:,} rows, and a network at most {MAX_ROWS:,}: export it as json")
    head = header(graph) | {"blocks": [block_head(b) for b in graph.blocks], "programs": plain(graph.programs)}
    network: nx.MultiDiGraph[str] = networkx.MultiDiGraph(**_flat(head, _NETWORK_JSON))
    tensors = [f"%{tensor.id} {tensor.name}".rstrip() for tensor in graph.tensors]
    ops = [f"@{op.id} {op.name}".rstrip() for op in graph.ops]
    for number, block in enumerate(graph.blocks):
        for table, rows_of, names in (("tensor", block.tensors, tensors), ("operation", block.ops, ops)):
            for row in rows_of:
                record = plain(graph.tensors[row] if table == "tensor" else graph.ops[row])
                network.add_edges_from(_edges(record, names[row], tensors, ops))
                known = {"table": table, "block": number, "row": record.pop("id")}
                network.add_node(names[row], **known, **_flat(record, _NODE_JSON))
    return network


def _edges(record: Record, node: str, tensors: list[str], ops: list[str]) -> Iterator[tuple[str, str, Record]]:
    """The edges of a row, whose record loses the fields that they say."""
    for kind, key in _LISTS.items():
        for position, other in enumerate(record.pop(key, ())):
            there = ops[other] if kind == "after" else tensors[other]
            ends = (node, there) if kind == "makes" else (there, node)
            yield *ends, {"kind": kind, "position": position}
    for kind, key in _SINGLE.items():
        if record.get(key, -1) >= 0:
            yield (ops if kind == "forward" else tensors)[record.pop(key)], node, {"kind": kind}


def _flat(record: Record, as_json: tuple[str, ...]) -> Record:
    return {key: json.dumps(item) if key in as_json else item for key, item in record.items()}


def from_network(network: nx.MultiDiGraph[Any]) -> StepGraph | JobGraph:
    """The graph that `to_network` made a network of; node names mean nothing here.

    Raises:
        FormatError: an attribute or edge is missing, of another kind, or contradicts the others.
    """
    head = _deep(dict(network.graph), _NETWORK_JSON, "the network")
    blocks = head.get("blocks")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise FormatError("the network has no attribute 'blocks' that lists them")
    rows: dict[Any, Record] = {}
    for node, found in network.nodes(data=True):
        where = f"node {str(node)[:40]}"
        record = rows[node] = _deep(dict(found), _NODE_JSON, where)
        record.pop("label", None)
        table, number = record.pop("table", None), record.pop("block", None)
        record["id"] = record.pop("row", None)
        numbered = type(number) is int and 0 <= number < len(blocks)
        if not (isinstance(table, str) and table in _TABLES and numbered):
            raise FormatError(f"{where}: give 'table' (tensor or operation) and 'block' (0 to {len(blocks) - 1})")
        if type(record["id"]) is not int:
            raise FormatError(f"{where}: give 'row', its number in its table")
        blocks[number].setdefault(_TABLES[table], []).append(record)
    _connect(network, rows)
    for block in blocks:
        for table in _TABLES.values():
            block.setdefault(table, []).sort(key=lambda record: record["id"])
    return from_record(head)


def _connect(network: nx.MultiDiGraph[Any], rows: dict[Any, Record]) -> None:
    """Puts what edges say into the records of rows."""
    lists: dict[tuple[Any, str], dict[int, int]] = defaultdict(dict)
    for source, target, edge in network.edges(data=True):
        kind, position = str(edge.get("kind")), edge.get("position", 0)
        owner, other = (source, target) if kind == "makes" else (target, source)
        if kind in _SINGLE:
            rows[owner][_SINGLE[kind]] = rows[other]["id"]
        elif kind in _LISTS and type(position) is int and position not in lists[owner, kind]:
            lists[owner, kind][position] = rows[other]["id"]
        else:
            where = f"edge {str(source)[:40]} -> {str(target)[:40]}"
            kinds = ", ".join((*_LISTS, *_SINGLE))
            raise FormatError(f"{where}: give 'kind' ({kinds}), and with the first three a 'position' of its own")
    for (owner, kind), found in lists.items():
        rows[owner][_LISTS[kind]] = [found[position] for position in sorted(found)]


def _deep(record: Record, as_json: tuple[str, ...], where: str) -> Record:
    """The record whose lists and objects stood as JSON text."""
    for key, item in record.items():
        if key not in as_json:
            # Where networkx reads an empty sequence, a name was "[]" or "()".
            record[key] = str(item) if item in ([], ()) else item
        elif isinstance(item, str):
            try:
                record[key] = json.loads(item)
            except (ValueError, RecursionError):
                raise FormatError(f"{where}: its attribute '{key}' is no JSON text") from None
    return record


def from_gml(text: str) -> StepGraph | JobGraph:
    """The graph of a GML file that `to_network` wrote.

    Raises:
        FormatError: it is no GML, or no graph.
        MissingExtraError: networkx is not installed.
    """
    networkx = _networkx()
    try:
        network = networkx.parse_gml(text.split("\n"), label="id")
    except (networkx.NetworkXError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"is no GML ({' '.join(str(error).split())[:80]})") from None
    if not (network.is_directed() and network.is_multigraph()):
        raise FormatError(
            "the network is not of directed, multiple edges: 'directed 1' and 'multigraph 1' are missing"
        )
    return from_network(network)


def _networkx() -> Any:
    if find_spec("networkx") is None:
        raise MissingExtraError("networkx", "report", "a graph as a network")
    import networkx

    return networkx
