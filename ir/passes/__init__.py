"""Passes: graph in, graph out, a file or a package each.

A pass is a frozen dataclass whose fields are its options (`base.Pass`); calling it transforms a graph. Step passes
keep the level; `pipeline`, `data_parallel` and `fully_shard` lower a step graph to a job graph. `base.run` applies
several, `spec.parse_passes` reads a list of them from text.
"""

from __future__ import annotations

from echograph.registry import Table

PASSES = Table(
    "pass",
    {
        "fold": "echograph.ir.passes.fold:Fold",
        "depth": "echograph.ir.passes.depth:Depth",
        "micro_batch": "echograph.ir.passes.extent:MicroBatch",
        "model_flops": "echograph.ir.passes.model:ModelFlops",
        "logged_losses": "echograph.ir.passes.logged_losses:LoggedLosses",
        "recompute": "echograph.ir.passes.recompute:Recompute",
        "tensor_parallel": "echograph.ir.passes.tensor_parallel:TensorParallel",
        "context_parallel": "echograph.ir.passes.context_parallel:ContextParallel",
        "expert_parallel": "echograph.ir.passes.expert_parallel:ExpertParallel",
        "fuse_loss": "echograph.ir.passes.fuse_loss:FuseLoss",
        "precision": "echograph.ir.passes.precision:Precision",
        "repeated_heads": "echograph.ir.passes.repeated_heads:RepeatedHeads",
        "complex_rotation": "echograph.ir.passes.complex_rotation:ComplexRotation",
        "attention_kernel": "echograph.ir.passes.kernels:AttentionKernel",
        "foreach_optimizer": "echograph.ir.passes.foreach_optimizer:ForeachOptimizer",
        "fuse": "echograph.ir.passes.fuse:Fuse",
        "tp_comm_overlap": "echograph.ir.passes.tensor_parallel.overlap:TpCommOverlap",
        "tp_comm_waits": "echograph.ir.passes.tensor_parallel.overlap:TpCommWaits",
        "tp_first_dim": "echograph.ir.passes.tensor_parallel.first_dim:FirstDim",
        "pipeline": "echograph.ir.passes.pipeline:Pipeline",
        "data_parallel": "echograph.ir.passes.data_parallel:DataParallel",
        "fully_shard": "echograph.ir.passes.fully_shard:FullyShard",
        "mesh_order": "echograph.ir.passes.mesh:MeshOrder",
        "resize_axes": "echograph.ir.passes.mesh:ResizeAxes",
        "resize_world": "echograph.ir.passes.mesh:ResizeWorld",
        "unfold_ranks": "echograph.ir.passes.mesh:UnfoldRanks",
        "one_communicator": "echograph.ir.passes.mesh:OneCommunicator",
        "forget_communication": "echograph.ir.passes.annotate:ForgetCommunication",
    },
)
"""All passes by name, those of a plan in its order."""
