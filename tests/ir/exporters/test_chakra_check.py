"""Every trap that a simulator falls into, planted in a good set of traces, is named; the good set is clean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from chakra_sets import NAME, Groups, Ranks, changed, collective, good_set, node, write_set
from hypothesis import given
from hypothesis import strategies as st

from echograph.cli.echoc import check_chakra
from echograph.errors import FormatError, InputError
from echograph.ir.chakra.check import CHECKS, MAX_SHOWN, Checked, Finding, check
from echograph.ir.chakra.dry_run import dry_run, free_run
from echograph.ir.chakra.messages import CommType, NodeType, delimited, encode_node
from echograph.ir.chakra.reader import read_traces

Plant = Callable[[Ranks, Groups], None]


def checked(folder: Path, ranks: Ranks, groups: Groups | None) -> Checked:
    return check(read_traces(write_set(folder / "set", ranks, groups)))


def put(rank: int, place: int, **attributes: object) -> Plant:
    """Attributes of one node; None takes one away."""

    def plant(ranks: Ranks, _: Groups) -> None:
        without = [name for name, value in attributes.items() if value is None]
        values = {name: value for name, value in attributes.items() if value is not None}
        ranks[rank][place] = changed(ranks[rank][place], without=without, **values)

    return plant


def fields(rank: int, place: int, **values: object) -> Plant:
    """Fields of one node."""

    def plant(ranks: Ranks, _: Groups) -> None:
        ranks[rank][place] = replace(ranks[rank][place], **values)

    return plant


def append(rank: int, *nodes: object) -> Plant:
    return lambda ranks, _: ranks[rank].extend(nodes)


def groups_are(**groups: list[int]) -> Plant:
    return lambda _, found: found.update({name.lstrip("_"): ranks for name, ranks in groups.items()})


def swap(ranks: Ranks, _: Groups) -> None:
    """Rank 3 scatters before it gathers."""
    gather, scatter = ranks[3][4:]
    ranks[3][4:] = [replace(scatter, id=5, ctrl_deps=(4,)), replace(gather, id=6, ctrl_deps=(5,), data_deps=())]


def cross(ranks: Ranks, groups: Groups) -> None:
    """Ranks 0 and 1 sum in two groups, in another order each; every group on its own is in order."""
    groups["4"] = [0, 1]
    for rank, order in ((0, "14"), (1, "41")):
        ranks[rank] += [collective(7 + at, "late", CommType.ALL_REDUCE, 64, order[at]) for at in range(2)]


def one_more(ranks: Ranks, _: Groups) -> None:
    ranks[0].append(collective(7, "more", CommType.ALL_REDUCE, 64, "3"))


def unmatched_send(ranks: Ranks, _: Groups) -> None:
    extra = node(7, "more", NodeType.SEND, comm_src=0, comm_dst=1, comm_tag=9, comm_size=8)
    ranks[0].append(extra)


def unmatched_receive(ranks: Ranks, _: Groups) -> None:
    extra = node(7, "more", NodeType.RECV, comm_src=0, comm_dst=1, comm_tag=9, comm_size=8)
    ranks[1].append(extra)


def mutual_receives(ranks: Ranks, _: Groups) -> None:
    """Ranks 0 and 1 receive from each other before they send."""
    for rank, other in ((0, 1), (1, 0)):
        ranks[rank] += [
            node(7, "first", NodeType.RECV, comm_src=other, comm_dst=rank, comm_tag=9, comm_size=8),
            node(8, "then", NodeType.SEND, comm_src=rank, comm_dst=other, comm_tag=9, comm_size=8, data_deps=(7,)),
        ]


TRAPS: dict[str, tuple[Plant, str, str, str]] = {
    # what is planted; the check, the file and the words that name it
    "missing rank": (lambda ranks, _: ranks.pop(1), "ranks_complete", f"{NAME}.1.et", "rank 1 of 4 have no trace"),
    "no node": (lambda ranks, _: ranks.__setitem__(1, []), "ranks_work", f"{NAME}.1.et", "no node"),
    "same id": (fields(2, 3, id=3), "ids_unique", f"{NAME}.2.et", "an earlier node has"),
    "missing dependency": (fields(2, 3, data_deps=(99,)), "dependencies_exist", f"{NAME}.2.et", "1 data"),
    "missing control": (fields(2, 3, ctrl_deps=(99,)), "dependencies_exist", f"{NAME}.2.et", "1 control"),
    "cycle": (fields(2, 0, ctrl_deps=(4,)), "dependencies_end", f"{NAME}.2.et", "cycle"),
    "waits for itself": (fields(2, 0, ctrl_deps=(1,)), "dependencies_end", f"{NAME}.2.et", "1 -> 1"),
    "metadata node": (append(1, node(7, "m", NodeType.METADATA)), "types_run", f"{NAME}.1.et", "METADATA"),
    "invalid node": (append(1, node(7, "i", NodeType.INVALID)), "types_run", f"{NAME}.1.et", "INVALID"),
    "host node": (put(1, 0, is_cpu_op=True), "types_run", f"{NAME}.1.et", "host"),
    "dimension": (put(1, 1, involved_dim=True), "dimensions_listed", f"{NAME}.1.et", "involved_dim"),
    "group is no number": (groups_are(x=[0, 1]), "groups_sound", "comm_groups.json", "group x"),
    "group 0": (groups_are(_0=[0, 1]), "groups_sound", "comm_groups.json", "group 0"),
    "group 3000": (groups_are(_3000=[0, 1]), "groups_sound", "comm_groups.json", "over 2,147"),
    "group of one": (groups_are(_1=[0]), "groups_sound", "comm_groups.json", "group 1 has 1 ranks"),
    "group beyond": (groups_are(_3=[0, 1, 2, 9]), "groups_sound", "comm_groups.json", "rank 9"),
    "group below": (groups_are(_3=[0, 1, 2, -1]), "groups_sound", "comm_groups.json", "rank -1"),
    "group twice": (groups_are(_3=[0, 1, 2, 2]), "groups_sound", "comm_groups.json", "twice"),
    "group absent": (put(3, 4, pg_name=None), "groups_named", f"{NAME}.3.et", "no pg_name"),
    "group int": (put(3, 4, pg_name=3), "groups_named", f"{NAME}.3.et", "int"),
    "group word": (put(3, 4, pg_name="world"), "groups_named", f"{NAME}.3.et", "'world'"),
    "group named 0": (put(3, 4, pg_name="0"), "groups_named", f"{NAME}.3.et", "'0'"),
    "group unknown": (put(3, 4, pg_name="7"), "groups_named", f"{NAME}.3.et", "does not have"),
    "group of others": (put(3, 4, pg_name="1"), "groups_named", f"{NAME}.3.et", "rank 3 is not in"),
    "reduce": (put(0, 4, comm_type=1), "kinds_simulated", f"{NAME}.0.et", "REDUCE, which aborts"),
    "barrier": (put(0, 4, comm_type=9), "kinds_simulated", f"{NAME}.0.et", "BARRIER, which aborts"),
    "broadcast": (put(0, 4, comm_type=5), "kinds_simulated", f"{NAME}.0.et", "BROADCAST"),
    "no kind": (put(0, 4, comm_type=None), "kinds_simulated", f"{NAME}.0.et", "no comm_type"),
    "unknown kind": (put(0, 4, comm_type=44), "kinds_simulated", f"{NAME}.0.et", "comm_type 44"),
    "size 0": (put(0, 4, comm_size=0), "sizes_positive", f"{NAME}.0.et", "comm_size 0"),
    "size below 0": (put(0, 4, comm_size=-5), "sizes_positive", f"{NAME}.0.et", "comm_size -5"),
    "no size": (put(0, 2, comm_size=None), "sizes_positive", f"{NAME}.0.et", "no comm_size"),
    "no load": (append(0, node(7, "l", NodeType.MEM_LOAD)), "sizes_positive", f"{NAME}.0.et", "no tensor_size"),
    "tiny gather": (put(0, 4, comm_size=2), "gathers_large_enough", f"{NAME}.0.et", "loops for ever"),
    "no time": (append(0, node(7, "?")), "compute_timed", f"{NAME}.0.et", "1 nanosecond"),
    "unequal sizes": (put(3, 4, comm_size=8192), "collectives_agree", f"{NAME}.3.et", "4,096 bytes"),
    "another kind": (put(3, 4, comm_type=6), "collectives_agree", f"{NAME}.3.et", "ALL_GATHER"),
    "another order": (swap, "collectives_agree", f"{NAME}.3.et", "as number 1 of group 3"),
    "another count": (one_more, "collectives_agree", f"{NAME}.0.et", "rank 0 runs 3 collectives of group 3"),
    "silent rank": (
        lambda ranks, _: ranks.__setitem__(2, ranks[2][:1]), "collectives_agree", f"{NAME}.3.et", "rank 2",
    ),
    "no receiver": (put(0, 2, comm_dst=None), "messages_addressed", f"{NAME}.0.et", "no comm_dst"),
    "no sender": (put(2, 2, comm_src=None), "messages_addressed", f"{NAME}.2.et", "no comm_src"),
    "far receiver": (put(0, 2, comm_dst=9), "messages_addressed", f"{NAME}.0.et", "comm_dst 9"),
    "to itself": (put(0, 2, comm_dst=0), "messages_addressed", f"{NAME}.0.et", "comm_dst 0"),
    "wrong sender": (put(0, 2, comm_src=1), "messages_addressed", f"{NAME}.0.et", "comm_src 1"),
    "no tag": (put(0, 2, comm_tag=None), "messages_addressed", f"{NAME}.0.et", "no comm_tag"),
    "tag of collectives": (put(0, 2, comm_tag=10**6), "messages_addressed", f"{NAME}.0.et", "comm_tag 1000000"),
    "send alone": (unmatched_send, "messages_match", f"{NAME}.0.et", "1 sends from rank 0 to rank 1"),
    "receive alone": (unmatched_receive, "messages_match", f"{NAME}.1.et", "1 receives from rank 0 to rank 1"),
    "message sizes": (put(2, 2, comm_size=1), "messages_match", f"{NAME}.0.et", "node 3 receives 1"),
    "crossing groups": (cross, "ranks_finish", f"{NAME}.0.et", "rank 0 at node 7 (late) waits for rank 1, rank 1"),
    "receive before send": (mutual_receives, "ranks_finish", f"{NAME}.0.et", "rank 1 at node 7 (first) waits for"),
    "nothing sent": (unmatched_receive, "ranks_finish", f"{NAME}.1.et", "waits for rank 0"),
}  # fmt: skip


def named(found: Checked, which: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.check == which]


def test_the_good_set_is_clean(tmp_path: Path) -> None:
    found = checked(tmp_path, *good_set())
    assert found.findings == ()
    assert (found.ranks, found.nodes, found.errors) == (4, 24, 0)
    assert list(found.counts) == [one.__name__ for one in CHECKS]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_planted_trap_is_named(trap: str, tmp_path: Path) -> None:
    plant, which, file, words = TRAPS[trap]
    ranks, groups = good_set()
    plant(ranks, groups)
    found = checked(tmp_path, ranks, groups)
    hits = [finding for finding in named(found, which) if finding.file == file and words in finding.what]
    assert hits, [str(finding) for finding in found.findings]
    assert hits[0].fix
    assert "\n" not in str(hits[0])
    if file.endswith(".et") and which not in ("ranks_complete", "ranks_work"):
        own = {one.id: one.name for one in ranks[int(file.split(".")[1])]}
        assert hits[0].name == own[hits[0].node], "names a node of the file"
    mild = {"broadcast", "no time", "no tag", "group absent", "group 3000", "tag of collectives"}
    assert hits[0].severity == ("warning" if trap in mild else "error")


def test_every_check_catches_a_planted_trap() -> None:
    covered = {which for _, which, _, _ in TRAPS.values()} | {"metadata_first"}
    assert covered == {one.__name__ for one in CHECKS}


def test_groups_that_are_not_there(tmp_path: Path) -> None:
    ranks, _ = good_set()
    found = checked(tmp_path, ranks, None)
    assert "there is no comm_groups.json" in named(found, "groups_named")[0].what


def test_metadata_that_states_nothing(tmp_path: Path) -> None:
    ranks, groups = good_set()
    folder = write_set(tmp_path / "set", ranks, groups)
    nodes = b"".join(delimited(encode_node(one)) for one in ranks[0])
    for empty, severity in ((b"\0", "error"), (delimited(b"\x12\x03\x0a\x01x"), "warning")):
        (folder / f"{NAME}.0.et").write_bytes(empty + nodes)
        (finding,) = check(read_traces(folder)).findings
        assert (finding.check, finding.severity, finding.file) == ("metadata_first", severity, f"{NAME}.0.et")


def test_findings_are_capped_and_counted(tmp_path: Path) -> None:
    ranks, groups = good_set()
    ranks[0] += [node(100 + i, "?") for i in range(50)]
    found = checked(tmp_path, ranks, groups)
    assert len(named(found, "compute_timed")) == MAX_SHOWN
    assert found.counts["compute_timed"] == 50
    assert found.errors == 0


def test_how_many_more_there_are_is_told_among_the_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, groups = good_set()
    ranks[0] += [node(100 + i, "?") for i in range(50)]
    check_chakra(write_set(tmp_path / "set", ranks, groups), as_json=False)
    said = capsys.readouterr()
    assert f"compute_timed: {50 - MAX_SHOWN} more" in said.out.splitlines()
    assert "more" not in said.err


def test_a_send_does_not_wait_for_its_receive(tmp_path: Path) -> None:
    """Both ranks send first, as they may: what arrives early waits at the receiver."""
    ranks, groups = good_set()
    for rank, other in ((0, 1), (1, 0)):
        ranks[rank] += [
            node(7, "s", NodeType.SEND, comm_src=rank, comm_dst=other, comm_tag=9, comm_size=8),
            node(8, "r", NodeType.RECV, comm_src=other, comm_dst=rank, comm_tag=9, comm_size=8, data_deps=(7,)),
        ]
    assert checked(tmp_path, ranks, groups).findings == ()


def test_what_becomes_ready_meanwhile_takes_its_turn(tmp_path: Path) -> None:
    """Between two computations that follow each other comes one of a lower id, whose sum others wait for first."""
    ranks: Ranks = {
        0: [
            node(1, "r", NodeType.RECV, comm_src=1, comm_dst=0, comm_tag=1, comm_size=8),
            node(2, "received", duration_us=1, data_deps=(1,)),
            node(3, "long", duration_us=5),
            node(4, "longer", duration_us=5, ctrl_deps=(3,)),
            collective(5, "first", CommType.ALL_REDUCE, 64, "1", data_deps=(2,)),
            collective(6, "then", CommType.ALL_REDUCE, 64, "2", data_deps=(4,)),
        ],
        1: [
            node(1, "mm", duration_us=1),
            node(2, "s", NodeType.SEND, comm_src=1, comm_dst=0, comm_tag=1, comm_size=8, data_deps=(1,)),
            collective(3, "first", CommType.ALL_REDUCE, 64, "1", ctrl_deps=(2,)),
            collective(4, "then", CommType.ALL_REDUCE, 64, "2", ctrl_deps=(3,)),
        ],
    }
    assert checked(tmp_path, ranks, {"1": [0, 1], "2": [0, 1]}).findings == ()


MEMBERS = {"1": [0, 1], "2": [1, 2], "3": [0, 2], "4": [0, 1, 2]}


@given(calls=st.lists(st.sampled_from(sorted(MEMBERS)), max_size=6), data=st.data())
def test_a_run_hangs_exactly_where_its_order_is_circular(
    calls: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ranks run the same collectives, each in an order of its own, one after the other.

    With the n-th collective of a group as one node for all its ranks, they come to an end if and only if the graph
    of what comes next has no cycle.
    """
    ranks: Ranks = {}
    after: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for rank in range(3):
        own = data.draw(st.permutations([group for group in calls if rank in MEMBERS[group]]))
        ranks[rank] = [node(1, "mm", duration_us=5)]
        seen: Counter[str] = Counter()
        before: set[tuple[str, int]] = set()
        for place, group in enumerate(own):
            ranks[rank].append(
                collective(2 + place, group, CommType.ALL_REDUCE, 64, group, ctrl_deps=(1 + place,))
            )
            after.setdefault((group, seen[group]), set()).update(before)
            before = {(group, seen[group])}
            seen[group] += 1
    traces = read_traces(write_set(tmp_path_factory.mktemp("order"), ranks, MEMBERS))
    try:
        list(TopologicalSorter(after).static_order())
        circular = False
    except CycleError:
        circular = True
    assert bool(dry_run(traces)) == bool(free_run(traces, buffered=True)) == circular


def test_one_trace_a_role_is_no_set(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", *good_set())
    (folder / "roles.json").write_text("[]")
    with pytest.raises(InputError, match="all ranks"):
        read_traces(folder)


def test_which_set_of_a_folder(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", *good_set())
    other = folder / "other.0.et"
    other.write_bytes((folder / f"{NAME}.0.et").read_bytes())
    with pytest.raises(InputError, match="2 sets of traces"):
        read_traces(folder)
    assert len(read_traces(folder / NAME).ranks) == 4
    with pytest.raises(InputError, match="no Chakra traces"):
        read_traces(folder / "none")


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"1": 3}', '{"1": [1.5]}', '{"1": [true]}', '{"1": [0], "1": [1]}', "[" * 100_000, "\0"]
)
def test_groups_that_are_none(text: str, tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", *good_set())
    (folder / "comm_groups.json").write_text(text)
    with pytest.raises(FormatError, match=r"comm_groups\.json"):
        read_traces(folder)
