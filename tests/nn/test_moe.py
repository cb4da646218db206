"""Mixtures of experts on one device: what is chosen, kept and weighed, and what is added to the
loss. Each worked example is a bug that a real project shipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain import functional as F
from minitrain import nn
from minitrain.autograd.tensor import Tensor, no_grad
from minitrain.errors import UserError
from minitrain.nn.config import Config, from_values, to_values
from minitrain.nn.families import declare
from minitrain.nn.gate import Routing, choose_largest, decide
from minitrain.nn.mixture import MixtureConfig
from minitrain.nn.router import Router

MIXTURE = MixtureConfig(experts=5, top_k=2, shared=2, hidden=7, bias_rate=0.1, balance=0.1)
SIZES: dict[str, Any] = {"vocab": 11, "context": 6, "layers": 4, "heads": 2, "width": 8}


def gpt(**changes: Any) -> nn.GPTConfig:
    return nn.GPTConfig(**SIZES, mixture=replace(MIXTURE, **changes))


def llama(**changes: Any) -> nn.LlamaConfig:
    return nn.LlamaConfig(**SIZES, mixture=replace(MIXTURE, **changes))


def filled(config: Config, seed: int = 0) -> Any:
    return declare(config).initialize(seed, "float64")


def tokens_of(config: Config, sequences: int = 3) -> Any:
    rng = np.random.default_rng(1)
    return rng.integers(0, config.vocab, (sequences, config.context))


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("family", [gpt, llama])
def test_its_shapes_are_known_without_arrays(family: Any, every: int) -> None:
    config = family(every=every)
    shapes = {m.name(part): s for m in config.modules() for part, s in m.shapes.items()}
    found = {name: p.declared for name, p in declare(config).parameters().items()}
    assert list(found.items()) == list(shapes.items())
    mixed = [i for i in range(4) if f"blocks.{i}.mlp.router.weight" in found]
    assert mixed == {1: [0, 1, 2, 3], 2: [1, 3], 3: [2]}[every]
    untrained = {m.name(part) for m in config.modules() for part in m.untrained}
    assert untrained == {f"blocks.{i}.mlp.router.bias" for i in mixed}
    assert from_values(to_values(config)) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 6}, "cannot choose 6 of 5 experts; take a top_k of at most 5"),
        ({"scores": "tanh"}, "scores must be one of softmax, sigmoid, got 'tanh'"),
        ({"scope": "rank"}, "scope must be one of batch, sequence, got 'rank'"),
        ({"capacity": 0.0}, "capacity must be above 0, such as 1.25, got 0"),
        ({"experts": 0}, "experts must be at least 1, got 0"),
        ({"balance": -1.0}, "balance must be a finite number of at least 0, got -1.0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        replace(MIXTURE, **changes)


# Choices.


def test_of_equal_scores_the_lowest_index_is_chosen() -> None:
    scores = np.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 2, 3, 4, 5]])
    assert choose_largest(scores, 3).tolist() == [[1, 2, 4], [0, 1, 2], [4, 3, 2]]


def by_hand(choices: Any, groups: Any, config: MixtureConfig) -> tuple[Any, Any]:
    """What `decide` says, one choice after the other."""
    taken = np.zeros((max(groups, default=-1) + 1, config.experts), int)
    kept = np.zeros(choices.shape, bool)
    for token, row in enumerate(choices):
        size = int((groups == groups[token]).sum())
        for slot, expert in enumerate(row):
            kept[token, slot] = taken[groups[token], expert] < config.room(size)
            taken[groups[token], expert] += 1
    return kept, taken


@given(st.data())
def test_experts_take_choices_in_the_order_of_tokens(data: Any) -> None:
    experts, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 12))
    k = data.draw(st.integers(1, experts))
    capacity = data.draw(st.sampled_from([None, 0.01, 0.5, 1.0, 1.5, 9.0]))
    config = MixtureConfig(experts, k, capacity=capacity)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    choices = choose_largest(rng.normal(size=(tokens, experts)), k)
    groups = np.sort(np.unique(rng.integers(0, 3, tokens), return_inverse=True)[1])
    kept, load = decide(choices, groups, config)
    for mine, right in zip((kept, load), by_hand(choices, groups, config), strict=True):
        np.testing.assert_array_equal(mine, right)
    routing = Routing.of(choices, kept, experts)
    assert routing.counts.sum() == kept.sum()
    ends = np.cumsum(routing.counts)
    for token, slot in np.argwhere(kept):
        row = routing.rows[token, slot]
        assert routing.tokens[row] == token
        assert np.searchsorted(ends, row, side="right") == choices[token, slot]
    assert (routing.rows[~kept] == -1).all()


class Multipliers(nn.Experts):
    """Expert e multiplies by factors[e]."""

    def __init__(self, factors: list[float]):
        self.weight = Tensor(np.array(factors)[:, None, None], requires_grad=True)

    def compute(self, rows: Tensor, counts: Any) -> Tensor:
        return F.grouped_linear(rows, self.weight, counts)


CHOICES = np.array([[0, 1], [0, 1], [0, 2], [1, 2]])


def test_g8_a_token_may_lose_an_expert() -> None:
    config = MixtureConfig(3, 2, capacity=0.75)
    assert config.room(4) == 2
    kept, load = decide(CHOICES, np.zeros(4, int), config)
    assert load.tolist() == [[3, 3, 2]]
    gates = Tensor(np.tile([0.6, 0.4], (1, 4, 1)), requires_grad=True)
    experts = Multipliers([10.0, 100.0, 1000.0])
    out = experts(Tensor(np.ones((1, 4, 1))), gates, Routing.of(CHOICES, kept, 3))
    np.testing.assert_allclose(out.array.reshape(-1), [46, 46, 400, 400])
    out.sum().backward()
    np.testing.assert_array_equal(gates.grad[0], [[10, 100], [10, 100], [0, 1000], [0, 1000]])


@pytest.mark.parametrize(("capacity", "room", "kept"), [(4.0, 6, 3), (0.01, 1, 2), (None, 3, 3)])
def test_g7_capacity_above_the_tokens_and_far_below(
    capacity: float | None, room: int, kept: int
) -> None:
    config = MixtureConfig(2, 1, capacity=capacity)
    assert config.room(3) == room
    choices = np.array([[0], [0], [1]])
    found, _ = decide(choices, np.zeros(3, int), config)
    assert found.sum() == kept
    out = Multipliers([2.0, 3.0])(
        Tensor(np.ones((1, 3, 1))), Tensor(np.ones((1, 3, 1))), Routing.of(choices, found, 2)
    )
    assert out.array.reshape(-1).tolist() == ([2, 2, 3] if kept == 3 else [2, 0, 3])


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_g7_no_tokens_at_all(capacity: float | None) -> None:
    model = filled(gpt(capacity=capacity))
    out = model(np.zeros((0, 6), int))
    assert out.shape == (0, 6, 11)
    out.sum().backward()
    grads = {name: p.grad for name, p in model.parameters().items() if p.trained}
    assert all((grad == 0).all() for grad in grads.values())


def test_capacity_counts_as_it_is_written() -> None:
    """1.1 in binary is a little more than eleven tenths: of 100 choices it would take 12."""
    assert MixtureConfig(10, 1, capacity=1.1).room(100) == 11


# Terms of the loss.

PROBABILITIES = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])


def router_of(config: MixtureConfig) -> Router:
    """A router whose logits are what is given to it."""
    router = Router(config.experts, config, nn.constant(0.0))
    router.weight.array = np.eye(config.experts)
    return router


@pytest.mark.parametrize(
    ("scope", "shape", "value"),
    [("batch", (1, 4, 2), 1.15), ("batch", (2, 2, 2), 1.15), ("sequence", (2, 2, 2), 1.35)],
)
def test_g3_the_balance_statistic(scope: str, shape: tuple[int, ...], value: float) -> None:
    router = router_of(MixtureConfig(2, 1, scope=scope))
    router(Tensor(np.log(PROBABILITIES).reshape(shape)))
    assert router.tally.balance == pytest.approx(value, rel=1e-14)
    assert router.tally.load.tolist() == [3, 1]
    assert router.tally.gap == pytest.approx(0.2)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("coefficient", [0.01, 0.02])
def test_g2_the_term_reaches_the_router_whatever_the_loss(
    scores: str, scope: str, coefficient: float
) -> None:
    """The gradient is that of coefficient · balance by finite differences; the loss gives none."""
    config = MixtureConfig(4, 2, scores=scores, scope=scope, balance=coefficient)
    rng = np.random.default_rng(0)
    x, direction = Tensor(rng.normal(size=(2, 5, 4))), rng.normal(size=(4, 4))

    def balance(weight: Any) -> Router:
        router = router_of(config)
        router.weight.array = weight
        gates, _ = router(x)
        (gates * 0.0).sum().backward()
        return router

    weight, step = rng.normal(size=(4, 4)), 1e-6
    up, down = (balance(weight + sign * step * direction).tally.balance for sign in (1, -1))
    gradient = balance(weight).weight.grad
    assert (gradient * direction).sum() == pytest.approx(
        coefficient * (up - down) / (2 * step), rel=1e-7
    )


def gradients(config: Config, view: nn.Window | None) -> dict[str, Any]:
    model, tokens = filled(config), tokens_of(config)
    with nn.window(view):
        model.loss(model(tokens), tokens).backward()
    return {name: p.grad for name, p in model.parameters().items() if p.trained}


def window(**changes: Any) -> nn.Window:
    return replace(nn.Window(0, 0, np.arange(3), np.arange(6)), **changes)


def test_terms_are_divided_by_the_tokens_of_the_whole_batch() -> None:
    """And by those at hand where no window says how many these are; without a label that counts
    they add nothing; and they are scaled as the loss is."""
    config = gpt(balance=0.1, z_loss=0.1)
    name = "blocks.3.mlp.router.weight"
    without = gradients(gpt(balance=0.0), window())[name]
    own = gradients(config, None)[name] - without
    assert np.abs(own).max() > 1e-5
    for view, share in (
        (window(tokens=18), 1.0), (window(tokens=36), 0.5), (window(tokens=0), 0.0),
        (window(tokens=18, scale=8.0), 8.0),
    ):  # fmt: skip
        mine = gradients(config, view)[name] - without
        np.testing.assert_allclose(mine, share * own, atol=1e-14)


@pytest.mark.parametrize("family", [gpt, llama])
def test_outside_training_nothing_is_dropped_added_or_counted(family: Any) -> None:
    config = family(capacity=0.3)
    model, free = filled(config), filled(family())
    tokens = tokens_of(config)
    with no_grad():
        reference = free(tokens).array
        np.testing.assert_array_equal(model(tokens).array, reference)
        with nn.window(window(training=False)):
            np.testing.assert_array_equal(model(tokens).array, reference)
        assert all(r.tally.load.sum() == 0 for r in nn.routers_of(model).values())
        with nn.window(window()):
            assert np.abs(model(tokens).array - reference).max() > 1e-6
        for router in nn.routers_of(model).values():
            assert router.tally.load.sum() == 36
            over = router.tally.load - config.mixture.room(18)
            assert router.tally.dropped == over[over > 0].sum() > 0


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """After a step the experts that were chosen less than the mean are preferred a little more."""
    config = MixtureConfig(3, 1, bias_rate=0.25, normalised=False)
    router = router_of(config)
    assert router.bias is not None
    router.bias.array = np.zeros(3)
    x = Tensor(np.log(np.array([[[0.5, 0.3, 0.2]] * 4])))
    gates, _ = router(x)
    np.testing.assert_allclose(gates.array.reshape(-1), 0.5)
    assert router.tally.load.tolist() == [4, 0, 0]
    router.adjust()
    assert router.bias.array.tolist() == [-0.25, 0.25, 0.25]
    router.begin()
    gates, routing = router(x)
    np.testing.assert_allclose(gates.array.reshape(-1), 0.3)
    assert routing.counts.tolist() == [0, 4, 0]
    assert router.bias.grad is None


@pytest.mark.parametrize("every", [1, 2])
def test_experts_without_tokens_get_no_gradient_and_the_chosen_ones_do(every: int) -> None:
    model = filled(gpt(experts=4, top_k=1, every=every, bias_rate=0.0))
    for router in nn.routers_of(model).values():
        router.weight.array[...] = 0  # all alike, so all choose expert 0
    model.loss(model(tokens_of(model.config)), tokens_of(model.config)).backward()
    for name, p in model.parameters().items():
        if ".experts." in name:
            assert (p.grad[1:] == 0).all()
            assert np.abs(p.grad[0]).max() > 1e-6
