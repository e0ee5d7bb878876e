"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from echograph.frontend.onnx.call import Call, Operator


def _matmul(call: Call) -> Any:
    return torch.matmul(call[0], call[1])


def gemm(call: Call) -> Any:
    """`Gemm`: alpha A B + beta C, A and B transposed or not."""
    a, b, c = call[0], call[1], call.get(2)
    a = a.t() if call.integer("transA") else a
    b = b.t() if call.integer("transB") else b
    alpha, beta = call.real("alpha", 1.0), call.real("beta", 1.0)
    if c is not None and beta != 0.0:
        return torch.addmm(c, a, b, alpha=alpha, beta=beta)
    product: Tensor = torch.mm(a, b)
    return product if alpha == 1.0 else product * alpha


def _einsum(call: Call) -> Any:
    return torch.einsum(call.text("equation"), [call[i] for i in range(len(call.operands))])


OPERATORS: Mapping[str, Operator] = {"MatMul": _matmul, "Gemm": gemm, "Einsum": _einsum}
