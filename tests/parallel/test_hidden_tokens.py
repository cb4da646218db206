"""A token that nothing counted has seen may be infinite, whatever the layout: what a mask leaves
out is selected away, never multiplied by 0."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from cut_attention import attention

from minitrain.batch import IGNORE, Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig
from minitrain.parallel import Mesh, parallelize

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF = np.inf
CONTEXT = ["cp2", "cp3,ring", "cp4", "cp2,ulysses", "cp4,ulysses2", "cp2,gather"]
LAYOUTS = ["dp1", "dp2", "tp2", "tp2,sp", "pp2", "shard2,zero3", "cp2", "cp2,ring", "cp2,ulysses",
           "cp2,gather"]  # fmt: skip
ODD = 10  # a token's id
MODELS: dict[str, Any] = {
    "gpt": lambda: GPT(GPTConfig(11, 9, layers=2, heads=2, width=8, tied=False, dropout=0.1)),
    "llama": lambda: Llama(LlamaConfig(11, 9, 2, heads=2, kv_heads=1, width=8, hidden=12)),
}
BOUND = {"float64": 1e-12, "float16": 2e-3}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("layout", CONTEXT)
def test_keys_that_a_query_does_not_see(layout: str, dtype: str) -> None:
    """Position 6 of 9, one head of one sample: rows before it are as ever, and what they send."""
    rng, at = np.random.default_rng(0), 6
    q, k, v, grad_out = (rng.normal(size=(2, 9, 4, 3)).astype(dtype) for _ in range(4))
    grad_out[:, at:] = 0
    right = attention(q, k, v, grad_out)
    for name in ("q", "k", "v"):
        for value in (-INF, np.nan):
            given = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
            given[name][1, at, 1, 2] = value
            out, *grads = attention(*given.values(), grad_out, layout)
            if name == "v":  # a key may give scores of -inf, which are none
                assert not np.isfinite(out[1, at]).all()
            out[1, at:] = right[0][1, at:]
            for got, expected in zip((out, *grads), right, strict=True):
                np.testing.assert_allclose(got, expected, rtol=0, atol=BOUND[dtype])


def batch(ignored: bool) -> Batch:
    """Four sequences; the odd token ends one of them (rows after it don't count) and begins one
    that does not count at all."""
    tokens, labels = np.random.default_rng(1).integers(0, ODD, (2, 4, 9))
    tokens[1, 6] = tokens[3, 0] = ODD
    if ignored:
        labels[1, 6:] = labels[3] = IGNORE
    return Batch.of(tokens, labels)


def trained(family: str, layout: str, dtype: str, odd: float, ignored: bool = True) -> list[Any]:
    """Of each rank the loss and the gradients it holds, where the odd token's embedding is odd."""

    def rank(group: Group) -> Any:
        model, where = MODELS[family]().initialize(3, dtype), Layout.parse(layout)
        model.embedding.token.weight.array[ODD, 3] = odd
        cut = parallelize(model, Mesh(group, where), dtype=dtype, micro_batches=where.pp)
        loss = cut.forward_backward(batch(ignored))
        return loss.value, {name: g.copy() for name, g in cut.gradients().items()}

    return run_ranks(Layout.parse(layout).size, rank)


@cache
def right_of(family: str, layout: str, dtype: str) -> list[Any]:
    return trained(family, layout, dtype, 0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "dtype"), [*zip(MODELS, BOUND, strict=True)])
def test_a_token_whose_embedding_is_infinite(family: str, layout: str, dtype: str) -> None:
    """Through a whole model: norms, projections, attention, dropout, the head and the loss."""
    [(whole, _)] = right_of(family, "dp1", dtype)
    right = right_of(family, layout, dtype)
    for odd in (INF, np.nan):
        for (value, grads), (_, expected) in zip(
            trained(family, layout, dtype, odd), right, strict=True
        ):
            assert value == pytest.approx(whole, rel=BOUND[dtype])
            for name, grad in grads.items():
                np.testing.assert_allclose(
                    grad, expected[name], rtol=0, atol=BOUND[dtype], err_msg=name
                )
    assert not np.isfinite(trained(family, layout, dtype, np.nan, ignored=False)[0][0])
