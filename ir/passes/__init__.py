"""Passes: graph in, graph out, a file or a package each.

A pass is a frozen dataclass whose fields are its options; calling it transforms a graph. Step passes keep the
level; `data_parallel` lowers a step graph to a job graph.
"""

from __future__ import annotations

from echograph.registry import Table

PASSES = Table(
    "pass",
    {
        "fold": "echograph.ir.passes.fold:fold",
        "depth": "echograph.ir.passes.depth:Depth",
        "micro_batch": "echograph.ir.passes.micro_batch:MicroBatch",
        "recompute": "echograph.ir.passes.recompute:Recompute",
        "precision": "echograph.ir.passes.precision:Precision",
        "fuse": "echograph.ir.passes.fuse:Fuse",
        "fuse_loss": "echograph.ir.passes.fuse:FuseLoss",
        "tensor_parallel": "echograph.ir.passes.tensor_parallel:TensorParallel",
        "context_parallel": "echograph.ir.passes.context_parallel:ContextParallel",
        "expert_parallel": "echograph.ir.passes.expert_parallel:ExpertParallel",
        "data_parallel": "echograph.ir.passes.data_parallel:DataParallel",
        "fully_shard": "echograph.ir.passes.fully_shard:FullyShard",
        "pipeline": "echograph.ir.passes.pipeline:Pipeline",
        "mesh_order": "echograph.ir.passes.mesh:MeshOrder",
        "forget_communication": "echograph.ir.passes.annotate:forget_communication",
        "one_communicator": "echograph.ir.passes.mesh:one_communicator",
        "resize_world": "echograph.ir.passes.mesh:ResizeWorld",
        "unfold_ranks": "echograph.ir.passes.mesh:UnfoldRanks",
    },
)
