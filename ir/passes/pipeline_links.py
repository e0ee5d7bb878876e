"""What a pipeline's stages say to each other: the communications of one chunk's block, as they are written."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder

AXIS = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Writes the communications of a chunk.

    Attributes:
        builder: the builder, with the chunk's block open.
        number: which chunk.
        stages: chunk k is on stage k modulo this.
        group: the group of the stages.
    """

    builder: GraphBuilder
    number: int
    stages: int
    group: int

    def send(
        self, row: int, nbytes: int, other: int, tag: int, what: str, phase: t.Phase, payload: t.Payload
    ) -> int:
        """Sends a tensor to the stage of another chunk."""
        return self.builder.send(
            f"{AXIS}.send_{what}", group=self.group, peer=self._peer(other), tag=tag, nbytes=nbytes,
            payload=payload, phase=phase, inputs=(row,), stream=self.builder.stream(f"comm.{AXIS}.{what}.send"),
        )  # fmt: skip

    def receive(
        self, row: int, nbytes: int, other: int, tag: int, what: str, phase: t.Phase, payload: t.Payload
    ) -> int:
        """Receives a tensor from the stage of another chunk."""
        return self.builder.recv(
            f"{AXIS}.recv_{what}", group=self.group, peer=self._peer(other), tag=tag, nbytes=nbytes,
            payload=payload, phase=phase, outputs=(row,), stream=self.builder.stream(f"comm.{AXIS}.{what}.recv"),
        )  # fmt: skip

    def _peer(self, other: int) -> int:
        return other % self.stages - self.number % self.stages

    def all_reduce(
        self, row: int, tensor: t.Tensor, group: int, what: str, phase: t.Phase, payload: t.Payload, *made: int
    ) -> int:
        """All-reduces a tensor in place; `made` is its next version, where that has a name."""
        return self.builder.collective(
            f"{AXIS}.all_reduce_{what}", t.CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=tensor.nbytes,
            dtype=tensor.dtype, payload=payload, asynchronous=True, phase=phase, inputs=(row,), outputs=made,
            stream=self.builder.stream(f"comm.{AXIS}.{what}"),
        )  # fmt: skip

    def wait(self, ops: list[int], phase: t.Phase) -> int:
        """The compute stream waits for communications."""
        return self.builder.compute(f"{AXIS}.wait", phase=phase, deps=ops)
