"""The tests are tested: every fault that is known is found, and the first wrong tensor named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minitrain.nn import GPTConfig
from minitrain.oracle import FAULTS, planted, verify
from minitrain.oracle.mutants_data import DATA
from minitrain.parallel.model import ParallelModel

SMALL = GPTConfig(vocab=17, context=6, layers=2, heads=2, width=8, dropout=0.1)

# What each fault is first seen in, on two data ranks. A fault that a table does not have fails.
SEEN = {
    "mean-of-local-means": "sgd step 1 loss",
    "loss-not-divided": "sgd step 1 loss",
    "mean-of-micro-batches": "sgd step 1 loss",
    "rank-not-reduced": "sgd step 1 gradient norm.bias",
    "parameter-skipped": "sgd step 1 gradient blocks.0.mlp.up.weight",
    "result-lost": "sgd step 1 gradient norm.bias",
    "last-bucket-late": "sgd step 1 gradient norm.bias",
    "weights-reduced": "sgd step 1 gradient norm.bias",
    "averaged-again": "sgd step 1 gradient norm.bias",
    "micro-batch-overwritten": "sgd step 1 gradient norm.bias",
    "accumulation-rescaled": "sgd step 1 gradient norm.bias",
    "norm-of-copies": "sgd step 1 norm",
    "unequal-replicas": "sgd step 1 loss",
    "schedule-per-rank": "sgd step 2 loss",
    "same-samples": "sgd step 1 loss",
    "empty-batch-steps": "sgd weight embedding.token.weight",
    "local-dropout": "sgd step 1 loss",
}


@pytest.mark.parametrize("name", DATA)
def test_every_known_fault_is_found_and_named(name: str) -> None:
    report = verify(SMALL, "dp2", fault=name, batch=6, bucket=1 << 10)
    assert not report.ok
    assert report.first is not None
    assert report.first.tensor == SEEN[name]
    assert report.worst.error > 1e-9  # no rounding: far above the bound


def test_without_a_fault_all_is_equal() -> None:
    for layout in ("dp1", "dp2", "dp3"):
        report = verify(SMALL, layout, batch=6, bucket=1 << 10)
        assert report.ok, str(report.first)
        assert report.first is None
        assert report.worst.error < 1e-12


def test_a_fault_is_there_as_long_as_it_is_planted() -> None:
    def originals() -> list[Any]:
        return [vars(owner).get(attribute) for owner, attribute, _ in FAULTS.values()]

    before = originals()
    for name, (owner, attribute, replacement) in FAULTS.items():
        with planted(name):
            assert vars(owner)[attribute] is replacement
    assert originals() == before


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fault 'norm-of-copy'; did you mean norm-of-co"):
        verify(SMALL, "dp2", fault="norm-of-copy")
    with pytest.raises(ValueError, match="there are mean-of-local-means, "):
        planted("zzz").__enter__()


Step = Callable[..., Any]


def test_a_run_that_does_not_train_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged result, and one of zeros, are wrong by more than any bound could hide."""
    from minitrain.train.step import Stepper

    monkeypatch.setattr(Stepper, "_update", lambda *args: None)
    report = verify(SMALL, "dp2", batch=6)
    assert str(report.first).startswith("sgd step 2 loss")
    finish: Step = ParallelModel.forward_backward

    def zeros(model: ParallelModel, *args: Any) -> Any:
        loss = finish(model, *args)
        model.stepped.gradient[...] = 0
        return loss

    monkeypatch.setattr(ParallelModel, "forward_backward", zeros)
    report = verify(SMALL, "dp2", batch=6)
    assert "sgd step 1 gradient norm.bias" in str(report.first)
