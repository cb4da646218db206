"""Public bugs of sharded data parallelism: who does what, when, and in which order."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import TINY, labelled
from toy_model import SHARDED, TWO, sequences, toy

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT
from minitrain.optim import SGD
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.reduce import Bucket
from minitrain.train.step import Stepper


def lives(group: Group, layout: str) -> Any:
    """What lives on a rank after three steps, each of it on other data."""
    model = parallelize(GPT(TINY), Mesh(group, Layout.parse(layout)), dtype="float64")
    stepper = Stepper(model, SGD(0.9, 0.1), lambda update: 0.1, clip=0.1)
    for step in range(3):
        stepper.step(labelled(4, 1, 2, 3, step=step))
    return {name: parameter.array.copy() for name, parameter in model.parameters.items()}


@pytest.mark.parametrize("layout", TWO)
def test_no_spelling_turns_synchronisation_off(layout: str) -> None:
    """Case F8: ranks with other data have the same weights, those of dp2."""
    expected = run_ranks(2, lives, "dp2")
    for name, right in expected[0].items():
        np.testing.assert_array_equal(right, expected[1][name])
    ranks = run_ranks(2, lives, layout)
    for name, right in expected[0].items():
        parts = [mine[name] for mine in ranks]
        cut = parts[0].shape != right.shape
        if cut:
            parts = [np.concatenate(parts[: Layout.parse(layout).shard]).reshape(right.shape)]
        for part in parts:
            np.testing.assert_allclose(part, right, rtol=0, atol=1e-14)
        assert cut or parts[0].tobytes() == parts[1].tobytes()


@pytest.mark.parametrize("layout", ["dp4", "shard4,zero1", "shard4,zero2", "dp2,shard2,zero2"])
def test_overlap_changes_no_bit_however_late_a_rank_is(layout: str) -> None:
    """Case F9: fifty parameters in buckets of sixteen elements, a rank that is late at random."""
    shapes = {f"p{n}": (n,) for n in range(1, 51)}

    def program(group: Group, overlaps: bool, seed: int) -> list[Any]:
        rng = np.random.default_rng([seed, group.rank])

        def written(step: int, place: int, name: str) -> Any:
            if overlaps and group.rank == seed % 4 and rng.random() < 0.05:
                time.sleep(0.002)
            return np.random.default_rng([step, place, int(name[1:])]).normal(size=int(name[1:]))

        model = toy(group, layout, shapes, written, bucket=128, micro_batches=2)
        if not overlaps:
            model.reducer.on_final = lambda leaf: None  # type: ignore[method-assign]
        found = []
        for step in range(2):
            model.forward_backward(sequences(8, step))
            found.append({k: g.tobytes() for k, g in model.gradients().items()})
        return found

    expected = run_ranks(4, program, False, 0)
    for seed in range(5):  # on four layouts: twenty times
        assert run_ranks(4, program, True, seed) == expected


def started(layout: str) -> dict[tuple[int, ...], set[tuple[str, ...]]]:
    """For each group the sequences of buckets that its members start: one, if all is well."""
    logs: dict[int, dict[tuple[int, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    start = Bucket.start

    def logging(bucket: Bucket) -> None:
        group = bucket.scatter or bucket.sums[0]
        logs[bucket.reducer.mesh.world.rank][group.ranks].append("+".join(bucket.names))
        start(bucket)

    Bucket.start = logging  # type: ignore[method-assign]
    try:
        run_ranks(Layout.parse(layout).size, lives, layout)
    finally:
        Bucket.start = start  # type: ignore[method-assign]
    found: dict[tuple[int, ...], set[tuple[str, ...]]] = defaultdict(set)
    for log in logs.values():
        for ranks, names in log.items():
            found[ranks].add(tuple(names))
    return found


def test_all_ranks_reduce_in_one_order_whatever_their_hash_seed() -> None:
    """Case F11: sets and dicts of strings may have another order in each process."""
    for layout in ("dp2,shard2,zero1", "dp2,shard2,zero2,owner", "shard2,zero3,tp2"):
        sequences_of = started(layout)
        assert len(sequences_of) >= 2
        assert all(len(found) == 1 for found in sequences_of.values())
    code = "import test_zero_rank_cases as m; print(sorted(m.started('dp2,shard2,zero2').items()))"
    texts = set()
    for seed in "0123":
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, text=True,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        texts.add(done.stdout)
    assert len(texts) == 1


@pytest.mark.parametrize("layout", ["dp1", "shard2", "shard3,zero2", "shard4,zero3", "shard7"])
def test_no_padding_is_counted_in_an_evaluation(layout: str) -> None:
    """Case L2: ten sequences whose losses are i² have the mean 28.5 on any number of ranks."""

    def program(group: Group) -> float:
        model = toy(group, layout, {"w": (1,)}, lambda s, place, n: place**2.0, start=1.0)
        return model.evaluate(sequences(10)).value

    for value in run_ranks(Layout.parse(layout).size, program):
        assert value == pytest.approx(28.5, rel=1e-14)


@pytest.mark.parametrize(("count", "ranks"), [(7, 2), (10, 3), (1, 2), (2, 5)])
@pytest.mark.parametrize("stage", SHARDED)
def test_all_ranks_do_every_step_with_uneven_parts(stage: str, count: int, ranks: int) -> None:
    """Case L3: the gradient is the mean over the sequences there are; some ranks have one less."""

    def program(group: Group) -> None:
        layout = f"shard{ranks},{stage}"
        model = toy(group, layout, {"w": (3,)}, lambda s, place, n: place + 1.0, micro_batches=2)
        for step in range(2):
            assert model.forward_backward(sequences(count, step)).tokens == count
            for grad in model.gradients().values():
                np.testing.assert_allclose(grad, (count + 1) / 2, rtol=1e-15)

    run_ranks(ranks, program, synchronous=True)


@pytest.mark.parametrize(
    "layout",
    ["shard4", "dp2,shard2", "shard2,zero3,tp2", "shard2,zero2,pp2", "dp2,shard2,tp2", "dp2,cp2"],
)
def test_shard_ranks_compute_disjoint_samples_that_make_the_batch(layout: str) -> None:
    """Case L15: each place once over the data ranks, the same ones on their tp and pp peers."""

    def program(group: Group) -> list[list[int]]:
        mesh, seen = Mesh(group, Layout.parse(layout)), []
        for step in range(2):
            batch = labelled(*[1] * 8, step=step)
            parts = [batch.part(m, 2, mesh.data_index, mesh.layout.data_ranks) for m in range(2)]
            seen.append([int(place) for part in parts for place in part.places])
        return seen

    where = Layout.parse(layout)
    ranks = run_ranks(where.size, program)
    by_data = defaultdict(list)
    for rank, seen in enumerate(ranks):
        by_data[where.data_index(rank)].append(seen)
    assert all(seen == peers[0] for peers in by_data.values() for seen in peers)
    for step in range(2):
        assert sorted(i for peers in by_data.values() for i in peers[0][step]) == list(range(8))
