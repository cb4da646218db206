"""What sharded data parallelism sends: the formulas, parameter by parameter, to the byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPTConfig
from minitrain.nn.families import declare
from minitrain.optim import SGD
from minitrain.oracle.reference import awkward_batches
from minitrain.parallel import Mesh, parallelize
from minitrain.train.step import Stepper

# Every size divides by 4 ranks and by two replicas of them.
EVEN = GPTConfig(vocab=16, context=8, layers=2, heads=2, width=8)
UNEVEN = GPTConfig(vocab=7, context=5, layers=1, heads=3, width=9, hidden=5)
UNTIED = GPTConfig(vocab=7, context=5, layers=2, heads=3, width=9, hidden=5, tied=False)


def sent(group: Group, config: GPTConfig, layout: Layout, options: dict[str, Any]) -> Counter[str]:
    """Bytes that this rank sends in a step, by purpose."""
    model = parallelize(declare(config), Mesh(group, layout), **options)
    stepper = Stepper(model, SGD(), lambda update: 0.1, clip=1.0)
    batch = awkward_batches(config.vocab, config.context, 24, 1, seed=0)[0]
    with group.ledger() as ledger:
        stepper.step(batch)
    assert ledger.by("purpose").keys() <= {"gradient", "parameter", "scalar"}
    return Counter(ledger.by("purpose"))


class Counts:
    """How often a step moves each parameter, in units of (N-1)·its elements over all ranks."""

    def __init__(self, config: GPTConfig, layout: Layout, micro_batches: int, recompute: str):
        parameters = declare(config).parameters()
        self.gradient: Counter[str] = Counter()
        self.gathered: Counter[str] = Counter()
        for name in parameters:
            table = name.startswith("embedding.")
            tied = name == "embedding.token.weight" and config.tied
            uses = 2 if tied else 1
            # The backward reads no bias, and of a table only what the head uses.
            reads = int(tied or not (table or name.endswith("bias")))
            if recompute == "full" and name.startswith("blocks."):
                reads = 1  # the replay is a forward, and leaves the backward what it gathered
            if layout.zero == 3:
                self.gradient[name] = uses * micro_batches
                self.gathered[name] = 1 if layout.keep else (uses + reads) * micro_batches
            else:
                self.gradient[name] = micro_batches if layout.zero == 2 else 1
                self.gathered[name] = 1
        self.sizes = {name: p.initial(0).size for name, p in parameters.items()}
        self.layout = layout

    def bytes(self, wide: int, item: int) -> dict[str, int]:
        """Of all ranks together. Replicas sum their pieces once a step."""
        size, dp = self.layout.shard, self.layout.dp
        psi = sum(self.sizes.values())
        gradient = sum(count * self.sizes[name] for name, count in self.gradient.items())
        gathered = sum(count * self.sizes[name] for name, count in self.gathered.items())
        return {
            "gradient": ((size - 1) * dp * gradient + 2 * (dp - 1) * psi) * wide,
            "parameter": (size - 1) * dp * gathered * item,
        }


def total(ranks: list[Counter[str]], purpose: str) -> int:
    return sum(by[purpose] for by in ranks)


LAYOUTS = [
    "shard4,zero1", "shard4,zero2", "shard4,zero3", "shard4,zero3,keep", "dp2,shard2,zero1",
    "dp2,shard2,zero2", "dp2,shard2,zero3", "dp2,shard2,zero3,keep",
]  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_sends_what_the_formula_says(layout: str, micro_batches: int) -> None:
    """Stage 1 2Ψ(N-1)/N; stage 2 (M+1)Ψ(N-1)/N; stage 3 about 3MΨ(N-1)/N, with keep M+1; dp
    2(d-1)/d of the rank's piece beside it, once a step."""
    where = Layout.parse(layout)
    options = {"micro_batches": micro_batches, "bucket": 300, "dtype": "float32"}
    ranks = run_ranks(where.size, sent, EVEN, where, options)
    expected = Counts(EVEN, where, micro_batches, "none").bytes(4, 4)
    for by in ranks:  # all alike
        for purpose, everything in expected.items():
            assert by[purpose] * where.size == everything, purpose


def hold_uneven(
    config: GPTConfig, layout: Layout, micro_batches: int, options: dict[str, Any]
) -> None:
    """Over all ranks together the same formula holds."""
    more = {"micro_batches": micro_batches, "bucket": 100, "dtype": "float64", **options}
    ranks = run_ranks(layout.size, sent, config, layout, more)
    recompute = options.get("recompute", "none")
    item = {"float64": 8, "float16": 2}[more["dtype"]]
    expected = Counts(config, layout, micro_batches, recompute).bytes(max(item, 4), item)
    assert {purpose: total(ranks, purpose) for purpose in expected} == expected


@pytest.mark.parametrize("config", [UNEVEN, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "layout", ["shard5,zero1", "shard3,zero2", "shard3,zero2,owner", "shard5,owner",
               "dp2,shard3,zero3", "shard3,zero3,keep", "dp2,shard3,zero2,owner",
               "dp3,shard1,zero1", "dp2,shard1,zero3"]
)  # fmt: skip
def test_sizes_that_do_not_divide_send_the_same_in_sum(config: GPTConfig, layout: str) -> None:
    """Flat, or whole tensors that go to an owner: the same bytes over all ranks."""
    hold_uneven(config, Layout.parse(layout), 2, {})


@pytest.mark.parametrize("layout", ["shard3,zero3", "shard3,zero3,keep", "shard3,zero2"])
def test_recomputation_gathers_a_block_again_and_its_backward_nothing_more(layout: str) -> None:
    hold_uneven(UNTIED, Layout.parse(layout), 2, {"recompute": "full"})


@pytest.mark.parametrize("layout", ["shard3,zero1", "shard3,zero2,owner", "shard3,zero3"])
def test_weights_travel_in_sixteen_bits_and_gradients_in_thirty_two(layout: str) -> None:
    hold_uneven(UNTIED, Layout.parse(layout), 2, {"dtype": "float16"})


def test_only_what_is_trained_sends_a_gradient() -> None:
    where = Layout.parse("shard2,zero3")
    names = list(declare(UNTIED).parameters())
    sizes = {name: p.initial(0).size for name, p in declare(UNTIED).parameters().items()}
    for trained in ("head.weight", "blocks.0.mlp.up.weight", "blocks.1.attention.out.bias"):
        options = {"frozen": [n for n in names if n != trained], "dtype": "float64"}
        ranks = run_ranks(2, sent, UNTIED, where, options)
        assert total(ranks, "gradient") == sizes[trained] * 8
