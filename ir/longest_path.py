"""Longest paths through dependencies: when each node can be at the earliest, and what it then waited for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from echograph.ir.columns import NONE, Int64


class LongestPaths(NamedTuple):
    """The longest path to each node of a graph.

    Attributes:
        order: nodes, each behind all that it depends on; without those in a circle, and behind one.
        length: of the path to each node: the sum of its edges' weights.
        edge: the last edge of that path; -1 of a node that nothing enters.
    """

    order: list[int]
    length: list[int]
    edge: list[int]


def longest_paths(first: Int64, source: Int64, target: Int64, weight: Int64) -> LongestPaths:
    """Finds the longest path to each node; of equally long ones that which is found first.

    Args:
        first: int64 [nodes], all nodes; those that nothing enters are looked at in this order.
        source: int64 [edges], the node that each edge leaves.
        target: int64 [edges], the node that it enters.
        weight: int64 [edges], >= 0.
    """
    nodes = len(first)
    leaving = np.argsort(source, kind="stable").tolist()
    begin = np.concatenate(([0], np.cumsum(np.bincount(source, minlength=nodes)))).tolist()
    waits = np.bincount(target, minlength=nodes).tolist()
    targets, weights = target.tolist(), weight.tolist()
    length, via = [0] * nodes, [NONE] * nodes
    order = [node for node in first.tolist() if not waits[node]]
    for node in order:
        for edge in leaving[begin[node] : begin[node + 1]]:
            to, far = targets[edge], length[node] + weights[edge]
            if via[to] == NONE or far > length[to]:
                length[to], via[to] = far, edge
            waits[to] -= 1
            if not waits[to]:
                order.append(to)
    return LongestPaths(order, length, via)
