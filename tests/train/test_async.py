"""Asynchronous runs and local SGD: what they must equal, how they go on, what is told of them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import arrays, assert_bitwise, corpus, do, run_of, steps_of

from minitrain.batch import IGNORE
from minitrain.comm import run_ranks
from minitrain.layout import Layout, LayoutError
from minitrain.nn.module import Window, window
from minitrain.train import build
from minitrain.train.asynchronous import check_sync
from minitrain.train.config.resolve import resolve
from minitrain.train.config.sections import RunConfig, SyncSection
from minitrain.train.loop import train

SIZES = {"layers": 1, "heads": 2, "width": 8, "context": 8, "batch": 6}
PLAIN = {"optimizer": "sgd", "momentum": 0.0, "clip": "none", "weight_decay": 0.0}


def config(**flags: Any) -> RunConfig:
    """A tiny run in float64 with dropout and a constant rate, so that its length is no matter."""
    always = {"dtype": "float64", "dropout": 0.1, "lr": 1e-2, "schedule": "constant", "warmup": 0}
    return resolve(flags={**SIZES, **always, "steps": 8, "eval_every": 4, "save_every": 4, **flags})


def weights(path: Path, step: int) -> dict[str, Any]:
    return {k: x for k, x in arrays(path, step).items() if k.startswith("weights/")}


def assert_close(one: dict[str, Any], two: dict[str, Any], bound: float = 1e-13) -> None:
    assert one.keys() == two.keys()
    for key, x in one.items():
        np.testing.assert_allclose(x, two[key], rtol=0, atol=bound, err_msg=key)


def delayed(given: RunConfig, workers: int, updates: int) -> list[dict[str, Any]]:
    """SGD in which step k uses the weights of step max(0, k-n+1), on one device by hand: the
    weights after each step."""
    model: Any = build.model_of(given, 256).initialize(given.run.seed, "float64")
    parameters, text = model.parameters(), corpus()
    history = [{name: p.array.copy() for name, p in parameters.items()}]
    for k in range(updates):
        batch = text.batch(k // workers, given.data.batch, given.model.context, given.run.seed)
        share = batch.part(0, 1, k % workers, workers)
        for name, p in parameters.items():
            p.array, p.grad = history[max(0, k - workers + 1)][name].copy(), None
        positions = np.arange(share.tokens.shape[1])
        with window(Window(given.run.seed, batch.step, share.places, positions)):
            valid = int((share.labels != IGNORE).sum())
            model.loss(model(share.tokens, positions), share.labels, total=valid).backward()
        now = {name: history[-1][name] - given.optimizer.lr * p.grad
               for name, p in parameters.items()}  # fmt: skip
        history.append(now)
    return history


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_take_turns_are_sgd_with_older_weights(tmp_path: Path, workers: int) -> None:
    times = ",".join(["1"] * workers)
    given = config(**PLAIN, sync="async", staleness="none", worker_times=times, steps=4)
    do(tmp_path, given, f"dp{workers}")
    expected = delayed(given, workers, 4 * workers)[-1]
    found = {key.removeprefix("weights/"): x for key, x in weights(tmp_path, 4).items()}
    assert_close(found, expected, 1e-15)
    assert not np.allclose(found["norm.bias"], delayed(given, 1, 4)[-1]["norm.bias"], atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_staleness_0_is_synchronous_training(tmp_path: Path, optimizer: str, workers: int) -> None:
    """Uneven shares of seven sequences; clipped; in real time."""
    flags = {"optimizer": optimizer, "clip": 0.3, "batch": 7, "steps": 4}
    do(tmp_path / "a", config(**flags, sync="async", staleness=0), f"dp{workers}")
    do(tmp_path / "b", config(**flags), "dp1")
    assert_close(arrays(tmp_path / "a", 4), arrays(tmp_path / "b", 4), 1e-12)
    told = [[r["loss"], r["tokens"], r["lr"]] for r in steps_of(tmp_path / "a")]
    np.testing.assert_allclose(
        told, [[r["loss"], r["tokens"], r["lr"]] for r in steps_of(tmp_path / "b")], rtol=1e-12
    )
    assert {r["staleness"] for r in steps_of(tmp_path / "a")} == {0.0}


def test_a_run_on_a_virtual_clock_is_replayed_and_goes_on_bitwise(tmp_path: Path) -> None:
    flags = {"sync": "async", "staleness": 2, "worker_times": "1,3,2", "worker_jitter": 0.3}
    whole, again, parts = (tmp_path / name for name in ("whole", "again", "parts"))
    do(whole, config(**flags), "dp3")
    do(again, config(**flags), "dp3")
    do(parts, config(**flags, steps=4), "dp3")
    do(parts, config(**flags), "dp3", parts / "checkpoints" / "step-000004")
    assert_bitwise(arrays(whole, 8), arrays(again, 8))
    assert_bitwise(arrays(whole, 8), arrays(parts, 8))
    other = tmp_path / "other"
    do(other, config(**flags | {"worker_times": "3,1,2"}), "dp3")
    assert not np.array_equal(
        weights(whole, 8)["weights/norm.bias"], weights(other, 8)["weights/norm.bias"]
    )


def test_what_is_told_of_a_step(tmp_path: Path) -> None:
    given = config(sync="async", staleness=1, worker_times="1,4", pull="partial", steps=4)
    do(tmp_path, given, "dp2")
    records = steps_of(tmp_path)
    assert [record["version"] for record in records] == sorted(r["version"] for r in records)
    assert records[-1]["version"] == 8  # two pushes a step
    assert max(record["staleness_max"] for record in records) >= 1
    assert [record["virtual_seconds"] for record in records] == pytest.approx([4, 8, 12, 16])
    assert all(record["tokens"] == 48 for record in records)
    # The fast one is two ahead at 2, and waits until 4, the end of the slow one's first step; then
    # from 5 to 8. It has done its four steps at 9.
    assert [record["wait_seconds"] for record in records] == pytest.approx([2, 3, 0, 0])


def test_a_rate_that_knows_staleness_goes_smaller_steps(tmp_path: Path) -> None:
    flags = {"sync": "async", "staleness": "none", "worker_times": "1,1,1", "steps": 4} | PLAIN
    for name, rate in (("plain", "plain"), ("aware", "aware")):
        do(tmp_path / name, config(**flags, staleness_rate=rate), "dp3")
    plain, aware = (weights(tmp_path / name, 4) for name in ("plain", "aware"))
    start = build.model_of(config(), 256).initialize(0, "float64").parameters()["norm.bias"].array
    moved = [abs(x["weights/norm.bias"] - start).max() for x in (plain, aware)]
    assert 0 < moved[1] < 0.8 * moved[0]
    assert steps_of(tmp_path / "aware")[-1]["lr"] == pytest.approx(1e-2 / 2)


@pytest.mark.parametrize("sync", ["async", "local"])
def test_a_signal_ends_all_ranks_at_one_step_and_saves(tmp_path: Path, sync: str) -> None:
    flags = {"sync_every": 2} if sync == "local" else {}
    run = run_of(tmp_path, config(sync=sync, steps=40, **flags), "dp2")
    run.stop.signal = signal.SIGTERM
    outcomes = run_ranks(2, train, run)
    assert len(set(outcomes)) == 1
    assert outcomes[0].stopped == signal.SIGTERM
    assert 1 <= outcomes[0].steps <= 3
    assert weights(tmp_path, outcomes[0].steps)


@pytest.mark.parametrize("ranks", [2, 3])
def test_local_sgd_that_meets_in_each_step_is_synchronous_training(
    tmp_path: Path, ranks: int
) -> None:
    flags = PLAIN | {"batch": 7, "steps": 4, "weight_decay": 0.1}
    do(tmp_path / "a", config(**flags, sync="local", sync_every=1), f"dp{ranks}")
    do(tmp_path / "b", config(**flags), f"dp{ranks}")
    assert_close(weights(tmp_path / "a", 4), weights(tmp_path / "b", 4))
    one, two = (steps_of(tmp_path / name) for name in ("a", "b"))
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], rel=1e-12)
    assert [r["tokens"] for r in one] == [r["tokens"] for r in two]


def test_diloco_goes_on_bitwise_with_each_ranks_own_moments(tmp_path: Path) -> None:
    flags = {"sync": "local", "sync_every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
    do(tmp_path / "whole", config(**flags), "dp3")
    do(tmp_path / "parts", config(**flags, steps=4), "dp3")
    do(tmp_path / "parts", config(**flags), "dp3",
       tmp_path / "parts" / "checkpoints" / "step-000004")  # fmt: skip
    whole = arrays(tmp_path / "whole", 8)
    assert_bitwise(whole, arrays(tmp_path / "parts", 8))
    assert abs(whole["outer/norm.bias"]).max() > 0
    own = [whole["first/norm.bias"], whole["first@1/norm.bias"], whole["first@2/norm.bias"]]
    assert not np.allclose(own[0], own[1])
    assert not np.allclose(own[1], own[2])


def test_the_outer_step_is_nesterovs(tmp_path: Path) -> None:
    """By hand, for two meetings of ranks that stand still but for a known change."""
    from minitrain.parallel.local_sgd import Outer

    def program(group: Any) -> Any:
        x, velocity = np.zeros(3), np.zeros(3)
        outer, seen = Outer(group, x, velocity, 0.7, 0.9), []
        for _ in range(2):
            x += group.rank + 1.0  # the mean of two ranks goes 1.5 on
            outer.meet()
            seen.append(float(x[0]))
        return seen

    one = 0.7 * (1.5 + 0.9 * 1.5)
    two = one + 0.7 * (1.5 + 0.9 * (0.9 * 1.5 + 1.5))
    assert run_ranks(2, program) == [pytest.approx([one, two])] * 2


@pytest.mark.parametrize(
    ("layout", "section", "words"),
    [
        ("dp2,tp2", SyncSection("async"), "but the layout is dp2,tp2; take dp4"),
        ("shard2", SyncSection("local"), "but the layout is shard2,zero1; take dp2"),
        ("dp3", SyncSection("async", times="1,2"), "2 number(s) for 3 worker(s)"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: str, section: SyncSection, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        check_sync(section, Layout.parse(layout))
    assert words in str(caught.value)
