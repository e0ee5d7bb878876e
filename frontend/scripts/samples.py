"""How many samples of what the model was given a step reads.

A script may give each rank the samples of all ranks, and let the model take this rank's part: what is read counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import Node

from echograph.frontend.pytorch.annotate import VAL
from echograph.frontend.pytorch.call_nodes import arguments, is_getitem, plain_name

_Rows = NDArray[np.intp]
_DIVIDING = ("split", "split_with_sizes", "unbind")


def samples_read(given: Node) -> int:
    """How many rows of a tensor are read by operations that do more than take some of them.

    Followed are parts along the first dimension, and operations that read nothing else and keep that dimension
    (casts, scaling, views); any other one reads all rows that are there.
    """
    count = len(given.meta[VAL])
    read = np.zeros(count, bool)
    todo = [(given, np.arange(count))]
    while todo:
        node, rows = todo.pop()
        for user in node.users:
            followed = _goes_on(user, rows)
            if followed is None:
                read[rows] = True
            else:
                todo += followed
    return int(read.sum()) or count


def _goes_on(user: Node, rows: _Rows) -> list[tuple[Node, _Rows]] | None:
    """Which rows are in the results of an operation on some; None: it reads them."""
    if user.op != "call_function" or len(user.all_input_nodes) > 1:
        return None
    name, made = plain_name(user), user.meta.get(VAL)
    said = arguments(user)
    if said.get("dim") == 0:
        if name == "slice":
            return [(user, rows[said["start"] : said["end"] : said["step"]])]
        if name == "select":
            return [(user, rows[[said["index"]]])]
        if name in _DIVIDING:
            return list(_pieces(user, rows))
    kept = isinstance(made, Tensor) and made.dim() > 0 and len(made) == len(rows)
    return [(user, rows)] if kept else None


def _pieces(divides: Node, rows: _Rows) -> Iterator[tuple[Node, _Rows]]:
    pieces = divides.meta[VAL]
    single = plain_name(divides) == "unbind"
    ends = np.cumsum([1 if single else len(piece) for piece in pieces])
    parts = np.split(rows, ends[:-1])
    for result in divides.users:
        if is_getitem(result):
            at = result.args[1]
            assert isinstance(at, int)
            yield result, parts[at]
