"""All layouts that can run a model: each is there, each can run, none is there twice."""

from __future__ import annotations

import pytest

from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.oracle.task import FAMILIES, NANO
from minitrain.parallel.legal import layouts
from minitrain.parallel.table import check_layout


@pytest.mark.parametrize("ranks", [1, 2, 6, 8])
def test_each_is_of_so_many_ranks_once_and_can_run(ranks: int) -> None:
    found = list(layouts(ranks, NANO))
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.size == ranks
        assert Layout.parse(str(layout)) == layout
        check_layout(layout, NANO, micro_batches=4)


def test_what_one_would_write_is_among_them() -> None:
    assert list(map(str, layouts(1, NANO))) == ["dp1"]
    two = set(map(str, layouts(2, NANO)))
    assert two > {"dp2", "tp2", "tp2,sp", "shard2,zero3,keep", "shard2,zero2,owner", "pp2,1f1b"}
    eight = set(layouts(8, NANO))
    four = set(layouts(4, NANO))
    for words in ("cp4", "cp4,ring", "cp4,ulysses", "cp4,gather", "cp4,ulysses2", "dp2,cp2"):
        assert Layout.parse(words) in four
    for words in ("dp2,pp2,tp2,sp", "pp4,zb-h1,shard2,zero3", "dp8", "shard4,zero1,owner,tp2"):
        assert Layout.parse(words) in eight


def test_experts_are_cut_in_every_way_that_data_ranks_can_be() -> None:
    mixture = FAMILIES["mixture"]
    assert {layout.ep for layout in layouts(6, NANO)} == {1}
    found = set(layouts(6, mixture))
    assert {layout.ep for layout in found} == {1, 2, 3, 6}
    assert {Layout.parse("dp2,tp3,sp,ep2"), Layout.parse("shard6,zero3,ep3")} < found
    for layout in found:
        check_layout(layout, mixture, micro_batches=4)


def test_what_cannot_run_is_not_among_them() -> None:
    """Heads for at most eight tp ranks, a chain of six links."""
    assert "tp16" not in map(str, layouts(16, NANO))
    with pytest.raises(UserError):
        check_layout(Layout.parse("tp16"), NANO)
    assert not [layout for layout in layouts(7, NANO) if layout.pp == 7]
