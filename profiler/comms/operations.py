"""The operations of PyTorch's `c10d` namespace, as `ir.comms.operations` describes them."""

from __future__ import annotations

from echograph.ir.comms.operations import OPERATIONS, Operation, OperatorArguments, Take, Tensors

__all__ = ["OPERATIONS", "Operation", "OperatorArguments", "Take", "Tensors"]
