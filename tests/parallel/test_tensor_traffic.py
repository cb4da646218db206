"""What tensor and sequence parallelism send, to the byte, purpose by purpose, nothing left over.

An all-reduce of V bytes over t ranks sends 2(t-1)·V from all of them together, whether or not t
divides V; an all-gather or a reduce-scatter half of that. Numbers of each rank are tested where
everything divides.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.comm.ledger import Ledger
from minitrain.layout import Layout
from minitrain.nn import CrossEntropy, GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.parallel import Mesh, ParallelModel, parallelize

BATCH, LENGTH, ITEM = 4, 80, 8
GPT2 = GPTConfig(vocab=30, context=LENGTH, layers=2, heads=4, width=12, hidden=18)
LLAMA2 = LlamaConfig(vocab=30, context=LENGTH, layers=2, heads=4, kv_heads=4, width=16, hidden=18)
TOKENS = BATCH * LENGTH  # of a step, over all micro-batches

PLAIN = ["tp1", "tp2", "tp3", "tp4"]
SP = [f"{layout},sp" for layout in PLAIN]


def on_ranks(layout: str, config: Config, use: Any, **options: Any) -> list[Ledger]:
    """Each rank's ledger of what `use` does with a model and a batch."""
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, config.vocab, (2, BATCH, LENGTH))
    batch = Batch(tokens, labels, np.arange(BATCH), 0, BATCH)
    smoothing = options.pop("smoothing", 0.0)

    def rank(group: Group) -> Ledger:
        plain = declare(config)
        plain.loss = CrossEntropy(smoothing)
        mesh = Mesh(group, Layout.parse(layout))
        model = parallelize(plain, mesh, dtype="float64", **options)
        with group.ledger() as ledger:
            use(model, batch)
        return ledger

    return run_ranks(Layout.parse(layout).size, rank, synchronous=True)


def forward(model: ParallelModel, batch: Batch) -> None:
    model.evaluate(batch)


def step(model: ParallelModel, batch: Batch) -> None:
    model.forward_backward(batch)


def total(ledgers: list[Ledger]) -> dict[str, int]:
    """Bytes of all ranks by purpose; a purpose without bytes isn't there."""
    sums: Counter[str] = Counter()
    for ledger in ledgers:
        assert sum(ledger.by("purpose").values()) == ledger.bytes()
        sums.update(ledger.by("purpose"))
    return {purpose: nbytes for purpose, nbytes in sums.items() if nbytes}


def expected(**volumes: int) -> dict[str, int]:
    return {purpose: nbytes for purpose, nbytes in volumes.items() if nbytes}


def all_reduce(ranks: int, numbers: int) -> int:
    """Bytes of all ranks together."""
    return 2 * (ranks - 1) * numbers * ITEM


@pytest.mark.parametrize("layout", PLAIN + SP)
@pytest.mark.parametrize("config", [GPT2, LLAMA2], ids=["gpt", "llama"])
def test_forward_two_of_bsh_a_layer_and_one_for_the_embedding(config: Config, layout: str) -> None:
    """With sp an all-gather takes the embedding's second half over to the head: the same bytes."""
    t = Layout.parse(layout).tp
    activation = all_reduce(t, (2 * config.layers + 1) * TOKENS * config.width)
    sent = total(on_ranks(layout, config, forward))
    assert sent == expected(
        activation=activation, scalar=all_reduce(t, 3 * TOKENS) + batch_check(t)
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize("config", [GPT2, LLAMA2], ids=["gpt", "llama"])
def test_a_step_of_tensor_parallelism(config: Config, layout: str, micro_batches: int) -> None:
    """As much again in the backward, where the head's is in the place of the embedding's."""
    t = Layout.parse(layout).tp
    ledgers = on_ranks(layout, config, step, micro_batches=micro_batches, smoothing=0.1)
    activation = all_reduce(t, (4 * config.layers + 2) * TOKENS * config.width)
    assert total(ledgers) == expected(
        activation=activation,
        # A fourth number a token with label smoothing.
        scalar=all_reduce(t, 4 * TOKENS) + batch_check(t),
    )
    for ledger in ledgers:
        assert ledger.bytes("all_reduce", "tp") == ledger.bytes()
        if (TOKENS // micro_batches * config.width) % t == 0:
            assert ledger.bytes(purpose="activation") == activation // t


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("layout", SP)
@pytest.mark.parametrize("config", [GPT2, LLAMA2], ids=["gpt", "llama"])
def test_a_step_of_sequence_parallelism(config: Config, layout: str, micro_batches: int) -> None:
    """Half by reduce-scatter, half by all-gather: the bytes of tensor parallelism; and once a step
    the gradients of what is whole on every rank."""
    t = Layout.parse(layout).tp
    ledgers = on_ranks(layout, config, step, micro_batches=micro_batches)
    half = (t - 1) * (4 * config.layers + 2) * TOKENS * config.width * ITEM
    replicated = sum(
        math.prod(p.declared)
        for name, p in declare(config).parameters().items()
        if "norm" in name or "position" in name or name.endswith(("out.bias", "down.bias"))
    )
    gradient = all_reduce(t, replicated)
    if replicated * ITEM <= 1024:  # few bytes go by doubling, which sends all of them each time
        assert isinstance(config, LlamaConfig)
        gradient = all_reduce_by_doubling(t, replicated)
    assert total(ledgers) == expected(
        activation=2 * half,
        scalar=all_reduce(t, 3 * TOKENS) + batch_check(t),
        gradient=gradient,
    )
    for op in ("reduce_scatter", "all_gather"):
        assert sum(ledger.bytes(op, "tp", "activation") for ledger in ledgers) == half


def all_reduce_by_doubling(ranks: int, numbers: int) -> int:
    """Bytes of all ranks: a power of two of them exchange all, the others hand theirs over."""
    power = 1 << (ranks.bit_length() - 1)
    return (power * (power.bit_length() - 1) + 2 * (ranks - power)) * numbers * ITEM


def batch_check(ranks: int) -> int:
    """Bytes of all ranks for the three numbers that show that all have the same batch."""
    return all_reduce_by_doubling(ranks, 3)


@pytest.mark.parametrize("layout", PLAIN + SP)
def test_recomputation_sends_each_block_s_forward_again(layout: str) -> None:
    t = Layout.parse(layout).tp
    kept = total(on_ranks(layout, GPT2, step))
    again = total(on_ranks(layout, GPT2, step, recompute="full"))
    more = all_reduce(t, 2 * GPT2.layers * TOKENS * GPT2.width)
    assert again.get("activation", 0) == kept.get("activation", 0) + more
    assert {p: n for p, n in again.items() if p != "activation"} == {
        p: n for p, n in kept.items() if p != "activation"
    }


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("layout", ["tp3", "tp4", "tp4,sp"])
def test_shared_key_value_heads_are_summed_among_their_sharers(layout: str, kv_heads: int) -> None:
    """Each head's weight, C·2·D, over the ranks that hold it; all other traffic as before."""
    wide = LlamaConfig(
        vocab=30, context=LENGTH, layers=1, heads=4, kv_heads=kv_heads, width=32, hidden=18
    )
    t, sp = Layout.parse(layout).tp, Layout.parse(layout).sp
    kv, norms = 32 * 2 * 8, 3 * 32 * sp
    if kv_heads == 1:  # then its sharers are all the ranks, and the norms' gradients go with it
        gradient = all_reduce(t, kv + norms)
    else:
        sharers = [len(part) for part in np.array_split(np.arange(t), kv_heads)]
        gradient = sum(all_reduce(n, kv) for n in sharers) + all_reduce_by_doubling(t, norms)
    sent = total(on_ranks(layout, wide, step))
    assert sent == expected(
        activation=all_reduce(t, 6 * TOKENS * 32),
        scalar=all_reduce(t, 3 * TOKENS) + batch_check(t),
        gradient=gradient,
    )


@pytest.mark.parametrize("layout", ["dp2,tp2", "dp2,tp2,sp"])
def test_data_ranks_send_their_own_part_of_the_gradient(layout: str) -> None:
    """Over dp each rank's own elements, once; over tp the activations of its own samples."""
    ledgers = on_ranks(layout, GPT2, step)
    elements: list[int] = []
    on_ranks(layout, GPT2, lambda model, _: elements.append(model.stepped.gradient.size))
    # Of two ranks each sends as much as there is; beside it the loss, the number of tokens
    # and what shows that all were given parts of one batch.
    own = [ledger.bytes(axis="dp", purpose="gradient") for ledger in ledgers]
    assert sorted(own) == sorted(n * ITEM for n in elements)
    assert all(ledger.bytes(axis="dp", purpose="scalar") == (1 + 5) * ITEM for ledger in ledgers)
    activation = sum(ledger.bytes(axis="tp", purpose="activation") for ledger in ledgers)
    assert activation == all_reduce(2, 10 * TOKENS * GPT2.width)


@pytest.mark.parametrize("layout", PLAIN)
def test_the_norm_is_a_number_for_each_parameter(layout: str) -> None:
    ledgers = on_ranks(layout, GPT2, lambda model, _: model.gradient_norm())
    names = len(declare(GPT2).parameters())
    sent = all_reduce_by_doubling(Layout.parse(layout).tp, names)
    assert total(ledgers) == expected(scalar=sent)
