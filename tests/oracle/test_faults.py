"""The tests are tested: every fault that is known is found, and the first wrong tensor named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import isfunction
from typing import Any

import pytest

from minitrain.nn import GPTConfig
from minitrain.oracle import FAULTS, faults, planted, verify
from minitrain.oracle.faults import SEAMS, Fault
from minitrain.parallel.worker import ParallelModel

SMALL = GPTConfig(vocab=17, context=6, layers=2, heads=2, width=8, dropout=0.1)

DATA = [name for name, fault in FAULTS.items() if fault.module == "data"]

# What each fault is first seen in, on two data ranks, and its diagnosis. One that a table does not
# have fails.
SEEN = {
    "mean-of-local-means": ("sgd step 1 loss", "mean-of-means"),
    "loss-not-divided": ("sgd step 1 loss", "scaled"),
    "mean-of-micro-batches": ("sgd step 1 loss", "mean-of-means"),
    "rank-not-reduced": ("sgd step 1 gradient norm.bias", "summand-missing"),
    "parameter-skipped": ("sgd step 1 gradient blocks.0.mlp.up.weight", "not-summed"),
    "result-lost": ("sgd step 1 gradient norm.bias", "not-summed"),
    "last-bucket-late": ("sgd step 1 gradient norm.bias", "not-summed"),
    "weights-reduced": ("sgd step 1 gradient norm.bias", "not-summed"),
    "averaged-again": ("sgd step 1 gradient norm.bias", "scaled"),
    "micro-batch-overwritten": ("sgd step 1 gradient norm.bias", "micro-batches"),
    "accumulation-rescaled": ("sgd step 1 gradient norm.bias", "scaled"),
    "norm-of-copies": ("sgd step 1 norm", "norm-of-copies"),
    "unequal-replicas": ("sgd start weight embedding.token.weight", "replicas"),
    "schedule-per-rank": ("sgd step 1 weight embedding.token.weight", "update"),
    "same-samples": ("sgd step 1 loss", "summand-missing"),
    "empty-batch-steps": ("sgd step 4 weight embedding.token.weight", "update"),
    "local-dropout": ("sgd step 1 output embedding", "mask"),
}


@pytest.mark.parametrize("name", DATA)
def test_every_known_fault_is_found_and_named(name: str) -> None:
    report = verify(SMALL, "dp2", fault=name, batch=6, bucket=1 << 10)
    assert not report.ok
    assert report.first is not None
    assert report.diagnosis is not None
    assert (report.first.tensor, report.diagnosis.kind) == SEEN[name]
    assert report.worst.error > 1e-9  # no rounding: far above the bound


def test_without_a_fault_all_is_equal() -> None:
    for layout in ("dp1", "dp2", "dp3"):
        report = verify(SMALL, layout, batch=6, bucket=1 << 10)
        assert report.ok, str(report.first)
        assert report.first is None
        assert report.worst.error < 1e-12


def standing() -> dict[str, Any]:
    """What stands at each seam itself, which may be nothing: a base class has it."""
    owners = {seam: faults.at(seam)[:2] for seam in SEAMS}
    return {seam: vars(owner).get(attribute) for seam, (owner, attribute) in owners.items()}


def test_every_seam_resolves_and_has_a_fault() -> None:
    for seam in SEAMS:
        owner, attribute, original = faults.at(seam)
        assert getattr(owner, attribute) is original
        assert callable(original) or isinstance(original, property)
    assert {fault.seam for fault in FAULTS.values()} <= SEAMS.keys()


def test_a_fault_is_there_as_long_as_it_is_planted() -> None:
    before = standing()
    for name, fault in FAULTS.items():
        with planted(name):
            now = standing()
            assert now[fault.seam] is not before[fault.seam], name
            assert {s: x for s, x in now.items() if s != fault.seam} == {
                s: x for s, x in before.items() if s != fault.seam
            }
        after = standing()
        assert all(after[seam] is before[seam] for seam in SEAMS), name
    with pytest.raises(ZeroDivisionError), planted("norm-of-copies"):
        raise ZeroDivisionError
    assert standing() == before


def test_every_fault_is_a_function_and_every_function_a_fault() -> None:
    for module in {fault.module for fault in FAULTS.values()}:
        found = vars(import_module(f"{faults.__name__}.{module}")).items()
        functions = {
            name
            for name, value in found
            if isfunction(value) and value.__module__.endswith(f"faults.{module}")
        }
        listed = {
            name.replace("-", "_") for name, fault in FAULTS.items() if fault.module == module
        }
        assert {name for name in functions if not name.startswith("_")} == listed
        assert all(vars(import_module(f"{faults.__name__}.{module}"))[n].__doc__ for n in listed)


def test_faults_are_loaded_only_to_be_planted() -> None:
    code = (
        "import sys, minitrain.oracle as o\n"
        "mine = sorted(m for m in sys.modules if m.startswith('minitrain.oracle.faults'))\n"
        "assert mine == ['minitrain.oracle.faults'], mine\n"
        "with o.planted('norm-of-copies'):\n"
        "    assert 'minitrain.oracle.faults.data' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_renamed_seam_breaks_its_faults_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import minitrain.parallel.norm as norm\n"
        "norm.Norm.amount = norm.Norm.__dict__['value']\n"
        "del norm.Norm.value\n"
        "import minitrain.oracle as o\n"
        "try:\n"
        "    with o.planted('norm-of-copies'): pass\n"
        "except AttributeError as error: print(error)\n"
        "with o.planted('tp-norm-of-copies'): pass\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    assert "'value'" in result.stdout
    monkeypatch.setitem(SEAMS, "gone", "minitrain.parallel.norm:Norm.gone")
    monkeypatch.setitem(FAULTS, "norm-of-copies", Fault("gone", "data"))
    with pytest.raises(AttributeError, match="gone"):
        planted("norm-of-copies").__enter__()
    assert verify(SMALL, "dp1", batch=6, steps=1).ok


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fault 'norm-of-copy'; did you mean norm-of-co"):
        verify(SMALL, "dp2", fault="norm-of-copy")
    with pytest.raises(ValueError, match="there are mean-of-local-means, "):
        planted("zzz").__enter__()


Step = Callable[..., Any]


def test_a_run_that_does_not_train_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged result, and one of zeros, are wrong by more than any bound could hide."""
    from minitrain.train.step import Stepper

    monkeypatch.setattr(Stepper, "apply", lambda *args: None)
    report = verify(SMALL, "dp2", batch=6)
    assert str(report.first).startswith("sgd step 1 weight embedding.token.weight")
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "stale"
    finish: Step = ParallelModel.forward_backward

    def zeros(model: ParallelModel, *args: Any) -> Any:
        loss = finish(model, *args)
        model.stepped.gradient[...] = 0
        return loss

    monkeypatch.setattr(ParallelModel, "forward_backward", zeros)
    report = verify(SMALL, "dp2", batch=6)
    assert "sgd step 1 gradient norm.bias" in str(report.first)
