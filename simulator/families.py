"""Kinds of work that move together: one fit, one resource, one thing to buy more of."""

from __future__ import annotations

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.types import COMMUNICATIONS, Attention, Convolution, Gemm

HOST = "host"
KERNELS = ("matrix products", "attention", "convolutions", "other kernels")
_KINDS = (Gemm, Attention, Convolution)


def family_of(job: JobGraph) -> tuple[Int64, tuple[str, ...]]:
    """Family of every row of the operation table, and the names of the families.

    Kernels fall into matrix products, attention, convolutions and others; communications into one family for the
    axes of their group ("tp communication"). What the host issues is no row: its family is `HOST`.
    """
    ops = job.ops
    of_attribute = [next((i for i, k in enumerate(_KINDS) if isinstance(a, k)), 3) for a in ops.attribute_values]
    family = np.array([*of_attribute, 3])[ops.attributes].astype(np.int64)
    communicates = np.isin(ops.kind, COMMUNICATIONS)
    names = [group.label for group in job.groups]
    labels = tuple(dict.fromkeys(names))
    number = np.array([labels.index(name) for name in names] or [0])
    family[communicates] = len(KERNELS) + number[ops.group[communicates]]
    return family, (*KERNELS, *(f"{label} communication" for label in labels))
