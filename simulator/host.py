"""The host that feeds a device: how long it takes to issue each operation.

An eager framework spends some microseconds on every operation, a view as much as a kernel but for the launch. A
step of many small kernels is bound by this, whatever the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import Graph, JobGraph
from echograph.ir.types import ANY_HOST, COMMUNICATIONS, MultiTensor, OpKind, Phase

WAITS = ("pp.wait", "zero3.idle")
"""How passes call it when a stage waits for what it receives, and when ZeRO-3 waits until its device is idle."""

LISTS = ("zero3.all_gather", "zero3.reduce_scatter")
"""Collectives over lists of tensors, one a rank: of each the host makes a view, and launches a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueTimes:
    """Time of the issuing thread.

    Attributes:
        op_ps: one framework operation that launches one kernel, the launch included.
        launch_ps: what launching adds to it; a view costs the rest.
        work_ps: the framework's work for an operation, a view or a kernel, by the phase that it belongs to; a
            kernel costs `launch_ps` more. Where it says nothing of a phase, `op_ps` and `launch_ps` hold.
        communication_ps: a collective, a send or a receive, which go through the process group; None: as `op_ps`.
        spread: relative standard error of both.
        waits: whether it waits for what a pipeline stage receives, and before ZeRO-3 gathers, and issues nothing
            until then (Megatron-LM of 2021 synchronizes the device after an exchange, DeepSpeed reads the shape of
            what arrives, and synchronizes the device for each parameter).
        blocking: whether a launch returns when its kernel has ended (`CUDA_LAUNCH_BLOCKING=1`): the device stands
            still while the host issues.
        threads: whether its own work runs on threads, which are the streams that it stands on, as in a job that
            was traced; issuing is then part of that work.
        name: under which a graph itself may say how long issuing an operation takes, which then comes first.
        script: under which a graph may say what a script's own work takes before each operation; "" where it does
            not. What the operation itself takes comes on top: `kernel_ps` if it computes, or `communication_ps`.
        slower: how many times as long that work takes on this host.
        kernel_ps: with `script`, what an operation that computes takes the host besides; below zero where the
            duration of the operation has some of it.
    """

    op_ps: int
    launch_ps: int
    work_ps: Mapping[Phase, int] = field(default_factory=lambda: MappingProxyType({}))
    communication_ps: int | None = None
    spread: float = 0.0
    waits: bool = False
    blocking: bool = False
    threads: bool = False
    name: str = ""
    script: str = ""
    slower: float = 1.0
    kernel_ps: int = 0

    def runs(self, job: JobGraph) -> JobGraph:
        """The job as this host runs it: where it waits for messages, these waits are its own work."""
        if not self.waits:
            return job
        waits = [index for index, text in enumerate(job.strings) if text in WAITS]
        rows = np.isin(job.ops.name, waits) & (job.ops.kind == OpKind.COMPUTE)
        return replace(job, ops=replace(job.ops, kind=np.where(rows, OpKind.HOST, job.ops.kind)))

    def times(self, job: JobGraph, work: Int64) -> tuple[Int64, Int64]:
        """Picoseconds of every row of the operation table on the device, and to issue it.

        Args:
            job: of `runs`.
            work: picoseconds of the kernels.
        """
        issue = self.issue(job)
        if not self.blocking:
            return work, issue
        own = job.ops.kind == OpKind.HOST
        return work + np.where(own, 0, issue), np.where(own, issue, 0)

    def issue(self, graph: Graph) -> Int64:
        """Picoseconds to issue every row of the operation table; for host work its own duration, 0 if unknown.

        The operations that share a multi-tensor launch cost nothing beyond the first.
        """
        ops = graph.ops
        issue = np.full(len(ops), self.op_ps, np.int64)
        issue[ops.is_view] = self.op_ps - self.launch_ps
        for phase, work_ps in self.work_ps.items():
            here = ops.phase == phase
            issue[here] = work_ps + np.where(ops.is_view[here], 0, self.launch_ps)
        if self.communication_ps is not None:
            issue[np.isin(ops.kind, COMMUNICATIONS)] = self.communication_ps
        for row in np.flatnonzero(np.isin(ops.name, [i for i, text in enumerate(graph.strings) if text in LISTS])):
            ranks = graph.group_size(graph.groups[int(ops.group[row])])
            issue[row] += ranks * (2 * self.op_ps - self.launch_ps)
        if self.script:
            issue = self._of_script(graph)
        known, anywhere = (ops.duration_on(name)[0] for name in (self.name, ANY_HOST))
        follows = [i for i, a in enumerate(ops.attribute_values) if isinstance(a, MultiTensor) and not a.leads]
        issue[np.isin(ops.attributes, follows)] = 0
        issue = np.where(anywhere == NONE, issue, anywhere)
        issue = np.where(known == NONE, issue, known)
        own = ops.kind == OpKind.HOST
        issue[own] = 0
        rows = ops.duration.rows
        imported = np.isin(rows, np.flatnonzero(own))
        issue[rows[imported]] = ops.duration.values[imported]
        return issue

    def _of_script(self, graph: Graph) -> Int64:
        """Picoseconds to issue every row, of a graph that says what its script does.

        What has none is issued with the operation before: of several parts, or of a kernel that does several.
        """
        ops = graph.ops
        told = ops.duration_on(self.script)[0]
        work = np.rint(told * self.slower).astype(np.int64)
        besides = np.where(ops.is_view, 0, self.kernel_ps)
        if self.communication_ps is not None:
            besides = np.where(np.isin(ops.kind, COMMUNICATIONS), self.communication_ps, besides)
        return np.where(told == NONE, 0, np.maximum(work + besides, 0))
