"""The operations of PyTorch's `c10d` namespace, as `ir.comms_operations` describes them."""

from __future__ import annotations

from echograph.ir.comms.operations import OPERATIONS, Arguments, Operation, Take, Tensors

__all__ = ["OPERATIONS", "Arguments", "Operation", "Take", "Tensors"]
