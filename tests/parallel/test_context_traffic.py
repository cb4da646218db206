"""What context parallelism sends, to the byte, purpose by purpose, nothing left over.

A ring of c passes each piece's keys and values c - 1 times forward and c - 1 times again backward,
and their gradients c - 1 times: the own share of these stays at home. An all-to-all over u of what
all ranks have sends (u - 1)/u of it.
"""

from __future__ import annotations

import math

import pytest
from test_tensor_traffic import (
    GPT2,
    ITEM,
    LLAMA2,
    TOKENS,
    all_reduce,
    all_reduce_by_doubling,
    expected,
    forward,
    on_ranks,
    step,
    total,
)

from minitrain.layout import Layout
from minitrain.nn.config import Config
from minitrain.nn.families import declare

KINDS = [
    "cp2",
    "cp3",
    "cp4",
    "cp3,ring",
    "cp2,ulysses",
    "cp4,ulysses",
    "cp3,gather",
    "cp4,ulysses2",
]
KINDS += ["cp4,ring,ulysses2"]


def activation(config: Config, layout: Layout, *, backward: bool) -> int:
    """Bytes of all ranks for attention."""
    queries = TOKENS * config.layers * config.width * ITEM
    keys = 2 * queries  # and values: these models have as many of their heads
    if layout.cp_kind == "gather":  # a reduce-scatter for the all-gather
        return (layout.cp - 1) * keys * (2 if backward else 1)
    exchanged = 2 * queries + keys  # what comes out, too
    inside = exchanged * (layout.exchange - 1) // layout.exchange * (2 if backward else 1)
    return inside + (layout.ring - 1) * keys * (3 if backward else 1)


def scalars(layout: Layout) -> int:
    """Bytes of all ranks: three numbers and five to see that all have one batch, and the loss."""
    return sum(all_reduce_by_doubling(layout.cp, count) for count in (3, 5, 1))


@pytest.mark.parametrize("words", KINDS)
@pytest.mark.parametrize("config", [GPT2, LLAMA2], ids=["gpt", "llama"])
def test_a_forward_sends_keys_and_values_alone(config: Config, words: str) -> None:
    layout = Layout.parse(words)
    sent = total(on_ranks(words, config, forward))
    right = activation(config, layout, backward=False)
    assert sent == expected(activation=right, scalar=scalars(layout))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("words", KINDS)
@pytest.mark.parametrize("config", [GPT2, LLAMA2], ids=["gpt", "llama"])
def test_a_step(config: Config, words: str, micro_batches: int) -> None:
    """And the gradients of all parameters once, as over data ranks."""
    layout = Layout.parse(words)
    ledgers = on_ranks(words, config, step, micro_batches=micro_batches)
    elements = sum(math.prod(p.declared) for p in declare(config).parameters().values())
    right = activation(config, layout, backward=True)
    assert total(ledgers) == expected(
        activation=right, gradient=all_reduce(layout.cp, elements), scalar=scalars(layout)
    )
    if layout.cp != 3:  # then every piece is as long, and every rank sends as much
        assert all(x.bytes(purpose="activation") == right // layout.cp for x in ledgers)
    if layout.ring == layout.cp:
        hops = 3 * (layout.cp - 1) * config.layers * micro_batches
        ops = "all_gather" if layout.cp_kind == "gather" else "send"
        assert ops == "all_gather" or all(x.messages("send", "cp") == hops for x in ledgers)


@pytest.mark.parametrize("words", ["cp3", "cp2,ulysses"])
def test_recomputation_sends_each_block_s_forward_again(words: str) -> None:
    layout = Layout.parse(words)
    again = total(on_ranks(words, GPT2, step, recompute="full"))
    once = activation(GPT2, layout, backward=False)
    assert again["activation"] == activation(GPT2, layout, backward=True) + once
