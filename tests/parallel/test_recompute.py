"""A recomputed block: the same bits, masks included, and only its input in between."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from tiny_model import TINY, labelled

from minitrain import functional as F
from minitrain.autograd.deferral import Backward
from minitrain.autograd.tensor import Tensor
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig, Module, Parameter, Window, constant
from minitrain.nn import window as looking_through
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.recompute import RecomputedBlock

SMALL_GPT = GPTConfig(vocab=11, context=8, layers=3, heads=2, width=8, dropout=0.3)
SMALL_LLAMA = LlamaConfig(vocab=11, context=8, layers=2, heads=2, kv_heads=1, width=8)
Gradients = dict[str, Any]


def model(
    config: Any = SMALL_GPT, dtype: str = "float64", full: bool = True, nested: bool = False
) -> Any:
    """A filled model whose blocks, and perhaps the attention in them, are recomputed."""
    made = GPT(config) if isinstance(config, GPTConfig) else Llama(config)
    made.initialize(0, dtype)
    for i, block in enumerate(made.blocks):
        if nested:
            block.replace("attention", RecomputedBlock(block.attention))
        if full:
            made.replace(f"blocks.{i}", RecomputedBlock(block))
    return made


def forward(made: Any, step: int = 0) -> Tensor:
    """The loss of a drawn micro-batch."""
    tokens, labels = np.random.default_rng(step).integers(0, 11, (2, 3, 8))
    positions = np.arange(8)
    with looking_through(Window(5, step, np.arange(3) + 7, positions)):
        loss: Tensor = made.loss(made(tokens, positions), labels)
    return loss


def gradients(made: Any) -> Gradients:
    return {p.name: p.grad for p in made.parameters().values()}


def assert_same_bits(got: Gradients, right: Gradients) -> None:
    assert got.keys() == right.keys()
    for name, grad in right.items():
        assert abs(grad).max() > 0, name
        assert got[name].dtype == grad.dtype
        np.testing.assert_array_equal(got[name], grad, err_msg=name)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("config", [SMALL_GPT, SMALL_LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("full", "nested"), [(True, False), (False, True), (True, True)])
def test_recomputing_changes_no_bit(
    config: Any, dtype: str, deferred: bool, full: bool, nested: bool
) -> None:
    plain, again = model(config, dtype, full=False), model(config, dtype, full, nested)
    right, loss = forward(plain), forward(again)
    assert loss.item() == right.item()
    right.backward()
    backward = Backward(loss)
    if deferred:
        backward.run_activations()
        assert set(map(type, gradients(again).values())) == {type(None)}
        backward.run_weights()
    else:
        backward.run()
    assert_same_bits(gradients(again), gradients(plain))


def test_four_micro_batches_in_flight_with_other_draws_in_between() -> None:
    """Case H1: each replay sees its own window, whatever was drawn since."""
    results = []
    for made in (model(full=False), model()):
        losses = [forward(made, step) for step in range(4)]
        made.initialize(0, "float64")  # draws from streams of its own
        for loss in losses[2:] + losses[:2]:
            with looking_through(Window(99, 99, np.arange(3), np.arange(8))):
                loss.backward()
        results.append(gradients(made))
    assert_same_bits(results[1], results[0])


class Dropped(Module):
    """dropout(w · x) at a rate of a half."""

    def __init__(self) -> None:
        self.weight = Parameter((64,), constant(1.0))
        self.weight.array = np.ones(64)

    def forward(self, x: Tensor, key: int) -> Tensor:
        return F.dropout(self.weight * x, 0.5, key, np.arange(64))


@pytest.mark.parametrize(
    "wrap", [lambda m: m, RecomputedBlock, lambda m: RecomputedBlock(RecomputedBlock(m))]
)
def test_the_gradient_goes_where_the_output_went(wrap: Any) -> None:
    """Case H1: it is 2x where y is not zero, and zero where it is."""
    module, x = Dropped(), np.arange(1.0, 65.0)
    y = wrap(module)(Tensor(x), 1234)
    y.sum().backward()
    kept = y.array != 0
    assert 10 < kept.sum() < 54
    np.testing.assert_array_equal(module.weight.grad, np.where(kept, 2 * x, 0))


@pytest.mark.parametrize("layout", ["dp2", "tp2", "tp2,sp", "dp2,tp2"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_recomputing_changes_no_bit_on_ranks(layout: str, dtype: str) -> None:
    def rank(group: Group, recompute: str) -> Gradients:
        mesh = Mesh(group, Layout.parse(layout))
        part = parallelize(
            GPT(TINY), mesh, micro_batches=2, dtype=dtype, recompute=recompute, bucket=64
        )
        loss = part.forward_backward(labelled(4, 0, 3, 1), scale=8.0)
        return {"loss": np.array(loss.value), **part.gradients()}

    size = Layout.parse(layout).size
    runs = [run_ranks(size, rank, recompute) for recompute in ("full", "selective", "none")]
    for full, selective, none in zip(*runs, strict=True):
        assert_same_bits(full, none)
        assert_same_bits(selective, none)


def test_buckets_and_hooks_see_through_it() -> None:
    """Each parameter is final once, block by block, and messages progress during a replay."""
    results = []
    for made in (model(full=False), model()):
        final: list[str] = []
        nodes = []
        loss = forward(made)
        Backward(
            loss,
            on_final=lambda p, f=final: f.append(p.name),  # type: ignore[misc]
            after_node=lambda n=nodes: n.append(1),
        ).run()  # type: ignore[misc]
        blocks = [name.split(".")[1] for name in final if name.startswith("blocks")]
        assert blocks == sorted(blocks, reverse=True)
        assert sorted(final) == sorted(gradients(made))
        results.append(len(nodes))
    plain, again = results
    assert again == plain + 3  # the nodes of the replays, and one for each block


def test_a_block_keeps_its_input_and_nothing_else() -> None:
    """Measured: the bytes that a forward leaves behind, per block."""
    kept = {}
    for full in (False, True):
        sizes = []
        for layers in (1, 3):
            config = GPTConfig(vocab=11, context=64, layers=layers, heads=2, width=32)
            made = model(config, "float32", full)
            tokens, positions = np.zeros((4, 64), int), np.arange(64)
            made(tokens, positions)
            tracemalloc.start()
            out = made(tokens, positions)
            sizes.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
            assert out.node is not None
        kept[full] = (sizes[1] - sizes[0]) / 2
    x = 4 * 64 * 32 * 4
    assert x <= kept[True] <= 1.15 * x
    assert kept[False] > 15 * x


def test_what_changed_in_between_is_refused() -> None:
    made = model()
    loss = forward(made)
    made.blocks[1].inputs[0].version += 1
    with pytest.raises(ValueError, match="changed in place"):
        loss.backward()
    loss = forward(made)
    loss.backward()
    with pytest.raises(ValueError, match="already run"):
        loss.backward()


def test_what_asks_for_no_gradient_gets_none() -> None:
    plain, again = model(full=False), model()
    for made in (plain, again):
        for parameter in made.parameters().values():
            parameter.requires_grad = parameter.name.startswith("blocks.1.mlp.")
        forward(made).backward()
    asked = {k: g for k, g in gradients(plain).items() if g is not None}
    assert len(asked) == 4
    assert_same_bits({k: g for k, g in gradients(again).items() if g is not None}, asked)
