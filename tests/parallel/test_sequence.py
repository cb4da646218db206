"""Sequence parallelism is the single-device run, to rounding, with some positions on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn_cuts import Case, cases, rows_of_ends, rows_of_training, wrong
from hypothesis import given

from minitrain.autograd.tensor import no_grad
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig, Module, Window, window
from minitrain.parallel import Mesh, parallelize


@given(cases(sp=True))
def test_training_equals_one_device(case: Case) -> None:
    """Losses, every gradient, norms; weights and moments after SGD and AdamW, with clipping."""
    assert not wrong(rows_of_training(case))


@given(cases(sp=True))
def test_logits_and_input_gradient_equal_one_device(case: Case) -> None:
    """The input gradient is cut over positions, as the embedding's output is."""
    assert not wrong(rows_of_ends(case))


CONFIG = GPTConfig(vocab=9, context=8, layers=1, heads=3, width=6, dropout=0.2)


def shapes_on(group: Group, sp: bool) -> dict[str, tuple[int, ...]]:
    """The shape of what each module puts out, by path."""
    model = parallelize(GPT(CONFIG), Mesh(group, Layout(tp=3, sp=sp))).module
    seen: dict[str, tuple[int, ...]] = {}

    def watch(path: str, module: Module) -> None:
        forward = module.forward

        def watched(*args: Any, **options: Any) -> Any:
            out = forward(*args, **options)
            seen[path] = out.shape
            return out

        module.forward = watched  # type: ignore[method-assign]

    for path, module in model.modules():
        watch(path, module)
    tokens, positions = np.zeros((2, 7), np.int64), np.arange(7)
    with window(Window(0, 0, np.arange(2), positions)):
        model(tokens, positions)
    return seen


STREAMS = [
    "embedding", "embedding.dropout", "blocks.0.attention_norm", "blocks.0.attention", "blocks.0",
    "blocks.0.attention_dropout", "blocks.0.mlp_norm", "blocks.0.mlp", "blocks.0.mlp_dropout",
    "norm",
]  # fmt: skip


def test_between_the_regions_a_rank_has_some_positions_and_inside_some_heads() -> None:
    """7 positions on three ranks are 3, 2, 2; everything outside attention, MLP and head is cut."""
    for own, shapes in zip((3, 2, 2), run_ranks(3, shapes_on, True), strict=True):
        assert {shapes[path] for path in STREAMS} == {(2, own, 6)}
        assert shapes["blocks.0.attention.inner.core"] == (2, 7, 1, 2)
        assert shapes["blocks.0.mlp.inner.up"] == (2, 7, 8)
        assert shapes["head"] == (2, 7, 3)
    for shapes in run_ranks(3, shapes_on, False):
        assert {shapes[path] for path in STREAMS} == {(2, 7, 6)}


def test_a_forward_without_a_window_is_refused() -> None:
    """2 positions of 5 and 2 of 4 look alike, so a rank must be told how long a sequence is."""

    def rank(group: Group) -> None:
        model = parallelize(GPT(CONFIG), Mesh(group, Layout(tp=3, sp=True))).module
        with no_grad(), pytest.raises(ValueError, match="needs a window, which tells"):
            model(np.zeros((1, 7), int), np.arange(7))

    run_ranks(3, rank, synchronous=True)
