"""Random jobs that repeat: programs that call the same blocks again and again, on several streams, and meet."""

from __future__ import annotations

from random import Random
from typing import Any

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph
from echograph.ir.types import CollectiveKind, DType, Phase, TensorRole

SHAPE = (2,)


class RandomJob:
    """Writes stages of a pipeline that call a shared layer; what runs where, and waits for what, is drawn.

    Args:
        seed: of the draws.
        stages: number of programs.
        crossed: whether programs run their passes in orders of their own, so that they may wait for ever.
    """

    def __init__(self, seed: int, stages: int, *, crossed: bool = False) -> None:
        self.random, self.stages, self.crossed = Random(seed), stages, crossed
        self.builder = GraphBuilder(streams=("compute", "one", "two", "send", "recv"))
        self.group = self.builder.group("all", ranks=range(stages))
        self.layers, self.micro_batches = self.random.randint(1, 4), self.random.randint(1, 6)

    def build(self) -> JobGraph:
        builder = self.builder
        parts = [self._stage(number) for number in range(self.stages)]
        layer = builder.begin_block("layer")
        entry = builder.tensor("in", SHAPE, DType.FP32, TensorRole.ACTIVATION, port=True)
        begin = builder.op_count()
        leaves = self._ops(self.random.randint(1, 6), [entry])
        end = builder.op_count()
        own = builder.tensor_count() - entry - 1
        # Ids: the stages' tensors, one instance each, then those of the layers.
        first = sum(count for *_, count in parts)
        for stage, (block, _, made, _, _) in enumerate(parts):
            start = sum(count for *_, count in parts[:stage])
            last = first + (stage * self.layers + self.layers - 1) * own + leaves - entry - 1
            builder.instance(block, bindings=[last])
            for number in range(self.layers):
                before = first + (stage * self.layers + number - 1) * own + leaves - entry - 1
                builder.instance(layer, bindings=[before if number else start + made])
        for stage, (block, _, _, rows, _) in enumerate(parts):
            calls = []
            for kind, micro_batch in self._order(stage):
                low, middle, high, end_of_stage = rows
                instances = range(stage * self.layers, (stage + 1) * self.layers)
                if kind == "forward":
                    calls.append((block, low, middle, 0, micro_batch))
                    calls += [(layer, begin, end, number, micro_batch) for number in instances]
                    calls.append((block, middle, high, 0, micro_batch))
                else:
                    calls.append((block, high, end_of_stage, 0, micro_batch))
            builder.program(calls, role=f"stage {stage}", ranks=(stage,))
        return builder.build(JobGraph)

    def _stage(self, number: int) -> tuple[int, int, int, tuple[int, int, int, int], int]:
        """Block, first tensor, the tensor that layers read, rows of its parts, and how many tensors it owns."""
        builder = self.builder
        block = builder.begin_block(f"stage {number}") if number else 0
        first, low = builder.tensor_count(), builder.op_count()
        port = builder.tensor("out", SHAPE, DType.FP32, TensorRole.ACTIVATION, port=True)
        known: list[int] = []
        if number:
            known.append(self._message("recv", number, -1, 0))
        made = self._ops(self.random.randint(1, 3), known)
        middle = builder.op_count()
        self._ops(self.random.randint(1, 3), [port])
        if self.random.random() < 0.5:
            self._collective()
        if number + 1 < self.stages:
            self._message("send", number, 1, 0)
        high = builder.op_count()
        known = [self._message("recv", number, 1, 1)] if number + 1 < self.stages else []
        self._ops(self.random.randint(1, 3), known)
        if number:
            self._message("send", number, -1, 1)
        return (
            block,
            first,
            made - port - 1,
            (low, middle, high, builder.op_count()),
            builder.tensor_count() - first - 1,
        )

    def _ops(self, count: int, known: list[int]) -> int:
        """Operations of any kind that wait for earlier ones; the tensor that the last one makes."""
        builder, made = self.builder, list(known)
        begin = builder.op_count()
        for _ in range(count):
            inputs = self.random.sample(made, min(len(made), self.random.randint(0, 2)))
            deps = [row for row in range(begin, builder.op_count()) if self.random.random() < 0.2]
            out = builder.tensor("x", SHAPE, DType.FP32, TensorRole.ACTIVATION)
            stream = self.random.choice((0, 0, 1, 2))
            if self.random.random() < 0.15:
                builder.host("wait", inputs=inputs, outputs=(out,), deps=deps, stream=stream)
            else:
                builder.compute(
                    "work", phase=Phase.FORWARD, inputs=inputs, outputs=(out,), deps=deps, stream=stream, flops=1
                )
            made.append(out)
        return made[-1]

    def _collective(self) -> None:
        self.builder.collective(
            "meet", CollectiveKind.ALL_REDUCE, group=self.group, bytes_per_rank=8, dtype=DType.FP32,
            stream=self.random.choice((0, 1)), deps=[self.builder.op_count() - 1],
        )  # fmt: skip

    def _message(self, kind: str, number: int, way: int, tag: int) -> int:
        builder = self.builder
        out = builder.tensor("message", SHAPE, DType.FP32, TensorRole.ACTIVATION)
        # A stream for each way, as pipelines have them; sometimes one for both.
        where: Any = {"group": self.group, "peer": way, "tag": tag, "nbytes": 8}
        if kind == "recv":
            builder.recv("recv", **where, outputs=(out,), stream=4 if self.random.random() < 0.8 else 3)
        else:
            builder.send("send", **where, deps=[builder.op_count() - 1], stream=3 if tag else 2)
        return out

    def _order(self, stage: int) -> list[tuple[str, int]]:
        """GPipe, or 1F1B; or anything."""
        forward = [("forward", n) for n in range(self.micro_batches)]
        backward = [("backward", n) for n in range(self.micro_batches)]
        if self.crossed:
            self.random.shuffle(backward)
            return forward + backward
        ahead = min(self.micro_batches, self.stages - stage)
        order = forward[:ahead]
        for n in range(self.micro_batches):
            order.append(backward[n])
            order += forward[ahead + n : ahead + n + 1]
        return order


def random_job(seed: int, *, crossed: bool = False) -> JobGraph:
    """A job of one to four stages."""
    return RandomJob(seed, 1 + seed % 4, crossed=crossed).build()
