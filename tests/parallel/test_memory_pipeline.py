"""Activations that wait on each stage of a pipeline: the formula, and what is really there."""

from __future__ import annotations

from typing import Any

import pytest
from pipelines import batch_of
from tape import base, tape

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.parallel import Mesh, parallelize
from minitrain.planner.memory import held

GPT = GPTConfig(vocab=23, context=9, layers=5, heads=4, width=12, hidden=10, dropout=0.1)
LLAMA = LlamaConfig(vocab=23, context=9, layers=5, heads=4, kv_heads=2, width=16, hidden=10)
MICRO_BATCHES = 4


class Waiting(dict[Any, Any]):
    """A worker's `waiting`, which keeps account of the most bytes in it.

    Attributes:
        given: the arrays of the batch's parts, which are the caller's.
    """

    most = 0
    given: set[int]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        arrays: dict[int, Any] = {}
        for entry, out in (pair for pair in self.values() if isinstance(pair, tuple)):
            arrays |= {} if out.node is None else tape(out.node)  # None: an empty stage
            ends = [out] if out.array.ndim else []  # the loss is a number
            ends += [] if entry is None else [entry]
            arrays |= {id(base(end.array)): base(end.array) for end in ends}
        kept = sum(x.nbytes for key, x in arrays.items() if key not in self.given)
        self.most = max(self.most, kept)


def most_waiting(group: Group, config: Config, layout: Layout, options: dict[str, Any]) -> int:
    """The most that waits on this rank in a step, where no backward is half done."""
    options = options | {"micro_batches": MICRO_BATCHES}
    model = parallelize(declare(config), Mesh(group, layout), **options)
    batch = batch_of(config, 2 * MICRO_BATCHES * layout.data_ranks)
    parts = model.shares.of(batch)
    model.worker.waiting = waiting = Waiting()
    waiting.given = {
        id(base(x))
        for part in parts
        for x in (part.tokens, part.labels, part.places, part.positions)
    }
    model.worker.run(parts, 1.0)
    return waiting.most


def formula(config: Config, layout: Layout, rank: int, options: dict[str, Any]) -> int:
    return held(
        config, layout, batch=2, length=config.context, micro_batches=MICRO_BATCHES, rank=rank,
        **options,
    ).activations  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "layout",
    ["pp1", "pp2", "pp3,gpipe", "pp3,interleaved", "pp7", "pp2,tp2,sp", "pp2,shard2,zero3"],
)
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_what_waits_on_a_stage_is_the_formula(config: Config, layout: str, recompute: str) -> None:
    """Of all micro-batches in flight: links, what came in, what went out; seven stages have an
    embedding, five blocks and a head each to itself."""
    where, options = Layout.parse(layout), {"recompute": recompute, "dtype": "float32"}
    found = run_ranks(where.size, most_waiting, config, where, options)
    assert found == [formula(config, where, rank, options) for rank in range(where.size)]


@pytest.mark.parametrize("layout", ["pp2,zb-h1", "pp3,zb-h2", "pp2,zb-v", "pp3,v-half"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_halves_of_backwards_are_counted_as_wholes(config: Config, layout: str) -> None:
    """So the formula is never too little; and where no half waits at the fullest, it is exact."""
    where = Layout.parse(layout)
    found = run_ranks(where.size, most_waiting, config, where, {"dtype": "float32"})
    bounds = [formula(config, where, rank, {}) for rank in range(where.size)]
    assert all(most <= bound for most, bound in zip(found, bounds, strict=True))
    if layout.startswith("pp2,zb-h1"):
        assert found[0] == bounds[0]


@pytest.mark.parametrize("stages", [(1, 4, 0), (2, 0, 3)])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_stages_that_are_asked_for(config: Config, stages: tuple[int, ...]) -> None:
    """One of them may be empty, and hand on what comes in."""
    where, options = Layout.parse("pp3"), {"stages": stages}
    found = run_ranks(3, most_waiting, config, where, options)
    assert found == [formula(config, where, rank, options) for rank in range(3)]
