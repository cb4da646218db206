"""What one layout saved, any other goes on with: whole, cut flat, owned, or cut into tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import arrays, assert_bitwise, config, corpus, do, load, steps_of

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.train import build
from minitrain.train.checkpoint import state
from minitrain.train.config.option import ConfigError
from minitrain.train.config.sections import RunConfig
from minitrain.train.folder import RunFolder
from minitrain.train.resume import resumed

LAYOUTS = ["dp2", "shard2,zero1", "shard2,zero2", "shard2,zero3", "shard2,zero2,owner", "tp2"]
LAYOUTS += ["dp2,shard2,zero3,tp2,sp", "pp2,zb-h1", "cp2", "dp2,pp2,tp2,sp", "cp2,tp2"]
LAYOUTS += ["dp2,cp2,shard2,zero2"]
START, END = 3, 6


def read_and_written(given: RunConfig, layout: str, start: Path, folder: Path) -> dict[str, Any]:
    """What a layout saves of a checkpoint that it has read, and done nothing with."""

    def program(group: Group) -> Path | None:
        where, text = Layout.parse(layout), corpus()
        stepper = build.stepper_of(given, where, group, text.tokenizer.vocab)
        done = state.resume(stepper, start)
        return state.save(stepper, folder, done, given, text)

    path = run_ranks(Layout.parse(layout).size, program)[0]
    assert path is not None
    return load(path)


class Runs(dict[str, Path]):
    """A run of six steps on each layout that is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __missing__(self, layout: str) -> Path:
        given = config(steps=END, save_every=START, epsilon=1e-2, micro_batches=2, batch=8)
        do(self.folder / layout, given, layout)
        self[layout] = self.folder / layout
        return self[layout]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """See `Runs`."""
    return Runs(tmp_path_factory.mktemp("runs"))


def pairs() -> Iterator[Any]:
    """All pairs of layouts, 12 × 12; quick are those of each with itself and with the next."""
    for i, before in enumerate(LAYOUTS):
        for after in LAYOUTS:
            near = after in (before, LAYOUTS[(i + 1) % len(LAYOUTS)])
            yield pytest.param(before, after, marks=() if near else pytest.mark.deep)


@pytest.mark.parametrize(("before", "after"), list(pairs()))
def test_any_layout_goes_on_with_what_any_other_saved(
    before: str, after: str, runs: Runs, tmp_path: Path
) -> None:
    """Bitwise as it is read, and to rounding three steps later."""
    start = runs[before] / "checkpoints" / f"step-{START:06d}"
    given = config(steps=END, save_every=START, epsilon=1e-2, micro_batches=2, batch=8)
    assert_bitwise(read_and_written(given, after, start, tmp_path / "copy"), load(start))
    do(tmp_path / "on", given, after, start)
    found, expected = arrays(tmp_path / "on", END), arrays(runs[before], END)
    if before == after:
        assert_bitwise(found, expected)
    for key, x in expected.items():
        assert np.abs(found[key] - x).max() <= 1e-12 * max(np.abs(x).max(), 1e-2), key
    losses = [record["loss"] for record in steps_of(tmp_path / "on")]
    right = [record["loss"] for record in steps_of(runs[before])[START:]]
    np.testing.assert_allclose(losses, right, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_masters_are_saved_and_read_by_every_stage(dtype: str, tmp_path: Path) -> None:
    """Not the halves that live: float32 weights come back with every bit, whatever the layout."""
    given = config(dtype=dtype, steps=START, save_every=START, batch=8)
    for before in ("dp2", "shard2,zero1", "shard2,zero2,owner", "shard2,zero3"):
        do(tmp_path / before, given, before)
        start = tmp_path / before / "checkpoints" / f"step-{START:06d}"
        saved = load(start)
        assert saved["weights/embedding.token.weight"].dtype == np.float32
        for after in LAYOUTS:
            again = read_and_written(given, after, start, tmp_path / before / after)
            assert_bitwise(again, saved)


@pytest.mark.parametrize("layout", ["dp2", "shard2,zero2", "shard2,zero3"])
def test_a_run_with_frozen_parameters_goes_on(layout: str, tmp_path: Path) -> None:
    """They are in the checkpoint, without moments, as they were at first."""
    given = config(steps=END, save_every=START, batch=8, freeze="embedding.*, *.bias")
    do(tmp_path / "whole", given, layout)
    start = tmp_path / "whole" / "checkpoints" / f"step-{START:06d}"
    do(tmp_path / "on", given, layout, start)
    found = arrays(tmp_path / "on", END)
    assert_bitwise(found, arrays(tmp_path / "whole", END))
    initial = build.model_of(given, 256).initialize(0, "float64").parameters()
    for name, parameter in initial.items():
        frozen = name.startswith("embedding.") or name.endswith(".bias")
        assert np.array_equal(found[f"weights/{name}"], parameter.array) == frozen
        assert (f"first/{name}" in found) != frozen
    with pytest.raises(ConfigError, match=r"optimizer\.frozen is embedding"):
        resumed(RunFolder(tmp_path / "whole"), (), {"freeze": "none", "steps": "9"})
