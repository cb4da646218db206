"""Runs in float16 and bfloat16: they learn as float32 does, go on bitwise, and agree over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from small_run import arrays, assert_bitwise, config, do, steps_of
from threadpoolctl import threadpool_limits

from minitrain.comm import Group, run_ranks, world
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import LossScale
from minitrain.oracle.reference import awkward_batches
from minitrain.parallel import Mesh, parallelize
from minitrain.train import build
from minitrain.train.checkpoint.manifest import read_manifest
from minitrain.train.config.resolve import resolve
from minitrain.train.data.text import Corpus

NANO = GPTConfig(vocab=256, context=16, layers=4, heads=8, width=32, dropout=0.1)
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start with a scale under which the first three steps overflow, and double it soon."""
    monkeypatch.setattr(build, "LossScale", lambda: LossScale(2.0**23, interval=4))


@pytest.mark.usefixtures("overflowing")
@pytest.mark.parametrize("layout", ["dp1", "dp2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("at", [3, 9])
def test_resumed_it_is_bitwise_the_same(tmp_path: Path, dtype: str, layout: str, at: int) -> None:
    """Cases K1, K9 and K10: scale, its count and float32 masters; saved before any update too."""
    whole, parted, options = tmp_path / "whole", tmp_path / "parted", {"dtype": dtype, "steps": 15}
    do(whole, config(**options, save_every=at), layout)
    start = whole / "checkpoints" / f"step-{at:06d}"
    do(parted, config(**options, save_every=100), layout, start)
    assert_bitwise(arrays(parted, 15), arrays(whole, 15))
    went_on = [(r["loss_scale"], r["skipped"], r["loss"], r["lr"]) for r in steps_of(parted)]
    assert went_on == [
        (r["loss_scale"], r["skipped"], r["loss"], r["lr"]) for r in steps_of(whole)[at:]
    ]
    applied = [not record["skipped"] for record in steps_of(whole)[:at]]
    assert read_manifest(start).updates == sum(applied)
    assert applied[:3] == [dtype == "bfloat16"] * 3


@pytest.mark.usefixtures("overflowing")
def test_skipped_steps_are_on_record(tmp_path: Path) -> None:
    do(tmp_path, config(dtype="float16", steps=15))
    found, rule = steps_of(tmp_path), LossScale(2.0**23, interval=4)
    for record in found:
        assert record["loss_scale"] == rule.value
        rule.update(record["skipped"])
    assert [record["skipped"] for record in found[:3]] == [True] * 3
    assert not all(record["skipped"] for record in found)
    assert all((record["grad_norm"] is None) == record["skipped"] for record in found)
    lines = (tmp_path / "metrics.jsonl").read_text()
    json.loads(f"[{','.join(lines.splitlines())}]", parse_constant=pytest.fail)  # no NaN, no inf
    # The learning rate is that of the next update, so it stands still while none is applied.
    assert found[0]["lr"] == found[3]["lr"] != found[-1]["lr"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_and_moments_have_bits_that_halves_lack(tmp_path: Path, dtype: str) -> None:
    """Case K9: what is saved is float32."""
    do(tmp_path, config(dtype=dtype, steps=4))
    held = arrays(tmp_path, 4)
    narrow = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.float16
    for key in ("weights/embedding.token.weight", "first/blocks.0.mlp.up.weight"):
        assert held[key].dtype == np.float32
        assert (held[key] != held[key].astype(narrow)).mean() > 0.9


def test_recomputation_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    for dtype in ("float16", "float64"):
        for recompute in ("none", "full"):
            given = config(dtype=dtype, recompute=recompute, steps=6, layers=2)
            do(tmp_path / dtype / recompute, given)
        none, full = (arrays(tmp_path / dtype / r, 6) for r in ("none", "full"))
        assert_bitwise(full, none)


def losses_of(dtype: str) -> list[float]:
    """Of 40 steps of nano on the built-in text."""
    given = resolve("nano", flags={"dtype": dtype, "steps": 40, "warmup": 5, "lr": 3e-3})
    text = Corpus.load(None, 16)
    stepper = build.stepper_of(given, Layout(), world(), text.tokenizer.vocab)
    return [stepper.step(text.batch(i, 24, 16, 0)).loss for i in range(40)]


@threadpool_limits.wrap(limits=1)  # the products are too small to share
def test_sixteen_bits_learn_as_thirty_two_do() -> None:
    """Measured: after 200 steps 3.07266 (bfloat16), 3.07281 (float16), 3.07278 nats (float32)."""
    right = losses_of("float32")
    assert right[-1] < right[0] - 1.5
    for dtype in ("float16", "bfloat16"):
        got = losses_of(dtype)
        assert got != right
        # A single step of this fast run may differ by a percent: what rounding moves, the high
        # learning rate grows. What is learned, the mean of the last ten steps, does not.
        np.testing.assert_allclose(got, right, rtol=2e-2)
        np.testing.assert_allclose(np.mean(got[-10:]), np.mean(right[-10:]), rtol=5e-3)


def gradients(group: Group, layout: str, dtype: str) -> tuple[float, dict[str, Any]]:
    """The loss of an awkward batch, and what this rank has of the gradient, whole or cut."""
    mesh = Mesh(group, Layout.parse(layout))
    model = parallelize(GPT(NANO), mesh, dtype=dtype, micro_batches=2)
    loss = model.forward_backward(awkward_batches(256, 16, 24, 1, 0)[0], scale=1024.0)
    return loss.value, {k: g.copy() for k, g in model.gradients().items()}


def error(name: str, got: Any, right: Any, largest: float) -> float:
    """The oracle's: relative to the tensor, but for a bias of which a third is zero by algebra."""
    scale = largest if name.endswith("qkv.bias") else abs(right).max()
    return float(abs(got - right).max() / scale)


@pytest.mark.parametrize("dtype", EPSILON)
def test_data_ranks_agree_with_one_device_to_a_rounding(dtype: str) -> None:
    """dp2 = dp1: a token's activations are rounded alike, and weights' gradients are float32 sums.

    Only an activation's gradient that is itself a sum over the batch, that of the positions' rows,
    is rounded before it is added over ranks. A bit that flips where BLAS adds in another order for
    other shapes costs as much: half a unit in the last place of 16 bits, ε/2, is the bound.
    """
    loss, right = run_ranks(1, gradients, "dp1", dtype)[0]
    largest = max(abs(g).max() for g in right.values())
    for got_loss, got in run_ranks(2, gradients, "dp2", dtype):
        assert got_loss == pytest.approx(loss, rel=1e-6)
        off = {name: error(name, got[name], right[name], largest) for name in right}
        assert max(off.values()) < (1e-5 if dtype == "float32" else EPSILON[dtype] / 2)
        if dtype != "float32":
            assert off["embedding.position.weight"] > 1e-5
            assert np.median(list(off.values())) < 1e-5
