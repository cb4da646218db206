"""`minitrain show`: the mesh, the pieces, and what one step sends and holds."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from command import invoke

from minitrain.layout import Layout
from minitrain_cli.show import grid

SMALL = ("--layers", 2, "--batch", 12)


def shown(*args: Any) -> dict[str, Any]:
    result = invoke("show", *args, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def size_of(elements: str | None) -> int:
    """Of what a rank holds, as it is written: `[0:4, 2:6]`, or of that `flat 3:9`."""
    if elements is None:
        return 0
    spans = re.findall(r"(\d+):(\d+)", elements.partition("flat ")[2] or elements)
    return math.prod(int(stop) - int(start) for start, stop in spans)


def test_the_mesh_is_a_grid_with_the_fastest_axis_across() -> None:
    assert grid(Layout.parse("dp2,pp2,tp3")) == (
        ("", "tp 0", "tp 1", "tp 2"),
        [
            ("dp 0, pp 0", "0", "1", "2"),
            ("dp 0, pp 1", "3", "4", "5"),
            ("dp 1, pp 0", "6", "7", "8"),
            ("dp 1, pp 1", "9", "10", "11"),
        ],
    )
    assert grid(Layout()) == (("", "dp 0"), [("", "0")])


@pytest.mark.parametrize(
    "layout", ["dp2,tp2", "shard2,zero2,tp2", "shard3,zero3", "pp2,tp3", "shard2,zero1,owner"]
)
def test_the_pieces_of_a_rank_are_what_its_arrays_hold(layout: str) -> None:
    """Every element in float32: those that live, and AdamW's two arrays of those it steps."""
    for rank in range(Layout.parse(layout).size):
        found = shown(layout, "--rank", rank)
        held = {row["kind"]: row["measured"] for row in found["memory"]}
        lives = sum(size_of(row["holds"]) for row in found["parameters"])
        steps = sum(size_of(row["steps"]) for row in found["parameters"])
        assert held["parameters"] == 4 * lives > 0
        assert held["optimizer"] == 2 * 4 * steps > 0
        for row in found["memory"][:3]:
            assert row["formula"] in (row["measured"], None)


def test_what_is_sent_is_the_sum_of_the_matrix_and_of_all_ranks() -> None:
    whole = shown("dp2,tp2")
    ranks = [shown("dp2,tp2", "--rank", rank) for rank in range(4)]
    total = sum(row["bytes"] for row in whole["sent"])
    assert total == sum(map(sum, whole["matrix"])) > 0
    for rank, each in enumerate(ranks):
        assert sum(row["bytes"] for row in each["sent"]) == sum(whole["matrix"][rank])
    assert whole["matrix"][0][3] == 0  # no axis has both of them
    [gradient] = [row for row in whole["sent"] if row["purpose"] == "gradient"]
    # 2(n-1) times what a rank has of the model, on each of the two tp ranks' dp groups.
    assert gradient["bytes"] == 2 * sum(
        {row["kind"]: row["measured"] for row in each["memory"]}["gradient"] for each in ranks[:2]
    )


@pytest.mark.parametrize("layout", ["dp2,tp2,sp", "shard2,zero3", "pp2,tp2"])
def test_what_is_measured_is_the_formula(layout: str) -> None:
    rows = shown(layout)["by_axis"]
    assert len(rows) > 2
    assert [row["measured"] for row in rows] == [row["formula"] for row in rows]


def test_blocks_that_are_alike_are_one_line() -> None:
    text = invoke("show", "pp2,tp2", "--layers", 4, "--micro-batches", 2).stdout
    assert "Mesh of pp2,1f1b,tp2: 4 rank(s):\n" in text
    line = re.search(r"^ +blocks.0-1.attention.qkv.weight .*$", text, re.M)
    assert line
    assert "32 × 3 × 8 × 4  on pp 0, axis 2 over tp: 4+4" in line[0]
    assert re.search(r"^ +blocks.2-3.mlp_norm.bias +32 +on pp 1 +on pp 1$", text, re.M)
    assert re.search(
        r"^ +embedding.token.weight .* on pp 0,1, axis 0 over tp: 128\+128", text, re.M
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("dp2", "--rank", 2), "rank 2 is not in layout dp2, which has 2 rank(s)"),
        (("tp9",), "8 attention heads cannot be cut into 9 parts"),
        (("dp512",), "dp512 has 512 ranks"),
        (("dp7",), "batch 24 does not divide evenly into 7 parts"),
        (("dp2", "--lr", 1), "--lr"),
    ],
)
def test_what_cannot_be_shown_is_one_line(args: tuple[Any, ...], words: str) -> None:
    result = invoke("show", *args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert words in result.stderr
