"""Public bugs of pipelines: the right value of each, worked out by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from affine_chain import PRIMES, chain, everywhere, merged, sequences

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.nn import GPTConfig
from minitrain.nn.families import declare
from minitrain.optim import SGD, AdamW, LossScale
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.reduce import Bucket
from minitrain.train.step import Stepper


@pytest.mark.parametrize("layout", ["dp1", "pp2", "pp2,zb-h1", "pp2,zb-v", "pp2,shard2,zero2"])
def test_every_micro_batch_trains_the_model(layout: str) -> None:
    """Case E1: gradients 1, 2, 3, 4 of four micro-batches have the mean 2.5; the last alone is 4.
    Then the same after an evaluation, which leaves nothing behind."""

    def rank(group: Group) -> Any:
        model = chain(group, layout, (1.0, 1.0), micro_batches=4)
        found = []
        for _ in range(2):
            model.forward_backward(sequences(8 if "shard" in layout else 4))
            found.append({n: g.tolist() for n, g in model.gradients().items() if g.size})
            model.evaluate(sequences(2))
        return found

    mean = 4.5 if "shard" in layout else 2.5  # of 1 to 8, or 1 to 4
    for step in zip(*everywhere(layout, rank), strict=True):
        found = merged(list(step))
        assert found["blocks.0.weight"] == found["blocks.1.weight"] == [mean]
        assert found["embedding.weight"] == [mean]
        assert found["blocks.0.bias"] == [1.0]


@pytest.mark.parametrize("layout", ["pp2", "pp2,zb-v", "pp2,interleaved"])
def test_the_norm_that_clips_is_that_of_all_stages(layout: str) -> None:
    """Case A3: gradients 3 on one stage and 4 on another have the norm 5 on both; clipped to 1,
    SGD with a rate of 1 goes 0.6 and 0.8. By its own norm each would go 1."""

    def rank(group: Group) -> Any:
        model = chain(group, layout, (1.0, 1.0))
        stepper = Stepper(model, SGD(), lambda update: 1.0, clip=1.0)
        result = stepper.compute(sequences(1))
        for name, p in model.parameters.items():
            gradient = {"blocks.0.weight": 3.0, "blocks.1.weight": 4.0}.get(name, 0.0)
            model.stepped.grad(name)[...] = gradient
            p.array[...] = 0.0
        norm = model.gradient_norm()
        stepper.apply(result._replace(grad_norm=norm))
        return norm, {n: p.array.tolist() for n, p in model.parameters.items()}

    ranks = everywhere(layout, rank)
    assert [norm for norm, _ in ranks] == [5.0, 5.0]
    weights = merged([mine for _, mine in ranks])
    assert weights["blocks.0.weight"] == pytest.approx([-0.6], rel=1e-15)
    assert weights["blocks.1.weight"] == pytest.approx([-0.8], rel=1e-15)


TIED = GPTConfig(vocab=11, context=5, layers=6, heads=2, width=8)


@pytest.mark.parametrize("layout", ["pp2", "pp4", "pp2,interleaved", "pp4,zb-v", "pp2,zb-h2"])
def test_copies_of_a_tied_table_stay_equal(layout: str) -> None:
    """Case E3: five steps of Adam with decay and clipping; the copies have the same bits after
    each, and they are those of one array with both gradients, once."""

    def rank(group: Group, layout: str) -> Any:
        model = parallelize(
            declare(TIED), Mesh(group, Layout.parse(layout)), micro_batches=4, dtype="float64"
        )
        stepper = Stepper(model, AdamW(0.9, 0.99, 1e-2, decay=0.1), lambda update: 0.1, clip=0.5)
        tables, rng = [], np.random.default_rng(0)
        for step in range(5):
            tokens, labels = rng.integers(0, TIED.vocab, (2, 8, TIED.context))
            stepper.step(Batch(tokens, labels, np.arange(8), step, 8))
            table = model.parameters.get("embedding.token.weight")
            tables.append(None if table is None else table.array.copy())
        return tables

    (expected,) = run_ranks(1, rank, "dp1")
    found = [x for x in everywhere(layout, lambda group: rank(group, layout)) if x[0] is not None]
    assert len(found) == (1 if "zb-v" in layout else 2)
    for step in range(5):
        assert len({tables[step].tobytes() for tables in found}) == 1
        np.testing.assert_allclose(found[0][step], expected[step], rtol=0, atol=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("layout", ["pp4,gpipe", "pp4,1f1b", "pp4,interleaved", "pp4,dualpipe-v"])
def test_fewer_micro_batches_than_stages(layout: str, micro_batches: int) -> None:
    """Case E4: the right gradients, or a refusal with both numbers; never a hang."""
    slopes = PRIMES[:6]

    def rank(group: Group) -> Any:
        with group.ledger() as ledger:
            try:
                model = chain(group, layout, slopes, micro_batches=micro_batches)
            except UserError as error:
                assert ledger.messages() == 0
                return str(error)
        model.forward_backward(sequences(6))
        return {n: g.tolist() for n, g in model.gradients().items()}

    ranks = everywhere(layout, rank)
    if "dualpipe" in layout:
        assert all(f"at least 8 micro-batches, but there are {micro_batches}" in x for x in ranks)
        return
    found, product = merged(ranks), float(np.prod(slopes))
    for i, slope in enumerate(slopes):  # the mean of 1 to 6 is 3.5
        assert found[f"blocks.{i}.weight"] == pytest.approx([3.5 * product / slope], rel=1e-14)


@pytest.mark.parametrize("micro_batches", [5, 6, 7])
@pytest.mark.parametrize("layout", ["pp2,interleaved", "pp4,interleaved", "pp4,zb-v"])
def test_micro_batches_that_are_no_multiple_of_the_stages(layout: str, micro_batches: int) -> None:
    """Case E5: every micro-batch passes all chunks in their order; a·x + b tells the order."""
    slopes = PRIMES[: 2 * Layout.parse(layout).pp]

    def through(x: float) -> float:
        for slope in slopes:
            x = slope * x + 1.0
        return x

    def rank(group: Group) -> float:
        model = chain(group, layout, slopes, 1.0, micro_batches=micro_batches)
        return model.forward_backward(sequences(micro_batches)).value

    right = np.mean([through(place + 1.0) for place in range(micro_batches)])
    assert everywhere(layout, rank) == pytest.approx([right] * Layout.parse(layout).size)


@pytest.mark.parametrize("rows", [128, pytest.param(1 << 20, marks=pytest.mark.deep)])
@pytest.mark.parametrize("layout", ["pp2,1f1b", "pp4,1f1b", "pp2,interleaved", "pp4,interleaved"])
def test_neighbours_that_send_to_each_other(layout: str, rows: int) -> None:
    """Case E7: activations of 1 KB and of 8 MB, on sends that wait for their receive."""

    def rank(group: Group) -> float:
        model = chain(group, layout, PRIMES[:6], micro_batches=4)
        return model.forward_backward(sequences(4 * rows)).value

    right = float(np.prod(PRIMES[:6])) * (4 * rows + 1) / 2
    assert everywhere(layout, rank) == pytest.approx([right] * Layout.parse(layout).size)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 6])
def test_data_ranks_are_summed_once_a_step(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case E8: one reduction of each parameter and step on each rank, after all micro-batches."""
    reductions: Counter[tuple[int, str]] = Counter()
    start = Bucket.start

    def counting(bucket: Bucket) -> None:
        rank = bucket.reducer.mesh.world.rank
        reductions.update((rank, name) for name in bucket.names)
        start(bucket)

    monkeypatch.setattr(Bucket, "start", counting)
    slopes = PRIMES[:3]

    def rank(group: Group) -> Any:
        model = chain(group, "dp2,pp2", slopes, micro_batches=micro_batches)
        stepper = Stepper(model, SGD(), lambda update: 1e-3, clip=None)
        stepper.step(sequences(2 * micro_batches))
        gradients = {n: g.tolist() for n, g in model.gradients().items()}
        return gradients, {n: p.array.tolist() for n, p in model.parameters.items()}

    ranks = everywhere("dp2,pp2", rank)
    assert set(reductions.values()) == {1}
    found, mean = merged([gradients for gradients, _ in ranks]), micro_batches + 0.5
    merged([weights for _, weights in ranks])  # the same bits on both data ranks
    for i, slope in enumerate(slopes):
        assert found[f"blocks.{i}.weight"] == pytest.approx([mean * 30 / slope], rel=1e-14)


@pytest.mark.parametrize("layout", ["pp2", "pp4", "pp2,zb-v"])
def test_every_rank_has_the_loss(layout: str) -> None:
    """Case E9: three steps and an evaluation; the loss, not its share of a stage, everywhere."""

    def rank(group: Group) -> list[float]:
        model = chain(group, layout, (1.0, 2.0, 3.0), micro_batches=2)
        losses = [model.forward_backward(sequences(4, step)).value for step in range(3)]
        return [*losses, model.evaluate(sequences(2)).value]

    size = Layout.parse(layout).size  # 6 times the mean of 1 to 4, and of 1 and 2
    assert everywhere(layout, rank) == [[15.0, 15.0, 15.0, 9.0]] * size


@pytest.mark.parametrize("layout", ["pp2,1f1b", "pp3,zb-h1"])
def test_a_stage_without_parameters_agrees_on_norm_scale_and_skip(layout: str) -> None:
    """Case F4: a stage whose blocks are none; float16, an overflow in the second step."""

    def rank(group: Group) -> Any:
        size = Layout.parse(layout).pp
        # The last stage has the head alone, which has no parameter here.
        stages = (2, 0) if size == 2 else (1, 1, 0)
        model = chain(group, layout, (1.0, 1.0), dtype="float16", stages=stages)
        scale = LossScale(256.0)
        stepper = Stepper(model, SGD(), lambda update: 1e-3, clip=1.0, loss_scale=scale)
        found = []
        for step in range(3):
            if step == 1 and group.rank == 0:
                stepper.model.lives.weights[...] = 6e4  # times 1 to 4: above float16's 65504
            result = stepper.step(sequences(4, step))
            found.append((result.grad_norm if step == 0 else 0.0, result.loss_scale,
                          result.skipped))  # fmt: skip
        return found

    ranks = everywhere(layout, rank)
    assert all(found == ranks[0] for found in ranks)
    assert [skipped for _, _, skipped in ranks[0]] == [False, True, True]
    assert ranks[0][1][1] > ranks[0][2][1]
    assert ranks[0][0][0] > 1
