"""The planner beside published runs: error by set, fitted and held-out apart."""

from __future__ import annotations

import csv
import importlib.resources
import io

import pytest

from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.planner import products, step_time
from minitrain.planner.budget import DAY, Budget, days_of_tokens
from minitrain.planner.clusters import CLUSTERS, cluster
from minitrain.planner.collectives import Ring, measured, ring
from minitrain.planner.layer_time import Training
from minitrain.planner.models import shape_of, table
from minitrain.planner.published import FITTED, SetError, durations, errors, predictions, runs

# Mean absolute errors that hold today. Goals: 8 % fitted, 12 % held out, 20 % BigScience's sweep.
# Above their goal are runs by DeepSpeed (mtnlg, glm130b, ZeRO-3's half of sc21_t2), which are
# slower than Megatron's own by what the planner does not know, mcore_h100 whose micro-batches are
# not published, and the mixed bag of bigruns.
BOUNDS = {
    "sc21_t1": 0.03, "zerobubble_t4": 0.03,
    "megatron2020": 0.07, "mosaic_fsdp": 0.08, "mbridge_h100": 0.06, "bigscience_a100": 0.16,
    "sc21_t2": 0.17, "mcore_h100": 0.16, "bigruns": 0.18, "glm130b": 0.20, "mtnlg": 0.22,
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, SetError]:
    return {error.name: error for error in errors(predictions())}


def test_error_of_each_set(found: dict[str, SetError]) -> None:
    assert set(found) == set(BOUNDS)
    assert {name for name, error in found.items() if error.fitted} == set(FITTED)
    assert list(found)[: len(FITTED)] == list(FITTED)
    for name, error in found.items():
        assert abs(error.bias) <= error.mean <= BOUNDS[name], name
        assert error.mean <= abs(error.worst)


def test_the_fit_is_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fitted constant stands where the two fitted sets want it: a tenth away is worse."""
    here = fitted_error()
    for module, name in ((products, "PRODUCT"), (products, "MEMORY")):
        for factor in (0.9, 1.1):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, factor * getattr(module, name))
                assert fitted_error() > here
    for module, name in ((products, "KERNEL"), (step_time, "EXCHANGE")):
        for factor in (0.0, 3.0):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, factor * getattr(module, name))
                assert fitted_error() > here


def fitted_error() -> float:
    """Mean squares of both fitted sets, as they were minimised."""
    mine = [p for p in predictions() if p.run.set in FITTED]
    gaps = {name: [p.error or 0.0 for p in mine if p.run.set == name] for name in FITTED}
    return sum(sum(e * e for e in gap) / len(gap) for gap in gaps.values())


def test_each_run_is_computed_or_says_why_not() -> None:
    assert len(runs()) == 293
    for prediction in predictions():
        assert (prediction.error is None) == bool(prediction.reason), prediction.run.name
        assert prediction.run["source"]


def test_columns_name_what_nobody_printed() -> None:
    columns = set(runs()[0].cells)
    for run in runs():
        assert set(run["unverified"].split()) <= columns, run.name


def test_tables_ship_with_the_package() -> None:
    folder = importlib.resources.files("minitrain.planner").joinpath("data")
    assert {"runs.csv", "durations.csv", "models.csv", "all_reduce.csv"} <= {
        entry.name for entry in folder.iterdir()
    }
    for name in ("runs.csv", "durations.csv", "models.csv", "all_reduce.csv"):
        text = folder.joinpath(name).read_text("utf-8")
        rows = list(csv.reader(io.StringIO(text)))
        assert len({len(row) for row in rows}) == 1, name
        assert len(table(name)) == len(rows) - 1


def test_durations() -> None:
    """Days that follow from rate and tokens, where a rate, a convention and days are published."""
    checked = 0
    for run in durations():
        if not (run["tflops"] and run["convention"] and run["days"]):
            continue
        count, tokens = run.number("parameters_b") * 1e9, run.number("tokens_b") * 1e9
        budget = Budget.of(count, tokens, run["convention"])
        days = budget.days(int(run["gpus"]), run.number("tflops") * 1e12)
        # The article's 16 days of Yuan 1.0 are 86 % at the printed rate.
        expected = run.number("days") * (0.86 if run.name == "Yuan 1.0" else 1)
        assert days == pytest.approx(expected, rel=0.025), run.name
        checked += 1
    assert checked == 7
    by_name = {run.name: run for run in durations()}
    assert days_of_tokens(1.4e12, 380 * 2048) == pytest.approx(20.8, abs=0.05)
    hours = by_name["BLOOM-176B"].number("gpu_hours")
    assert hours / 384 / 24 == pytest.approx(117.5, abs=0.05)
    llama = Budget.of(405.85e9, 15.6e12)
    assert llama.gpu_hours(400e12) / 30.84e6 == pytest.approx(0.86, abs=0.01)
    assert llama.cost(400e12, 2.0) == pytest.approx(2 * llama.flops / 400e12 / DAY * 24)


@pytest.mark.parametrize(("gpu", "mean"), [("A100", 0.04), ("V100", 0.07)])
def test_all_reduces_against_the_measured(gpu: str, mean: float) -> None:
    start, hop, bandwidths = measured(gpu)
    gaps = []
    for row in (row for row in table("all_reduce.csv") if row["gpu"] == gpu):
        devices = int(row["gpus"])
        mine = Ring(devices, start, hop, bandwidths[devices]).all_reduce(int(row["bytes"]))
        gaps.append(abs(mine / float(row["microseconds"]) * 1e6 - 1))
    assert len(gaps) in (20, 60)
    assert sum(gaps) / len(gaps) < mean
    assert bandwidths[8] / 1e9 == pytest.approx({"A100": 228, "V100": 136}[gpu], rel=0.02)


def test_rings_between_nodes_share_the_ports() -> None:
    machine = CLUSTERS["A100-80"]
    whole, one = ring(machine, 64, 8), ring(machine, 8, 1)
    assert whole.bandwidth == pytest.approx(0.75 * 200e9)
    assert one.bandwidth == pytest.approx(0.75 * 25e9)
    assert ring(machine, 8, 8).all_reduce(2**30) == pytest.approx(8193e-6, rel=0.05)
    assert ring(machine, 1, 8).all_reduce(1e9) == 0.0
    assert one.half(1e9) < one.all_reduce(1e9) < 2 * one.half(1e9)


def test_names_that_are_not_known() -> None:
    with pytest.raises(UserError, match="no cluster is called 'A100-8'; did you mean A100-"):
        cluster("A100-8")
    with pytest.raises(UserError, match="no network is called"):
        cluster("A100-80", "9 × HDR 200")


def test_a_batch_below_one_micro_batch_is_refused() -> None:
    one = Training(shape_of("GPT-2 XL"), Layout(dp=8), 8, 4, 1024)
    with pytest.raises(UserError, match="use a batch of at least 32"):
        step_time.step_time(one, CLUSTERS["A100-80"])
