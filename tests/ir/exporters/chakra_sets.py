"""A small set of Chakra traces without a flaw, for tests that plant one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from echograph.ir.chakra.messages import ChakraNode, CommType, NodeType, write_nodes

NAME = "tiny"
Ranks = dict[int, list[ChakraNode]]
Groups = dict[str, list[int]]


def good_set() -> tuple[Ranks, Groups]:
    """Two stages of two ranks: compute, a sum within the stage, a message to the next stage, a gather of all."""
    ranks: Ranks = {}
    for rank in range(4):
        stage, group = rank // 2, str(1 + rank // 2)
        peer = rank + 2 if stage == 0 else rank - 2
        message = {"comm_src": rank, "comm_dst": peer} if stage == 0 else {"comm_src": peer, "comm_dst": rank}
        kind = NodeType.SEND if stage == 0 else NodeType.RECV
        ranks[rank] = [
            node(1, "mm", duration_us=20, num_ops=1 << 20, tensor_size=4096),
            collective(2, "sum", CommType.ALL_REDUCE, 1 << 20, group, data_deps=(1,)),
            node(3, "message", kind, data_deps=(2,), comm_tag=3, comm_size=4096, **message),
            node(4, "mm", ctrl_deps=(1,), data_deps=(3,), duration_us=7, num_ops=1 << 10, tensor_size=64),
            collective(5, "gather", CommType.ALL_GATHER, 4096, "3", data_deps=(4,)),
            collective(6, "scatter", CommType.REDUCE_SCATTER, 1 << 16, "3", ctrl_deps=(5,)),
        ]
    return ranks, {"1": [0, 1], "2": [2, 3], "3": [0, 1, 2, 3]}


def node(
    identity: int,
    name: str,
    kind: NodeType = NodeType.COMP,
    *,
    ctrl_deps: tuple[int, ...] = (),
    data_deps: tuple[int, ...] = (),
    duration_us: int = 0,
    **attributes: Any,
) -> ChakraNode:
    """A node; what is not named is an attribute."""
    return ChakraNode(
        id=identity, name=name, type=kind, ctrl_deps=ctrl_deps, data_deps=data_deps, duration_us=duration_us,
        attributes={"is_cpu_op": False, **attributes},
    )  # fmt: skip


def collective(identity: int, name: str, kind: CommType, size: int, group: str, **fields: Any) -> ChakraNode:
    """A collective."""
    fields = {"comm_type": int(kind), "comm_size": size, "pg_name": group, "involved_dim": (True,) * 4, **fields}
    return node(identity, name, NodeType.COLLECTIVE, **fields)


def changed(one: ChakraNode, *, without: Iterable[str] = (), **attributes: Any) -> ChakraNode:
    """A node with attributes replaced, added or taken away."""
    kept = {name: value for name, value in one.attributes.items() if name not in set(without)}
    return replace(one, attributes={**kept, **attributes})


def write_set(folder: Path, ranks: Ranks, groups: Mapping[str, Any] | None) -> Path:
    """Writes a set; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, nodes in ranks.items():
        write_nodes(folder / f"{NAME}.{rank}.et", nodes)
    if groups is not None:
        (folder / "comm_groups.json").write_text(json.dumps(groups))
    return folder
