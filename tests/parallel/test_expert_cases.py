"""What expert parallelism moves: bitwise, to the byte, and in the worked examples of bugs that real
projects shipped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.layout import Layout
from minitrain.nn import Experts, GPTConfig, Router, Window, constant, routers_of, window
from minitrain.nn.families import declare
from minitrain.nn.gate import Gate, Routing, decide
from minitrain.nn.mixture import MixtureConfig
from minitrain.oracle import verify
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.expert import DispatchedExperts, GlobalGate

DROPLESS = GPTConfig(vocab=11, context=5, layers=2, heads=4, width=12, std=0.1,
                     mixture=MixtureConfig(9, 2, hidden=5))  # fmt: skip
TIGHT = replace(DROPLESS, mixture=MixtureConfig(9, 2, hidden=5, capacity=1.0))


def batch_of(size: int) -> Batch:
    tokens, labels = np.random.default_rng(0).integers(0, 11, (2, size, 5))
    return Batch.of(tokens, labels)


# What moves is moved bitwise.


def routed(rank: int, experts: int) -> tuple[Any, Routing]:
    """Rows that tell their rank and number, and where they go: unevenly, some are dropped."""
    rng = np.random.default_rng(rank)
    tokens = [4, 0, 7, 1][rank % 4]
    choices = np.array([rng.permutation(experts)[:2] for _ in range(tokens)], int).reshape(-1, 2)
    routing = Routing.of(choices, rng.random(choices.shape) < 0.8, experts)
    return rng.normal(size=(len(routing.tokens), 3)) + 10 * rank, routing


class Watching(Experts):
    """Gives back what it is given, and remembers it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def compute(self, rows: Tensor, counts: Any) -> Tensor:
        self.seen += [rows.array.copy(), counts]
        return rows


@pytest.mark.parametrize("experts", [4, 5, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_come_to_their_experts_and_back_bitwise(ranks: int, experts: int) -> None:
    sizes = cut_sizes(experts, ranks)
    ends = np.cumsum([0, *sizes]).tolist()
    spans = [slice(a, b) for a, b in pairwise(ends)]

    def rank(group: Group) -> None:
        inner = Watching()
        rows, routing = routed(group.rank, experts)
        x = Tensor(rows, requires_grad=True)
        out = DispatchedExperts(inner, group, spans).compute(x, routing.counts)
        np.testing.assert_array_equal(out.array, rows)
        out.backward(rows * 7)
        np.testing.assert_array_equal(x.grad, rows * 7)
        everyone = [routed(r, experts) for r in range(ranks)]
        blocks = []
        for expert in range(spans[group.rank].start, spans[group.rank].stop):
            for theirs, to in everyone:
                starts = np.cumsum([0, *to.counts])
                blocks.append(theirs[starts[expert] : starts[expert + 1]])
        np.testing.assert_array_equal(inner.seen[0], np.concatenate(blocks))
        counts = sum(to.counts for _, to in everyone)[spans[group.rank]]
        np.testing.assert_array_equal(inner.seen[1], counts)

    run_ranks(ranks, rank, synchronous=True)


# What is sent, to the byte.


class Recorded(Gate):
    """A gate that remembers what it said, in choices."""

    def __init__(self, gate: Gate):
        super().__init__(gate.config)
        self.said: list[tuple[Any, Any]] = []

    def forward(self, choices: Any, batch: int) -> Any:
        kept, _ = decide(choices, np.zeros(len(choices), int), self.config)
        self.said.append((choices, kept))
        return super().forward(choices, batch)


@pytest.mark.parametrize("config", [DROPLESS, TIGHT], ids=["dropless", "dropping"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bytes_on_the_wire_follow_from_the_routing(ranks: int, config: GPTConfig) -> None:
    """Of each row that has another rank's expert: there and back, forward and backward; of the
    gate k + 1 numbers for each token of the other ranks, and E counts."""
    model, batch = declare(config).initialize(0, "float64"), batch_of(2 * ranks)
    gates = []
    for path, router in routers_of(model).items():
        gates.append(Recorded(router.gate))
        model.replace(f"{path}.gate", gates[-1])
    with window(Window(0, 0, np.arange(2 * ranks), np.arange(5))):
        model(batch.tokens)
    spans = np.repeat(np.arange(ranks), cut_sizes(9, ranks))  # of each expert its rank
    sent = np.zeros((ranks, ranks), int)
    for gate in gates:
        for choices, kept in gate.said:
            source = np.repeat(np.arange(ranks), len(choices) // ranks)
            pairs = Counter(
                (int(source[t]), int(spans[choices[t, s]])) for t, s in np.argwhere(kept)
            )
            for (a, b), count in pairs.items():
                sent[a, b] += count * (a != b)
    assert sent.sum() > 0

    def rank(group: Group) -> Any:
        made = parallelize(config, Mesh(group, Layout.parse(f"dp{ranks},ep{ranks}")),
                           dtype="float64")  # fmt: skip
        with group.ledger() as ledger:
            made.forward_backward(batch)
        return ledger.bytes(purpose="token"), ledger.bytes(purpose="control")

    for me, (token, control) in enumerate(run_ranks(ranks, rank, synchronous=True)):
        assert token == 2 * (sent[me].sum() + sent[:, me].sum()) * 12 * 8
        assert control == len(gates) * (ranks - 1) * (10 * 3 + 9) * 8


# Worked examples of bugs that real projects shipped.


class Multipliers(Experts):
    """Expert e multiplies by factors[e]."""

    def __init__(self, factors: list[float]):
        self.weight = Tensor(np.array(factors)[:, None, None], requires_grad=True)

    def compute(self, rows: Tensor, counts: Any) -> Tensor:
        return F.grouped_linear(rows, self.weight, counts)


HALVES = [slice(0, 1), slice(1, 2)]


def test_g1_an_experts_gradient_is_divided_once() -> None:
    """Tokens 1, 2 on the first rank, 3, 4 on the other, to the experts 0, 1; the loss is their
    mean. Averaged over the ranks that share an expert (one) it would be 2 and 3."""

    def rank(group: Group) -> float:
        experts = Multipliers([1.0])
        x = Tensor(np.array([[[1.0], [2.0]]]) + 2 * group.rank)
        routing = Routing.of(np.array([[0], [1]]), np.ones((2, 1), bool), 2)
        out = DispatchedExperts(experts, group, HALVES)(x, Tensor(np.ones((1, 2, 1))), routing)
        (out.sum() / 4).backward()
        return float(experts.weight.grad.item())

    assert run_ranks(2, rank, synchronous=True) == [1.0, 1.5]


def test_g5_a_token_gets_the_gradient_of_all_its_experts() -> None:
    def rank(group: Group) -> float:
        experts = Multipliers([10.0 ** (group.rank + 1)])
        x = Tensor(np.ones((1, 1, 1)), requires_grad=True)
        gates = Tensor(np.full((1, 1, 2), 0.5))
        routing = Routing.of(np.array([[0, 1]]), np.ones((1, 2), bool), 2)
        DispatchedExperts(experts, group, HALVES)(x, gates, routing).sum().backward()
        return float(x.grad.item())

    assert run_ranks(2, rank, synchronous=True) == [55.0, 55.0]


G8 = np.array([[0, 1], [0, 1], [0, 2], [1, 2]])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_g8_capacity_is_that_of_all_ranks(ranks: int) -> None:
    """Outputs 46, 46, 400, 400: of tokens 2 and 3 an expert was full, wherever they are."""
    config = MixtureConfig(3, 2, capacity=0.75)
    mine = 4 // ranks

    def rank(group: Group) -> list[float]:
        own = slice(group.rank * mine, (group.rank + 1) * mine)
        gate = GlobalGate(config, group, lambda positions: positions)
        with window(Window(0, 0, np.arange(4)[own], np.arange(1))):
            verdict = gate(G8[own], mine)
        spans = [slice(a, b) for a, b in pairwise(np.cumsum([0, *cut_sizes(3, ranks)]).tolist())]
        experts = Multipliers([10.0, 100.0, 1000.0][spans[group.rank]])
        gates = Tensor(np.tile([0.6, 0.4], (mine, 1, 1)))
        x = Tensor(np.ones((mine, 1, 1)))
        out = DispatchedExperts(experts, group, spans)(x, gates, verdict.routing)
        return [float(y) for y in out.array.reshape(-1)]

    found = [y for part in run_ranks(ranks, rank, synchronous=True) for y in part]
    np.testing.assert_allclose(found, [46, 46, 400, 400])


@pytest.mark.parametrize(("scope", "value"), [("batch", 1.15), ("sequence", 1.35)])
def test_g3_the_balance_is_that_of_all_ranks(scope: str, value: float) -> None:
    """Two sequences of two tokens, on a rank each."""
    config = MixtureConfig(2, 1, scope=scope)
    x = np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]).reshape(2, 2, 2)

    def rank(group: Group) -> float:
        router = Router(2, config, constant(0.0))
        router.weight.array = np.eye(2)
        router.gate = GlobalGate(config, group, lambda positions: positions)
        mine = slice(group.rank, group.rank + 1)
        with window(Window(0, 0, np.arange(2)[mine], np.arange(2), tokens=4)):
            router(Tensor(x[mine]))
        return router.tally.balance

    assert sum(run_ranks(2, rank, synchronous=True)) == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize(
    "layout", ["dp4", "dp4,ep2", "dp4,ep4", "dp2,tp2", "dp2,ep2,tp2", "dp2,shard2,ep4",
               "shard4,ep2", "shard4,zero3,ep2", "tp4", "dp2,pp2,ep2"]
)  # fmt: skip
def test_a2_every_expert_is_in_the_norm_once(layout: str) -> None:
    """With all gradients 1 the norm is the root of the number of parameters."""
    count = sum(p.initial(0).size for p in declare(TIGHT).parameters().values())

    def rank(group: Group) -> float:
        made = parallelize(TIGHT, Mesh(group, Layout.parse(layout)), dtype="float64")
        made.forward_backward(batch_of(4))
        for grad in made.gradients().values():
            grad[...] = 1
        return made.gradient_norm()

    assert run_ranks(4, rank) == pytest.approx([count**0.5] * 4, rel=1e-14)


@pytest.mark.parametrize("layout", ["dp4,ep4", "dp2,shard2,zero3,ep4", "pp2,dp2,ep2"])
def test_g9_memory_that_nobody_wrote_is_never_read(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = np.empty

    def poisoned(shape: Any, dtype: Any = float, *rest: Any, **options: Any) -> Any:
        x = real(shape, dtype, *rest, **options)
        if x.dtype.kind == "f":
            x[...] = np.nan
        return x

    def poisoned_like(x: Any, *rest: Any, **options: Any) -> Any:
        return poisoned(options.get("shape") or x.shape, x.dtype)

    monkeypatch.setattr(np, "empty", poisoned)
    monkeypatch.setattr(np, "empty_like", poisoned_like)
    assert np.isnan(np.empty(2)).all()
    report = verify(TIGHT, layout, steps=2, batch=8)
    assert report.ok, str(report.first)
