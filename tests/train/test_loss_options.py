"""Label smoothing and z-loss: trained on by every layout alike, and held-out figures without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_run import arrays, assert_bitwise, config, do, records, steps_of

ADDED = {"smoothing": 0.2, "z_loss": 0.05}


def held_out(path: Path) -> list[float]:
    """The held-out loss of each evaluation, in nats."""
    return [record["val_loss"] for record in records(path) if "val_loss" in record]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "dp2,tp2,sp"])
@pytest.mark.parametrize("added", [ADDED, {"smoothing": 0.2}, {"z_loss": 0.05}], ids=str)
def test_every_layout_trains_on_them_as_one_device_does(
    tmp_path: Path, layout: str, added: dict[str, float]
) -> None:
    given = config(steps=6, eval_every=3, micro_batches=3, optimizer="sgd", **added)
    one, many, plain = tmp_path / "one", tmp_path / "many", tmp_path / "plain"
    do(one, given)
    do(many, given, layout)
    do(plain, config(steps=6, eval_every=3, micro_batches=3, optimizer="sgd"))
    for left, right, other in zip(steps_of(one), steps_of(many), steps_of(plain), strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-12)
        assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=1e-12)
        assert abs(left["loss"] - other["loss"]) > 1e-4
    for key, x in arrays(one, 6).items():
        scale = max(np.abs(x).max(), 6e-2)
        assert np.abs(arrays(many, 6)[key] - x).max() / scale < 1e-12, key
    assert held_out(many) == pytest.approx(held_out(one), rel=1e-12)


@pytest.mark.parametrize("layout", ["dp1", "tp2"])
def test_held_out_figures_are_without_them(tmp_path: Path, layout: str) -> None:
    """Before the first step the weights are those of any run with the seed, and so is the figure;
    it would be 0.05·(ln 256)² = 1.5 nats higher."""
    plain, added = tmp_path / "plain", tmp_path / "added"
    do(plain, config(steps=1), layout)
    do(added, config(steps=1, **ADDED), layout)
    assert held_out(added)[0] == held_out(plain)[0]
    assert held_out(added)[1] != held_out(plain)[1]
    [first], [other] = steps_of(plain), steps_of(added)
    assert other["loss"] - first["loss"] == pytest.approx(0.05 * np.log(256) ** 2, abs=0.05)


def test_a_resumed_run_keeps_them(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    do(whole, config(steps=20, **ADDED))
    start = whole / "checkpoints" / "step-000010"
    do(parted, config(steps=20, **ADDED), start=start)
    assert_bitwise(arrays(parted, 20), arrays(whole, 20))
