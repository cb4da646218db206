"""The loop: which steps, which records, which checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from small_run import arrays, config, corpus, do, records, run_of, steps_of

from minitrain.comm import run_ranks
from minitrain.train import loop

NAMES = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds",
         "comm_seconds", "comm_bytes", "comm_bytes_by_purpose", "flops_per_second",
         "peak_bytes"}  # fmt: skip


class Listener(list[tuple[str, Any]]):
    """A reporter that remembers."""

    def opened(self, folder: Path) -> None:
        self.append(("opened", folder.name))

    def step(self, record: dict[str, Any]) -> None:
        self.append(("step", record["step"]))

    def evaluation(self, record: dict[str, Any]) -> None:
        self.append(("evaluation", record["step"]))

    def saved(self, path: Path) -> None:
        self.append(("saved", path.name))


def test_steps_evaluations_and_checkpoints_come_when_they_should(tmp_path: Path) -> None:
    run = run_of(tmp_path, config(steps=10, eval_every=4, save_every=3))
    heard = Listener()
    [outcome] = run_ranks(1, loop.train, run, heard)
    assert [entry for entry in heard if entry[0] != "step"] == [
        ("opened", tmp_path.name),
        ("evaluation", 0), ("saved", "step-000003"), ("evaluation", 4), ("saved", "step-000006"),
        ("evaluation", 8), ("saved", "step-000009"), ("evaluation", 10), ("saved", "step-000010"),
    ]  # fmt: skip
    assert [step for kind, step in heard if kind == "step"] == list(range(1, 11))
    assert outcome.steps == 10
    assert outcome.stopped == 0
    last = [record for record in records(tmp_path) if "val_loss" in record][-1]
    assert outcome.val_loss == last["val_loss"]
    assert outcome.loss == steps_of(tmp_path)[-1]["loss"]


@pytest.mark.parametrize(("layout", "size"), [("dp1", 1), ("dp2", 2), ("dp3", 3)])
def test_the_records_say_what_was_done(tmp_path: Path, layout: str, size: int) -> None:
    given = config(steps=4, batch=6, micro_batches=2)
    do(tmp_path, given, layout)
    parameters = sum(x.size for key, x in arrays(tmp_path, 4).items() if key.startswith("weights/"))
    for record in steps_of(tmp_path):
        assert record.keys() >= NAMES
        assert record["tokens"] == 6 * 8
        assert math.isfinite(record["loss"])
        assert 0 < record["loss"] < 10
        assert record["grad_norm"] > 0
        assert record["step_seconds"] > record["comm_seconds"] >= 0
        rate = record["tokens"] / record["step_seconds"]
        assert record["tokens_per_second"] == pytest.approx(rate)
        assert record["flops_per_second"] > 6 * rate * 8 * 256  # at least the head's product
        assert record["peak_bytes"] > 1e6
        purposes = record["comm_bytes_by_purpose"]
        assert record["comm_bytes"] == sum(purposes.values())
        assert purposes.get("gradient", 0) == 2 * (size - 1) * parameters * 8
        assert purposes.keys() == (set() if size == 1 else {"gradient", "scalar"})
    rates = [record["lr"] for record in steps_of(tmp_path)]
    assert rates[:3] == [pytest.approx(1e-2 * k / 3) for k in (1, 2, 3)]
    for record in records(tmp_path):
        if "val_loss" in record:
            assert record["val_tokens"] == len(corpus().held_out) - 1
            bits = record["val_loss"] / math.log(2)
            assert record["val_bits_per_byte"] == pytest.approx(bits)


def test_evaluation_does_not_depend_on_ranks_or_batch(tmp_path: Path) -> None:
    """Cases L2 and B5: 139 held-out tokens in windows of 8, which no layout divides."""
    found = []
    for layout, batch in (("dp1", 1), ("dp1", 6), ("dp3", 6), ("dp4", 4), ("dp5", 10)):
        path = tmp_path / f"{layout}-{batch}"
        do(path, config(steps=1, batch=batch), layout)
        found.append(next(r for r in records(path) if r["step"] == 0))
    assert len({record["val_tokens"] for record in found}) == 1
    for record in found[1:]:
        assert record["val_loss"] == pytest.approx(found[0]["val_loss"], rel=1e-13)


def test_ranks_with_uneven_or_no_samples_make_the_same_steps(tmp_path: Path) -> None:
    """Case L3: 7 sequences on 2 ranks, 1 on 2; the layout is not asked to divide them here."""
    for batch, layout in ((7, "dp2"), (1, "dp2"), (10, "dp3")):
        one, many = tmp_path / f"{batch}-one", tmp_path / f"{batch}-many"
        do(one, config(steps=3, batch=batch))
        do(many, config(steps=3, batch=batch), layout)
        for left, right in zip(steps_of(one), steps_of(many), strict=True):
            assert right["loss"] == pytest.approx(left["loss"], rel=1e-12)
            assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=1e-12)


def test_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    """Case L16: the learning rate goes by updates, however many backwards make one."""
    for micro_batches in (1, 2, 3):
        do(tmp_path / str(micro_batches), config(steps=4, micro_batches=micro_batches), "dp2")
    one = steps_of(tmp_path / "1")
    for other in ("2", "3"):
        for left, right in zip(one, steps_of(tmp_path / other), strict=True):
            assert right["lr"] == left["lr"]
            assert right["loss"] == pytest.approx(left["loss"], rel=1e-12)


def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    """Case L14: what Python holds after 60 steps is what it held after 20, within a kilobyte a
    step for the records that this test itself keeps."""
    import gc
    import tracemalloc

    held = []

    class Watch(Listener):
        def step(self, record: dict[str, Any]) -> None:
            if record["step"] in (20, 60):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])

    run = run_of(tmp_path, config(steps=60, eval_every=10, save_every=25), "dp2")
    tracemalloc.start()
    try:
        run_ranks(2, lambda group: loop.train(group, run, Watch()))
    finally:
        tracemalloc.stop()
    assert held[1] < held[0] * 1.02 + 20_000
