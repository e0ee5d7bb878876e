"""Whether operands of fp32 may be rounded to TF32, as PyTorch keeps it for the whole process.

`torch.backends.cuda.matmul.allow_tf32`, `torch.set_float32_matmul_precision` and `torch.backends.cudnn.allow_tf32`
are its older words, `fp32_precision` of `torch.backends` and its parts the newer ones. By default convolutions
may, and products may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import Node

_SETTINGS = (("generic", "all"), ("cuda", "all"), *(("cuda", kind) for kind in ("matmul", "conv", "rnn")))
_DECIDES = {
    getattr(packet, overload): kind
    for kind, names in (
        ("matmul", ("mm", "bmm", "addmm", "baddbmm")),
        ("conv", ("convolution", "convolution_backward")),
    )
    for packet in (getattr(torch.ops.aten, name) for name in names)
    for overload in packet.overloads()
}
"""Which setting decides of an operator."""


def may_round(node: Node) -> bool | None:
    """Whether a product or a convolution may round now; None of any other call node."""
    kind = _DECIDES.get(node.target)
    return None if kind is None else torch._C._get_fp32_precision_getter("cuda", kind) == "tf32"


@contextmanager
def settings_kept() -> Iterator[None]:
    """Puts the settings back as they were, whatever is said in between and in which words."""
    products, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    settings = [(each, torch._C._get_fp32_precision_getter(*each)) for each in _SETTINGS]
    try:
        yield
    finally:
        # The older words first: they write the newer, and cannot be read where those say otherwise.
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = cudnn
        for each, value in settings:
            torch._C._set_fp32_precision_setter(*each, value)
