"""Records: a line each, cut where a run goes on, with costs over all ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from minitrain.comm import Group, run_ranks
from minitrain.nn import GPT, GPTConfig
from minitrain.train.metrics import (
    MetricsFile,
    flops_per_token,
    keep_until,
    over_ranks,
    peak_bytes,
)


def test_records_are_there_as_soon_as_they_are_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.step({"step": 1, "loss": 0.5})
        assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5}
        file.evaluation({"step": 1, "val_loss": 0.25})
        file.saved(tmp_path)
    with MetricsFile(path) as file:
        file.step({"step": 2})
    assert len(path.read_text().splitlines()) == 3


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.step({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    text = path.read_text()
    assert json.loads(text) == {"step": 1, "loss": None, "grad_norm": None, "lr": 1.0}


def test_records_that_will_come_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keep_until(path, 3)
    assert not path.exists()
    lines = [json.dumps({"step": step, "x": "é"}) + "\n" for step in (0, 1, 2, 2, 3, 4)]
    path.write_text("".join(lines) + '{"step": 2, "cut o')
    keep_until(path, 2)
    assert path.read_text() == "".join(lines[:4])
    keep_until(path, 9)
    assert path.read_text() == "".join(lines[:4])


@pytest.mark.parametrize("line", ["", "null", "[]", '{"no": "step"}', '{"step": null}', "{"])
def test_lines_that_are_no_records_are_dropped(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 1}}\n')
    keep_until(path, 1)
    assert path.read_text() == '{"step": 1}\n'


def test_costs_are_the_largest_over_ranks_and_bytes_their_sum() -> None:
    def program(group: Group) -> tuple[dict[str, object], int]:
        with group.ledger() as ledger:
            group.all_reduce(np.ones(600), purpose="gradient")
            group.all_reduce(np.ones(1), purpose="scalar")
        stop = 15 if group.rank == 1 else 0
        ledger.seconds = 0.5 - 0.1 * group.rank  # all that it measured, but as a round number
        return over_ranks(group, 1.0 + group.rank, ledger, stop)

    ranks = run_ranks(3, program)
    record, stop = ranks[0]
    assert stop == 15
    assert record["step_seconds"] == 3.0
    assert record["comm_seconds"] == 0.5
    assert record["comm_bytes_by_purpose"] == {"gradient": 2 * 2 * 4800, "scalar": 4 * 8}
    assert record["comm_bytes"] == 2 * 2 * 4800 + 4 * 8
    assert all(found == ranks[0] for found in ranks)


def test_the_peak_is_that_of_this_process() -> None:
    before = peak_bytes()
    assert 1e7 < before < 1e12
    held = np.ones(8_000_000)
    assert peak_bytes() >= before
    assert peak_bytes() >= held.nbytes


def test_flops_are_six_for_each_weight_of_a_product_and_attentions() -> None:
    config = GPTConfig(vocab=50, context=10, layers=3, heads=2, width=8)
    weights = {name: math.prod(p.declared) for name, p in GPT(config).parameters().items()}
    products = sum(
        size for name, size in weights.items()
        if name.endswith(".weight") and "norm" not in name and "position" not in name
    )  # fmt: skip
    assert flops_per_token(config) == 6 * products + 12 * 3 * 8 * 10
