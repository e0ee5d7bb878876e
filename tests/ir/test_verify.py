"""Every invariant broken once: the error names the invariant, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from conformance_graphs import GRAPHS

from echograph.errors import GraphError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import Ragged
from echograph.ir.graph import Axis, Graph, Group, Instance, JobGraph, StepGraph
from echograph.ir.verify import CHECKS, calls_in_order, verify

Break = Callable[[Graph], Graph]


def at(values: np.ndarray, row: int, value: object) -> np.ndarray:
    """A copy of a column with one value changed."""
    changed = values.copy()
    changed[row] = value
    return changed


def op_column(name: str, row: int, value: object) -> Break:
    return lambda g: replace(g, ops=replace(g.ops, **{name: at(getattr(g.ops, name), row, value)}))


def op_ragged(name: str, index: int, value: object) -> Break:
    def change(graph: Graph) -> Graph:
        old = getattr(graph.ops, name)
        return replace(graph, ops=replace(graph.ops, **{name: Ragged(old.offsets, at(old.values, index, value))}))

    return change


def tensor_column(name: str, row: int, value: object) -> Break:
    return lambda g: replace(g, tensors=replace(g.tensors, **{name: at(getattr(g.tensors, name), row, value)}))


def extent(index: int, value: int) -> Break:
    def change(graph: Graph) -> Graph:
        old = graph.tensors.shape
        return replace(
            graph, tensors=replace(graph.tensors, shape=Ragged(old.offsets, at(old.values, index, value)))
        )

    return change


def workload(**fields: int) -> Break:
    return lambda g: replace(g, workload=replace(g.workload, **fields))


def sharded(name: str | int) -> Break:
    """Tensor 0 divided over an axis of that name, or of that index into the strings."""

    def change(graph: Graph) -> Graph:
        strings = graph.strings if isinstance(name, int) else (*graph.strings, name)
        where = name if isinstance(name, int) else len(strings) - 1
        offsets = np.minimum(np.arange(len(graph.tensors) + 1), 1)
        split = Ragged(offsets, np.array([where], np.int64))
        ops = replace(graph.ops, strings=strings)
        return replace(graph, ops=ops, tensors=replace(graph.tensors, strings=strings, sharded=split))

    return change


def block(number: int, **changes: object) -> Break:
    def change(graph: Graph) -> Graph:
        blocks = list(graph.blocks)
        blocks[number] = replace(blocks[number], **changes)
        return replace(graph, blocks=tuple(blocks))

    return change


def axis(name: str, size: int) -> Break:
    return lambda g: replace(g, mesh=(*g.mesh, Axis(name=name, size=size)))


def group(**members: tuple[object, ...]) -> Break:
    return lambda g: replace(g, groups=(*g.groups, Group(name="new", **members)))


def communication(kind: t.OpKind, nth: int, **changes: object) -> Break:
    """The n-th operation of a kind with other fields."""

    def change(graph: Graph) -> Graph:
        row = int(np.flatnonzero(graph.ops.kind == kind)[nth])
        columns = {name: at(getattr(graph.ops, name), row, value) for name, value in changes.items()}
        return replace(graph, ops=replace(graph.ops, **columns))

    return change


def members(**changes: tuple[object, ...]) -> Break:
    """The last group with other members."""
    return lambda g: replace(g, groups=(*g.groups[:-1], replace(g.groups[-1], **changes)))


def roles(*places: dict[str, int]) -> Break:
    """The programs at other places."""
    return lambda g: replace(
        g, programs=tuple(replace(p, coordinates=place) for p, place in zip(g.programs, places, strict=True))
    )


def ranks_of(*ranks: tuple[int, ...]) -> Break:
    """The programs on other ranks."""
    return lambda g: replace(
        g, programs=tuple(replace(p, ranks=its) for p, its in zip(g.programs, ranks, strict=True))
    )


def coordinates(**place: int) -> Break:
    return lambda g: replace(g, programs=(replace(g.programs[0], coordinates=place),))


def calls(*rows: tuple[int, int, int, int, int]) -> Break:
    program = np.array(rows, np.int64).reshape(-1, 5)
    return lambda g: replace(g, programs=(replace(g.programs[0], calls=program), *g.programs[1:]))


# (invariant, graph, what is broken, what the error says)
CASES: list[tuple[str, str, Break, str]] = [
    ("strings_in_range", "two_layers", op_column("name", 1, 99), "operation 1"),
    ("strings_in_range", "two_layers", op_column("module", 2, -1), "operation 2"),
    ("strings_in_range", "two_layers", tensor_column("name", 3, 99), "tensor 3"),
    ("strings_in_range", "kinds", op_column("duration_device", 0, 500), "duration 0"),
    ("enumerations_known", "two_layers", tensor_column("dtype", 0, 77), "unknown DType 77"),
    ("enumerations_known", "two_layers", tensor_column("role", 2, 0), "tensor 2 has the unknown TensorRole"),
    ("enumerations_known", "two_layers", op_column("kind", 0, 9), "unknown OpKind 9"),
    ("enumerations_known", "two_layers", op_column("phase", 0, 0), "unknown Phase 0"),
    ("enumerations_known", "kinds", op_column("variant", 11, 12), "operation 11 has the unknown CollectiveKind"),
    ("enumerations_known", "kinds", op_column("variant", 22, 9), "operation 22 has the unknown CopyDirection"),
    ("enumerations_known", "kinds", op_column("payload", 20, 0), "operation 20 has the unknown Payload"),
    ("enumerations_known", "kinds", op_column("dtype", 11, 0), "operation 11 has the unknown DType"),
    ("enumerations_known", "kinds", op_column("duration_source", 3, 8), "unknown Source 8"),
    ("blocks_cover_tables", "two_layers", lambda g: replace(g, blocks=()), "no main block"),
    ("blocks_cover_tables", "two_layers", block(0, instances=()), "no main block"),
    ("blocks_cover_tables", "two_layers", block(1, ops=range(3, 6)), "block 1"),
    ("blocks_cover_tables", "two_layers", block(1, tensors=range(4, 10)), "last block"),
    ("sizes_sane", "two_layers", extent(0, -8), "tensor 0 has the extent -8"),
    ("sizes_sane", "two_layers", extent(1, 2**61), "beyond 2^60 bytes"),
    ("sizes_sane", "two_layers", op_column("flops", 3, -1), "operation 3 has negative flops"),
    ("sizes_sane", "two_layers", workload(parameters=-1), "the workload has parameters -1"),
    ("sizes_sane", "two_layers", workload(batch_size=2**63), "the workload has batch_size"),
    ("shards_in_mesh", "two_layers", sharded("tp"), "tensor 0 is divided over an axis that the mesh lacks"),
    ("shards_in_mesh", "two_layers", sharded(10**6), "tensor 0 is divided over an axis that the mesh lacks"),
    ("shards_in_mesh", "two_layers", sharded(-1), "tensor 0 is divided over an axis that the mesh lacks"),
    ("sizes_sane", "kinds", op_column("nbytes", 20, -1), "operation 20 has negative nbytes"),
    ("sizes_sane", "kinds", op_column("duration_spread", 1, np.nan), "duration 1"),
    ("sizes_sane", "kinds", op_column("duration_samples", 0, -1), "duration 0"),
    ("tensors_in_block", "two_layers", op_ragged("inputs", 0, 5), "operation 0 (loss) reads tensor 5"),
    ("tensors_in_block", "two_layers", op_ragged("outputs", 5, 1), "makes tensor 1 of another block"),
    ("tensors_in_block", "two_layers", op_ragged("inputs", 0, 2**31 - 1), "reads tensor"),
    ("aliases_point_back", "aliases", tensor_column("alias_of", 2, 2), "tensor 2 is an alias of 2"),
    ("aliases_point_back", "two_layers", tensor_column("alias_of", 10, 0), "tensor 10 is an alias of 0"),
    ("one_maker", "two_layers", op_ragged("outputs", 3, 6), "tensor 6 is made by 2"),
    ("one_maker", "two_layers", op_ragged("outputs", 2, 4), "tensor 4 is a port"),
    ("one_maker", "two_layers", tensor_column("alias_of", 7, 4), "tensor 7 is a port"),
    ("made_before_read", "two_layers", op_ragged("inputs", 0, 3), "reads tensor 3, made later by operation 1"),
    ("made_before_read", "ranks", op_ragged("deps", 0, 1), "operation 1 (nccl all reduce) depends on"),
    ("forward_ops_earlier", "two_layers", op_column("forward_op", 3, 5), "operation 3"),
    ("forward_ops_earlier", "two_layers", op_column("forward_op", 3, 0), "operation 3"),
    ("forward_ops_earlier", "aliases", op_column("forward_op", 7, -3), "block 1 has 1 op_bindings"),
    ("streams_and_groups", "two_layers", op_column("stream", 4, 1), "runs on stream 1 of 1"),
    ("streams_and_groups", "kinds", op_column("group", 13, -1), "operation 13"),
    ("streams_and_groups", "job", axis("dp", 2), "axis twice"),
    ("streams_and_groups", "job", axis("x", 0), "size 0"),
    ("streams_and_groups", "job", axis("x", 2**40), "2^40 ranks"),
    ("streams_and_groups", "job", group(axes=("z",)), "group 'new'"),
    ("streams_and_groups", "job", group(ranks=(1, 1)), "a rank twice"),
    ("streams_and_groups", "job", group(), "group 'new' has neither axes nor ranks"),
    ("streams_and_groups", "job", group(ranks=(1, 8)), "rank 8 is listed"),
    ("streams_and_groups", "ranks", group(ranks=(-1, 1)), "rank -1 is listed"),
    ("instances_bound", "two_layers", block(0, instances=(Instance(),)), "binds 0 of 1 ports"),
    ("instances_bound", "two_layers", block(0, instances=(Instance(bindings=(99,)),)), "does not have"),
    ("instances_bound", "two_layers", block(0, instances=(Instance(bindings=(1,)),)), "another shape or type"),
    ("calls_in_range", "two_layers", lambda g: replace(g, programs=g.programs * 2), "has 2 programs"),
    ("calls_in_range", "two_layers", calls((7, 0, 1, 0, 0)), "names block 7"),
    ("calls_in_range", "two_layers", calls((0, 0, 3, 0, 0)), "call 0 of program 0"),
    ("calls_in_range", "two_layers", calls((1, 2, 3, 2, 0)), "names no instance"),
    ("calls_in_range", "two_layers", calls((1, 2, 3, 0, 2**24)), "call 0"),
    ("calls_in_range", "two_layers", calls((1, 2, 3, 0, 0), (1, 2, 3, 0, 0)), "runs operations again"),
    ("calls_in_range", "job", coordinates(pp=2), "coordinate outside the mesh"),
    ("calls_in_range", "job", coordinates(xp=0), "coordinate outside the mesh"),
    ("calls_in_order", "two_layers", calls((1, 2, 3, 1, 0), (1, 2, 3, 0, 0)), "call 0 of program 0 reads"),
    ("totals_fit", "two_layers", op_column("flops", 3, 2**63 - 1), "flops in all, beyond 2^63"),
    ("calls_in_order", "job", calls((1, 0, 3, 0, 0), (1, 3, 6, 0, 1)), "call 1 of program 0"),
    ("groups_sound", "positions", members(ranks=(0, 1)), "has axes and ranks"),
    ("groups_sound", "positions", members(positions=(2, 0)), "do not ascend"),
    ("groups_sound", "positions", members(positions=(0, 3)), "within the extent of one axis"),
    ("groups_sound", "positions", members(axes=("pp", "dp")), "within the extent of one axis"),
    ("programs_apart", "positions", roles({"pp": 0}, {"pp": 1}, {"pp": 1, "dp": 1}),
     "rank 3 runs programs 1 and 2"),
    ("programs_apart", "positions", roles({"pp": 0}, {"pp": 1}, {}), "rank 0 runs programs 0 and 2"),
    ("programs_apart", "ranks", ranks_of((4,), (4,)), "rank 4 runs two programs"),
    ("members_only", "positions", members(axes=(), positions=(), ranks=(0, 4)),
     "operation 1 (shared gradient) is run by rank 1, which is not in its group 'embedding'"),
    ("members_only", "positions", members(positions=(0, 1)), "operation 1 (shared gradient) is run by rank 4"),
    ("members_only", "positions", roles({"dp": 0}, {"pp": 0, "dp": 1}, {"pp": 1, "dp": 1}), "is run by rank 2"),
    ("members_only", "ranks", ranks_of((0,), (2,)), "operation 4 (nccl all reduce) is run by rank 2"),
    ("messages_meet", "job", communication(t.OpKind.RECV, 0, tag=7), "in group 'pp' with its tag"),
    ("messages_meet", "job", communication(t.OpKind.SEND, 0, peer=2), "names peer +2 in a group of 2"),
    ("messages_meet", "job", communication(t.OpKind.SEND, 1, group=1),
     "operation 3 (gradient) receives what is not"),
    ("messages_meet", "job", lambda g: replace(g, programs=g.programs[:1]), "operation 2 (activation) sends what"),
]  # fmt: skip


@pytest.mark.parametrize(("invariant", "name", "spoil", "says"), CASES)
def test_a_broken_invariant_is_named(invariant: str, name: str, spoil: Break, says: str) -> None:
    graph = GRAPHS[name]()
    verify(graph)
    with pytest.raises(GraphError) as caught:
        verify(spoil(graph))
    assert str(caught.value).endswith(f"[{invariant}]")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_invariant_is_broken_above() -> None:
    assert {check.__name__ for check in CHECKS} == {invariant for invariant, *_ in CASES}


@pytest.mark.parametrize("made", [True, False])
def test_a_port_that_is_bound_to_an_alias_of_itself(made: bool) -> None:
    b = GraphBuilder()
    block = b.begin_block("loop")
    port = b.tensor("", (4,), t.DType.FP32, t.TensorRole.ACTIVATION, port=True)
    view = b.tensor("view", (4,), t.DType.FP32, t.TensorRole.ACTIVATION, alias_of=port)
    if made:
        b.compute("view", outputs=(view,))
    b.instance(block, bindings=(1,))
    b.instance(block, bindings=(0,))
    with pytest.raises(GraphError, match=r"binds a port to itself \[instances_bound\]"):
        b.build(StepGraph)


@pytest.mark.parametrize(("made_in", "read_in", "tensor", "good"), [
    (0, 0, "activation", True), (0, 1, "activation", False), (0, 1, "gradient", True), (1, 0, "gradient", True),
])  # fmt: skip
def test_what_persists_may_be_made_in_another_micro_batch(
    made_in: int, read_in: int, tensor: str, good: bool
) -> None:
    b = GraphBuilder()
    b.tensor("", (4,), t.DType.FP32, t.TensorRole.ACTIVATION, port=True)
    b.compute("read", inputs=(0,))
    block = b.begin_block("make")
    roles = (t.TensorRole.ACTIVATION, t.TensorRole.GRADIENT)
    b.compute("make", outputs=[b.tensor(role.name, (4,), t.DType.FP32, role) for role in roles])
    b.instance(0, bindings=(["activation", "gradient"].index(tensor),))
    b.instance(block)
    b.program([(1, 1, 2, 0, made_in), (0, 0, 1, 0, read_in)])
    if good:
        b.build(StepGraph)
        return
    with pytest.raises(GraphError, match=r"call 1 of program 0 reads tensor 0 .* \[calls_in_order\]"):
        b.build(StepGraph)


def test_persistent_values_may_come_from_an_earlier_micro_batch() -> None:
    graph = GRAPHS["job"]()
    gradient = next(tensor for tensor in graph.tensors if tensor.role == t.TensorRole.GRADIENT)
    reader = int(graph.ops.inputs.rows[np.flatnonzero(graph.ops.inputs.values == gradient.id)[0]])
    assert reader == 6
    calls_in_order(calls((1, 0, 6, 0, 0), (1, 6, 8, 0, 3))(graph))


def larger(graph: Graph, axis: str, size: int) -> Graph:
    mesh = tuple(replace(one, size=size) if one.name == axis else one for one in graph.mesh)
    return replace(graph, mesh=mesh)


def test_a_million_million_ranks_are_not_counted_to_find_one_outside_its_group() -> None:
    with pytest.raises(GraphError, match=r"is run by rank 8, which is not in its group .*\[members_only\]"):
        verify(larger(GRAPHS["job"](), "dp", 2**37))


def test_messages_that_no_program_runs_meet() -> None:
    job = GRAPHS["job"]()
    idle = tuple(replace(program, calls=program.calls[:0]) for program in job.programs)
    verify(replace(job, programs=idle))


@pytest.mark.parametrize("size", [2, 2**30])
def test_messages_over_a_group_of_several_axes(size: int) -> None:
    builder = GraphBuilder()
    builder.mesh = (Axis(name="pp", size=2), Axis(name="dp", size=size))
    group = builder.group("all", axes=("pp", "dp"))
    for stage in range(2):
        at = builder.op_count()
        (builder.send if stage == 0 else builder.recv)(
            "x", group=group, peer=size * (1 - 2 * stage), tag=0, nbytes=8
        )
        builder.program([(0, at, at + 1, 0, 0)], role=f"stage {stage}", coordinates={"pp": stage})
    if size == 2:
        assert builder.build(JobGraph).world_size == 4
        return
    with pytest.raises(
        GraphError, match=r"group 'all' has 1,073,741,824 ranks of one program .*\[messages_meet\]"
    ):
        builder.build(JobGraph)
