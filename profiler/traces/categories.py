"""What older versions of Kineto called what is the same today, so that all else knows one name of each.

PyTorch 1.8 wrote capitalised names for all; from 1.9 on operators and annotations, and from 1.12 on the rest, have
the names of today.
"""

from __future__ import annotations

import re

CATEGORIES = {
    "Operator": "cpu_op",
    "User": "gpu_user_annotation",
    "gpu_user_Annotation": "gpu_user_annotation",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
"""Older names of categories, and those of today."""

ANNOTATIONS = re.compile(r"ProfilerStep#|Optimizer\.(step|zero_grad)#|enumerate\(DataLoader\)#")
"""How names of annotations begin that PyTorch itself makes: until 1.11 they had the category of operators."""

STREAM = re.compile(r"stream (\d{1,18})( user| annotations)?$")
"""A thread that is a stream of a device, as PyTorch 1.8 to 1.10 wrote it."""


def category(name: str) -> str:
    """The name of today of a category."""
    return CATEGORIES.get(name, name)
