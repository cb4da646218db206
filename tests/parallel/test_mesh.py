"""The mesh: which ranks are a group, which are peers, on which nodes, and how it prints."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import AXES, Layout, LayoutError
from minitrain.nn import GPTConfig
from minitrain.nn.module import Parameter, constant
from minitrain.oracle import Row, Task
from minitrain.oracle.verify import verify_rank
from minitrain.parallel import Mesh
from minitrain.parallel.placement import Place, Placement


def on_each(layout: str, look: Callable[[Mesh], Any], nodes: tuple[int, ...] = ()) -> list[Any]:
    """What `look` sees in each rank's mesh. No rank may have sent anything for it."""

    def rank(group: Group) -> Any:
        with group.ledger() as ledger:
            seen = look(Mesh(group, Layout.parse(layout)))
        assert ledger.messages() == 0
        return seen

    return run_ranks(Layout.parse(layout).size, rank, synchronous=True, nodes=nodes)


@given(st.data())
def test_groups_differ_along_their_axes_and_in_nothing_else(data: st.DataObject) -> None:
    sizes = {axis: data.draw(st.integers(1, 3 if axis in ("dp", "tp") else 2)) for axis in AXES}
    layout = Layout(**sizes, order=tuple(data.draw(st.permutations(AXES))))
    axes = tuple(data.draw(st.lists(st.sampled_from(AXES), unique=True, min_size=1)))
    groups = on_each(str(layout), lambda mesh: mesh[axes].ranks)
    for rank, members in enumerate(groups):
        mine = layout.coordinates(rank)
        assert rank in members
        assert list(members) == sorted(members)
        for other in range(layout.size):
            place = layout.coordinates(other)
            alike = all(place[axis] == mine[axis] for axis in AXES if axis not in axes)
            assert (other in members) == alike


def test_a_group_adds_up_over_its_axis_alone() -> None:
    def total(group: Group) -> float:
        mesh = Mesh(group, Layout.parse("dp2,tp3"))
        return float(mesh["tp"].all_reduce(float(group.rank)))

    assert run_ranks(6, total, synchronous=True) == [3.0] * 3 + [12.0] * 3


def test_two_meshes_in_one_run_do_not_meet() -> None:
    """Megatron-LM #6307: a global group belongs to another grid."""

    def both(group: Group) -> list[float]:
        meshes = [Mesh(group, Layout.parse(words)) for words in ("dp2,tp3", "dp3,tp2")]
        return [float(mesh["tp"].all_reduce(float(group.rank))) for mesh in meshes]

    sums = run_ranks(6, both, synchronous=True)
    assert [s[0] for s in sums] == [3.0] * 3 + [12.0] * 3
    assert [s[1] for s in sums] == [1.0, 1.0, 5.0, 5.0, 9.0, 9.0]


def test_peers_hold_the_same_piece() -> None:
    """Two key/value heads on five ranks: 3 hold the first, 2 the second."""
    parameter = Parameter((2, 4), constant(0.0))
    parameter.placement = Placement((Place("tp", 0, (0, 0, 0, 1, 1), (1, 1)),))

    def look(mesh: Mesh) -> Any:
        peers = mesh.peers(parameter, "tp")
        first = parameter.placement.is_first(mesh.coordinates, mesh.sizes)
        return peers, mesh.along({"tp": peers}).ranks, first

    first, second = (0, 1, 2), (3, 4)
    assert on_each("tp5", look) == [
        (first, first, True), (first, first, False), (first, first, False),
        (second, second, True), (second, second, False),
    ]  # fmt: skip
    ranks = [seen[1] for seen in on_each("dp2,tp5", look)]
    assert ranks[5:] == [(5, 6, 7)] * 3 + [(8, 9)] * 2


def test_a_layout_for_other_ranks_is_refused_with_both_numbers() -> None:
    with pytest.raises(LayoutError, match="needs 4 ranks, but there are 3"):
        run_ranks(3, lambda group: Mesh(group, Layout.parse("dp2,tp2")))


def test_a_mesh_may_be_on_some_of_the_ranks() -> None:
    """Ranks 2 to 5 of six, on nodes of their own: groups and nodes are counted among them."""

    def rank(group: Group) -> Any:
        if group.rank < 2:
            return None
        mesh = Mesh(group.subgroup(range(2, 6), "half"), Layout.parse("dp2,tp2"))
        along = mesh.along({"tp": (0, 1)})
        return mesh["tp"].ranks, along.ranks, mesh["dp"].ranks, mesh.nodes, mesh.crossings("tp")

    seen = run_ranks(6, rank, nodes=(0, 0, 3, 3, 5, 5))
    nodes: tuple[int, ...] = (0, 0, 1, 1)
    assert seen[2] == ((2, 3), (2, 3), (2, 4), nodes, [])
    assert seen[5] == ((4, 5), (4, 5), (3, 5), nodes, [])


def test_two_meshes_on_parts_of_the_ranks_train_at_once() -> None:
    """Six ranks in two jobs: each is held against one device, tensor by tensor."""
    config = GPTConfig(vocab=11, context=6, layers=1, heads=3, width=12, dropout=0.1)
    jobs = [
        (Task(config, steps=2, batch=6, bucket=512, seed=seed), Layout.parse(layout))
        for seed, layout in ((0, "dp2,tp2"), (1, "dp2"))
    ]
    references = [task.reference() for task, _ in jobs]

    def rank(group: Group) -> list[Row]:
        which = int(group.rank >= 4)
        task, layout = jobs[which]
        return verify_rank(group.split(which), layout, task, references[which])

    found = run_ranks(6, rank, synchronous=True)
    for job in (found[:4], found[4:]):
        assert {row.rank for rows in job for row in rows} == set(range(len(job)))
    assert [str(row) for rows in found for row in rows if not row.ok] == []


EXPERTS = [
    "dp4,ep2", "dp4,ep4", "dp6,ep3", "dp2,cp2,ep2", "dp2,cp2,ep4", "dp4,cp2,ep4", "dp3,cp2,ep6",
    "dp2,shard3,zero1,ep6", "shard4,zero3,cp2,ep2", "dp2,tp2,ep2", "dp2,pp2,tp2,ep2", "dp3", "tp2",
    "dp4,tp2,ep2,order=tp-dp-pp-shard-cp",
]  # fmt: skip


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_are_cut_over_one_part_of_the_data_ranks_and_shared_over_the_other(
    layout: str,
) -> None:
    """ "ep" and "edp" each partition the data ranks, and cross in exactly one rank."""
    seen = on_each(layout, lambda mesh: (mesh.data.ranks, mesh["ep"].ranks, mesh["edp"].ranks))
    for rank, (data, cut, shared) in enumerate(seen):
        assert len(cut) == Layout.parse(layout).ep
        assert len(cut) * len(shared) == len(data)
        for members, place in ((data, 0), (cut, 1), (shared, 2)):
            assert rank in members
            assert set(members) <= set(data)
            assert all(seen[other][place] == members for other in members)  # they agree
        assert all(len(set(cut) & set(seen[other][2])) == 1 for other in data)


def test_a_group_of_a_derived_axis_adds_up_over_it_alone() -> None:
    """Experts are cut over neighbours."""

    def total(group: Group) -> tuple[float, float]:
        mesh, mine = Mesh(group, Layout.parse("dp4,ep2")), float(group.rank)
        return float(mesh["ep"].all_reduce(mine)), float(mesh["edp"].all_reduce(mine))

    sums = run_ranks(4, total, synchronous=True)
    assert sums == [(1.0, 2.0), (1.0, 4.0), (5.0, 2.0), (5.0, 4.0)]


def test_a_mesh_of_thousands_of_ranks_does_not_look_at_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Yuan 1.0's 8 × 38 × 7 ranks each make a mesh: it must not cost as many steps as ranks."""
    layout, asked = Layout.parse("dp7,pp38,tp8"), []
    coordinates = Layout.coordinates
    monkeypatch.setattr(
        Layout, "coordinates", lambda self, rank: asked.append(rank) or coordinates(self, rank)
    )
    transport: Any = SimpleNamespace(rank=1234, nodes=[0] * layout.size)
    mesh = Mesh(Group(transport, tuple(range(layout.size))), layout)
    assert mesh["tp"].ranks == tuple(range(1232, 1240))
    assert mesh["dp"].ranks == tuple(range(1234 % 304, 2128, 304))
    assert mesh["pp"].ranks == tuple(range(1218, 1520, 8))
    assert len(mesh["dp", "tp"].ranks) == 56
    assert asked == [1234]


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(KeyError, match="no axis 'tensor'; the axes are dp, pp, shard, cp, tp"):
        on_each("tp2", lambda mesh: mesh["tensor"])


def test_nodes_are_numbered_in_the_order_of_ranks() -> None:
    assert on_each("dp2,tp2", lambda mesh: mesh.nodes, (7, 7, 3, 3)) == [(0, 0, 1, 1)] * 4
    assert on_each("tp2", lambda mesh: mesh.nodes) == [(0, 0)] * 2


def test_groups_that_cross_nodes_are_known_and_advised_against() -> None:
    def look(mesh: Mesh) -> Any:
        return mesh.crossings("tp"), mesh.crossings("dp"), mesh.advice()

    inside = on_each("dp2,tp2", look, (0, 0, 1, 1))
    assert inside == [([], [(0, 2), (1, 3)], [])] * 4
    across = on_each("dp2,tp2", look, (0, 1, 0, 1))
    assert {(tuple(tp), tuple(dp)) for tp, dp, _ in across} == {(((0, 1), (2, 3)), ())}
    (advice,) = across[0][2]
    assert advice.startswith("2 tp group(s), such as ranks 0, 1, reach over several nodes")
    # The order of the axes decides which links carry what.
    assert on_each("dp2,tp2,order=tp-pp-shard-cp-dp", look, (0, 1, 0, 1))[0][2] == []


def test_a_mesh_prints_every_rank_with_its_place_and_node() -> None:
    table = on_each("dp2,tp2,sp", str, (0, 0, 1, 1))[3]
    assert table == "\n".join(
        [
            "dp2,tp2,sp: 4 rank(s) on 2 node(s)",
            "  rank    dp    tp  node",
            "     0     0     0     0",
            "     1     0     1     0",
            "     2     1     0     1",
            "     3     1     1     1",
        ]
    )
    assert on_each("dp2,tp2", repr)[2] == "rank 2 of dp2,tp2 at dp 1, pp 0, shard 0, cp 0, tp 0"
