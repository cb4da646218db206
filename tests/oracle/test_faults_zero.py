"""Faults of sharded data parallelism: all found, and named by the first wrong tensor."""

from __future__ import annotations

import numpy as np
import pytest
from seen import assert_seen

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.optim import SGD, LossScale, Optimizer
from minitrain.oracle import FAULTS, planted, verify
from minitrain.oracle.reference import awkward_batches
from minitrain.oracle.verify import Report
from minitrain.parallel import Mesh, parallelize
from minitrain.train.step import Stepper, TrainingError

SMALL = GPTConfig(vocab=17, context=6, layers=1, heads=2, width=8, dropout=0.1)
SGDS: dict[str, Optimizer] = {"sgd": SGD(momentum=0.9, decay=0.1)}
SHARD = [name for name, fault in FAULTS.items() if fault.module == "zero"]

# Fault → layouts on which it shows, what it is first seen in, its diagnosis.
SEEN: dict[str, tuple[tuple[str, ...], str, str]] = {
    "stale-gather": (
        ("shard2,zero3,keep", "shard3,zero3,keep"),
        "sgd step 2 output embedding",
        "stale",
    ),
    "gradient-sliced": (
        ("shard2,zero3", "shard3,zero3"),
        "sgd step 1 gradient norm.bias",
        "not-summed",
    ),
    "pieces-by-name": (
        ("shard2,zero1", "shard3,zero2"),
        "sgd step 1 gradient norm.bias",
        "misplaced",
    ),
    "last-backward-only": (
        ("shard2,zero2", "shard3,zero2"),
        "sgd step 1 gradient norm.bias",
        "micro-batches",
    ),
    "replicas-not-summed": (
        ("dp2,shard2,zero1", "dp2,shard2,zero2"),
        "sgd step 1 gradient norm.bias",
        "summand-missing",
    ),
    "norm-of-one-shard": (
        ("shard2", "shard2,zero3", "shard2,zero2,owner"),
        "sgd step 1 norm",
        "norm-not-summed",
    ),
    "norm-over-padding": (("shard3", "shard3,zero3"), "sgd step 1 norm", "padding"),
    "replicas-in-the-norm": (
        ("dp2,shard2,zero1", "dp2,shard2,zero3"),
        "sgd step 1 norm",
        "norm-of-copies",
    ),
    "decay-lost": (
        ("shard2", "shard2,zero2,owner"),
        "sgd step 1 weight embedding.token.weight",
        "update",
    ),
    "owner-not-broadcast": (
        ("shard2,owner", "shard2,zero2,owner"),
        "sgd step 1 weight embedding.token.weight",
        "stale",
    ),
}


def small(layout: str, fault: str | None) -> Report:
    return verify(SMALL, layout, fault=fault, batch=6, bucket=1 << 10, steps=2, optimizers=SGDS)


def test_every_fault_of_sharding_is_known_here() -> None:
    assert {*SEEN, "verdict-of-one-rank"} == {*SHARD}


@pytest.mark.parametrize("name", SEEN)
def test_every_fault_of_sharding_is_found_and_named(name: str) -> None:
    layouts, tensor, kind = SEEN[name]
    for layout in layouts:
        report = small(layout, name)
        assert_seen(report, tensor, kind)


@pytest.mark.parametrize(
    "layout", sorted({one for layouts, *_ in SEEN.values() for one in layouts})
)
def test_without_a_fault_the_same_runs_are_equal(layout: str) -> None:
    report = small(layout, None)
    assert report.ok, str(report.first)


def skips(group: Group) -> bool:
    """Whether this rank skips a step in which the last rank's piece alone overflows."""
    model = parallelize(GPT(SMALL), Mesh(group, Layout.parse("shard2")), dtype="float16")
    forward_backward = model.forward_backward

    def overflowing(*args: object) -> object:
        loss = forward_backward(*args)  # type: ignore[arg-type]
        if group.rank == 1:
            model.stepped.grad("blocks.0.mlp.up.weight")[-1] = np.inf
        return loss

    model.forward_backward = overflowing  # type: ignore[method-assign,assignment]
    stepper = Stepper(model, SGD(), lambda update: 0.1, clip=1.0, loss_scale=LossScale(8.0))
    return stepper.step(awkward_batches(17, 6, 4, 1, 0)[0]).skipped


def test_a_verdict_of_one_rank_is_not_the_norms() -> None:
    """The rank that sees no overflow in its own piece knows from the norm that there is one."""
    assert run_ranks(2, skips) == [True, True]
    with pytest.raises(TrainingError, match="by rank 0"), planted("verdict-of-one-rank"):
        run_ranks(2, skips)
