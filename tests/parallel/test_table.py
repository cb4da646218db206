"""The table of placements: the model's names and shapes, and every element in one piece."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import AXES, Layout, LayoutError
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import TABLE, Config
from minitrain.nn.families import declare
from minitrain.oracle.coverage import pieces_with
from minitrain.parallel import Mesh, parallelize, placements
from minitrain.parallel.placement import FLAT
from minitrain.parallel.stages import chunks_of, stage_sizes

GPT = GPTConfig(vocab=13, context=7, layers=3, heads=5, width=20, hidden=9)
LLAMA = LlamaConfig(vocab=13, context=7, layers=3, heads=6, kv_heads=2, width=24, hidden=9)
CONFIGS = [
    GPT,
    GPTConfig(vocab=9, layers=1, heads=1, width=4, tied=False),
    LLAMA,
    LlamaConfig(vocab=9, layers=2, heads=2, width=8, tied=True),
]
IDS = ["gpt", "gpt-untied", "llama", "llama-tied"]


def models(tp: int) -> st.SearchStrategy[Config]:
    """Of either family, with at least tp heads, which do not always divide."""
    sizes = {"vocab": st.integers(tp, 12), "context": st.integers(1, 6), "tied": st.booleans(),
             "layers": st.integers(1, 5), "hidden": st.integers(1, 9)}  # fmt: skip
    gpt = st.integers(tp, tp + 3).flatmap(
        lambda heads: st.builds(GPTConfig, heads=st.just(heads), width=st.just(2 * heads), **sizes)
    )
    shapes = st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda s: s[0] * s[1] >= tp)
    llama = shapes.flatmap(
        lambda s: st.builds(
            LlamaConfig, heads=st.just(s[0] * s[1]), kv_heads=st.just(s[0]),
            width=st.just(2 * s[0] * s[1]), **sizes,
        )
    )  # fmt: skip
    return st.one_of(gpt, llama)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Config, Layout, list[int] | None]:
    """A model, a layout over all that cuts weights, and blocks of each stage."""
    tp, pp, shard = (draw(st.integers(1, most)) for most in (5, 4, 3))
    config: Config = draw(models(tp))
    pp = min(pp, config.layers + 2)
    layout = Layout(dp=draw(st.integers(1, 2)), pp=pp, shard=shard, tp=tp, sp=draw(st.booleans()),
                    zero=draw(st.sampled_from([1, 2, 3])) if shard > 1 else None)  # fmt: skip
    if draw(st.booleans()):
        return config, layout, None
    ends = sorted(draw(st.lists(st.integers(0, config.layers), min_size=pp - 1, max_size=pp - 1)))
    stages = np.diff([0, *ends, config.layers]).tolist()
    return config, layout, stages


@pytest.mark.parametrize("layout", ["dp1", "tp2", "pp2,shard2,zero3"])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_names_order_and_shapes_are_those_of_the_model(config: Config, layout: str) -> None:
    layout = "dp2" if config.heads == 1 else layout
    table = placements(config, Layout.parse(layout))
    expected = [(name, p.declared) for name, p in declare(config).parameters().items()]
    assert [(name, entry.shape) for name, entry in table.items()] == expected


@given(cases())
def test_every_element_is_in_one_piece(case: tuple[Config, Layout, list[int] | None]) -> None:
    """Where it lives and where it is stepped; the oracle's count, and one by hand, by rank."""
    config, layout, stages = case
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    for name, entry in placements(config, layout, stages=stages).items():
        assert entry.state is not None
        for placement in (entry.placement, entry.state):
            assert (pieces_with(entry.shape, placement, layout) == 1).all(), name
            numbers = np.arange(np.prod(entry.shape)).reshape(entry.shape)
            counted = np.zeros(numbers.size, int)
            for rank in range(layout.size):
                at = layout.coordinates(rank)
                if placement.is_first(at, sizes):
                    counted[placement.cut(numbers, at).reshape(-1)] += 1
            assert (counted == 1).all(), name


@given(cases())
def test_what_lies_where_follows_the_layout(case: tuple[Config, Layout, list[int] | None]) -> None:
    """Stages hold their links alone; ZeRO 1 and 2 cut what is stepped, 3 what lives too."""
    config, layout, stages = case
    table = placements(config, layout, stages=stages)
    blocks = stage_sizes(config, layout.pp) if stages is None else stages
    stage_of = np.repeat(np.arange(layout.pp), blocks)
    for name, entry in table.items():
        first, *rest = name.split(".")
        on = {0} if first == "embedding" else {layout.pp - 1}
        on = {int(stage_of[int(rest[0])])} if first == "blocks" else on
        on |= {layout.pp - 1} if name == TABLE and config.tied else set()
        for stage in range(layout.pp):
            at = dict.fromkeys(AXES, 0) | {"pp": stage}
            assert (entry.placement.piece(entry.shape, at) is not None) == (stage in on)
        assert ("pp" in entry.placement.partial) == (len(on) > 1)
        assert {"dp", "shard", "cp"} <= entry.placement.partial
        flat = [place.axis == FLAT for place in entry.placement.places]
        assert any(flat) == (layout.shard > 1 and layout.zero == 3)
        cut_flat = [place.axis == FLAT for place in entry.stepped.places]
        assert sum(cut_flat) == sum(cut_flat[-1:]) == (layout.shard > 1)


def test_links_of_stages_make_up_the_chain() -> None:
    for text, stages in (("pp1", None), ("pp3", None), ("pp3", [0, 3, 0]), ("pp2", [3, 0])):
        found = [list(own) for [own] in chunks_of(GPT, Layout.parse(text), stages)]
        assert [link for links in found for link in links] == [0, 1, 2, 3, 4]
        assert 0 in found[0]
        assert 4 in found[-1]
    assert chunks_of(GPT, Layout(pp=3), [0, 3, 0])[1] == [range(1, 4)]
    interleaved, v = (chunks_of(GPT, Layout.parse(f"pp2,{how}"), [1, 1, 0, 1])
                      for how in ("interleaved", "zb-v"))  # fmt: skip
    assert interleaved == [[range(2), range(3, 3)], [range(2, 3), range(3, 5)]]
    assert v == [[range(2), range(3, 5)], [range(2, 3), range(3, 3)]]


def test_what_is_partial_over_tp() -> None:
    """Under sp all that is whole; key/value heads that ranks share; nothing else."""

    def partial(config: Config, layout: str) -> set[str]:
        table = placements(config, Layout.parse(layout))
        return {n.split(".")[-2] for n, e in table.items() if "tp" in e.placement.partial}

    assert partial(GPT, "tp2") == set()
    assert partial(LLAMA, "tp2") == set()
    assert partial(LLAMA, "tp3") == {"kv"}
    assert partial(LLAMA, "tp2,sp") == {"attention_norm", "mlp_norm", "norm"}
    assert partial(LLAMA, "tp3,sp") == {"attention_norm", "mlp_norm", "norm", "kv"}
    whole = {"position", "attention_norm", "mlp_norm", "norm", "out", "down"}
    assert partial(GPT, "tp2,sp") == whole


def test_it_needs_neither_arrays_nor_ranks() -> None:
    code = (
        "import sys; from minitrain.parallel import placements;"
        "from minitrain.nn.config import GPTConfig; from minitrain.layout import Layout;"
        "table = placements(GPTConfig(layers=96), Layout.parse('dp8,pp38,tp7'));"
        "loaded = {'numpy', 'mpi4py'} & set(sys.modules); assert not loaded, loaded;"
        "assert len(table) == 2 + 96 * 12 + 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_frozen_parameters_are_never_stepped() -> None:
    for layout in (Layout(tp=2), Layout(pp=2, shard=2, zero=3)):
        table = placements(GPT, layout, frozen=["embedding.*", "blocks.[01].mlp.up.weight"])
        frozen = {name for name, entry in table.items() if entry.state is None}
        assert frozen == {
            "embedding.token.weight", "embedding.position.weight",
            "blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight",
        }  # fmt: skip
        plain = placements(GPT, layout)
        for name, entry in table.items():  # they live where they did
            assert entry.placement == plain[name].placement
            assert entry.stepped == (entry.placement if name in frozen else plain[name].state)
    with pytest.raises(LayoutError, match=r"no parameter is called 'blocks\.9\.\*'; there are emb"):
        placements(GPT, Layout(), frozen=["embedding.*", "blocks.9.*"])


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([3], "3 blocks on 1 stages, but the model has 3 blocks and the layout 2 stage"),
        ([1, 1, 1], "3 blocks on 3 stages, but the model has 3 blocks and the layout 2 stage"),
        ([2, 2], "stages 2,2 have 4 blocks on 2 stages, but the model has 3 blocks"),
        ([4, -1], "stages 4,-1 have 3 blocks on 2 stages"),
    ],
)
def test_stages_that_do_not_fit_are_refused_with_both_numbers(
    stages: list[int], words: str
) -> None:
    with pytest.raises(LayoutError, match=r"give 2 number\(s\) that add up to 3") as caught:
        placements(GPT, Layout(pp=2), stages=stages)
    assert words in str(caught.value)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "tp5", "tp3,sp", "dp2,tp2,sp"])
@pytest.mark.parametrize("filled", ["configuration", "declared", "filled"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_parallelize_gives_each_rank_the_pieces_of_the_table(
    config: Config, layout: str, filled: str
) -> None:
    table = placements(config, Layout.parse(layout))
    whole = {k: p.initial(3) for k, p in declare(config).parameters().items()}

    def rank(group: Group) -> tuple[dict[str, int], Any, dict[str, Any]]:
        model: Any = config if filled == "configuration" else declare(config)
        if filled == "filled":
            model = model.initialize(3, "float64")
        mesh = Mesh(group, Layout.parse(layout))
        made = parallelize(model, mesh, seed=3, dtype="float64")
        return mesh.coordinates, made.table, {k: p.array for k, p in made.parameters.items()}

    for at, found, parameters in run_ranks(Layout.parse(layout).size, rank):
        assert found == table
        assert list(found) == list(table)
        assert list(parameters) == [
            name for name, entry in table.items() if entry.placement.piece(entry.shape, at)
        ]
        for name, array in parameters.items():
            piece = table[name].placement.cut(whole[name], at)
            np.testing.assert_array_equal(array, piece, strict=True)
