"""What data parallelism sends: the formula, and while the backward runs."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_model import dp, labelled, tiny

from minitrain.comm import Group, run_ranks
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import SGD
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.flat import buckets
from minitrain.parallel.reduce import Reducer
from minitrain.train.step import Stepper


def ledger_of(
    group: Group, config: GPTConfig, bucket: int, dtype: str
) -> tuple[dict[str, int], int, int, list[int]]:
    """Bytes of a step by purpose, all bytes, Ψ's bytes, and elements of each bucket."""
    mesh = Mesh(group, dp(group.size))
    model = parallelize(GPT(config), mesh, micro_batches=2, dtype=dtype, bucket=bucket)
    stepper = Stepper(model, SGD(), lambda update: 0.1, clip=1.0)
    batch = labelled(*[3] * 10)
    with group.ledger() as ledger:
        stepper.step(batch)
    sizes = [
        sum(model.lives.spans[name].stop - model.lives.spans[name].start for name in names)
        for names in buckets(model.lives, list(model.lives.spans), bucket)
    ]
    return ledger.by("purpose"), ledger.bytes(), model.stepped.gradient.nbytes, sizes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bucket", [1200, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_bytes_of_a_step_are_the_formula(size: int, bucket: int, dtype: str) -> None:
    """2(d-1)/d · Ψ · itemsize a rank for the gradient, also where d does not divide it; five
    numbers of the batch (data.py) and the loss are reduced beside it; nothing else is sent."""
    config = GPTConfig(vocab=11, context=5, layers=2, heads=2, width=8)
    ranks = run_ranks(size, ledger_of, config, bucket, dtype)
    _, _, gradient_bytes, sizes = ranks[0]
    assert len(sizes) > 1 or bucket > gradient_bytes
    assert sum(sizes) * np.dtype(dtype).itemsize == gradient_bytes
    assert sum(by.get("gradient", 0) for by, *_ in ranks) == 2 * (size - 1) * gradient_bytes
    if all(n % size == 0 for n in sizes):
        for by, *_ in ranks:
            assert by.get("gradient", 0) * size == 2 * (size - 1) * gradient_bytes
    # An all-reduce of few numbers by doubling: a power of two of the ranks exchange log2 times, the
    # others hand theirs over before and get the sum after.
    power = 1 << (size.bit_length() - 1)
    messages = power * (power.bit_length() - 1) + 2 * (size - power)
    assert sum(by.get("scalar", 0) for by, *_ in ranks) == (5 + 1) * messages * 8
    for by, everything, *_ in ranks:
        assert by.keys() <= {"gradient", "scalar"}
        assert sum(by.values()) == everything


def test_ledgers_do_not_depend_on_micro_batches() -> None:
    """Gradients travel once a step, after the last micro-batch, not once in each."""

    def program(group: Group, micro_batches: int) -> int:
        model = tiny(group, micro_batches)
        with group.ledger() as ledger:
            model.forward_backward(labelled(1, 2, 3, 4))
        return ledger.bytes(purpose="gradient")

    once = run_ranks(2, program, 1)
    assert once[0] > 0
    assert run_ranks(2, program, 4) == once


# Buckets overlap the backward.


def test_buckets_start_while_the_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, int]] = []
    finish = Reducer.finish

    def counting(sums: Reducer) -> None:
        started.append((sums.started, len(sums.buckets)))
        finish(sums)

    monkeypatch.setattr(Reducer, "finish", counting)

    def program(group: Group) -> None:
        tiny(group, 3, bucket=300).forward_backward(labelled(1, 2, 3))

    run_ranks(2, program, synchronous=True)
    assert len(started) == 2
    for begun, count in started:
        assert count >= 4
        # All are final when the backward ends, so that only the last ones are waited for.
        assert begun == count
