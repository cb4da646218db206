"""Checkpoints: whole or not there, by name, and never read wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_run import arrays, assert_bitwise, config, do, load
from some_checkpoint import about, some

from minitrain.train.checkpoint import files
from minitrain.train.checkpoint.files import match, newest, read, save
from minitrain.train.checkpoint.manifest import CheckpointError, Manifest, read_manifest, step_of
from minitrain.train.checkpoint.weights import load_model


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    path = save(tmp_path, about(), some(), files={"tokenizer.json": "{}"})
    assert path == tmp_path / "step-000010"
    assert_bitwise(load(path), some())
    manifest = read_manifest(path)
    assert (manifest.step, manifest.updates, manifest.layout) == (10, 9, "dp2")
    assert manifest.config == {"run.seed": 3}
    assert (path / "tokenizer.json").read_text() == "{}"
    assert [child.name for child in tmp_path.iterdir()] == ["step-000010"]
    entry = json.loads((path / "manifest.json").read_text())["arrays"]["weights/a"]
    assert entry == {
        "shape": [2, 3],
        "dtype": "float32",
        "pieces": [{"file": "rank-0000.safetensors", "slice": [[0, 2], [0, 3]]}],
    }


def test_arrays_of_any_stride_are_saved_rightly(tmp_path: Path) -> None:
    """safetensors itself writes these wrongly, and says nothing."""
    x = np.arange(24.0).reshape(4, 6)
    held = {"t": x.T, "s": x[::2, 1::2], "r": x[::-1], "b": np.broadcast_to(x[0], (3, 6))}
    assert_bitwise(load(save(tmp_path, about(), held, files={})), held)


def test_half_precision_is_saved(tmp_path: Path) -> None:
    held = {"h": np.array([1.5, -2.0], np.float16)}
    assert_bitwise(load(save(tmp_path, about(), held, files={})), held)


def test_a_checkpoint_may_be_written_again(tmp_path: Path) -> None:
    save(tmp_path, about(), some(1), files={"old": ""})
    path = save(tmp_path, about(), some(2), files={})
    assert_bitwise(load(path), some(2))
    assert not (path / "old").exists()


# Which is the newest (case K8).


def test_the_newest_is_that_of_the_highest_number(tmp_path: Path) -> None:
    folder = tmp_path / "run-2-final" / "checkpoints"
    for step in (900, 1000, 1100, 999_999, 1_000_000):
        save(folder, about(step, 0), some(), files={})
    assert newest(folder) == folder / "step-1000000"
    shutil.rmtree(folder / "step-1000000")
    assert newest(folder) == folder / "step-999999"


def test_what_is_no_whole_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    save(tmp_path, about(10), some(), files={})
    (tmp_path / "step-000020").mkdir()  # no manifest
    (tmp_path / ".step-000030.part").mkdir()
    (tmp_path / ".step-000030.part" / "manifest.json").write_text("{}")
    (tmp_path / "step-000040").write_text("a file")
    (tmp_path / "step-000050.bak").mkdir()
    (tmp_path / "step-000060").symlink_to(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("mine")
    assert newest(tmp_path) == tmp_path / "step-000010"
    assert newest(tmp_path / "nowhere") is None
    save(tmp_path, about(70), some(), files={})
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert step_of(tmp_path / "step-000070") == 70
    with pytest.raises(CheckpointError, match="is not called step-NNNNNN"):
        step_of(tmp_path / "step-7")


def test_a_checkpoint_of_another_model_names_what_differs(tmp_path: Path) -> None:
    path = save(tmp_path, about(), some(), files={})
    shapes = {key: x.shape for key, x in some().items()}
    match(shapes, read_manifest(path), path)
    with pytest.raises(CheckpointError, match=r"weights/a has shape \(2, 3\), not \(3, 2\)"):
        match({**shapes, "weights/a": (3, 2)}, read_manifest(path), path)
    shapes["weights/z"] = shapes.pop("weights/b")
    words = r"it lacks \['weights/z'\] and has \['weights/b'\] beyond it"
    with pytest.raises(CheckpointError, match=words):
        match(shapes, read_manifest(path), path)


def test_pieces_of_several_ranks_make_one_array(tmp_path: Path) -> None:
    x = np.arange(15.0).reshape(5, 3)
    draft = files.Draft(tmp_path, 10)
    draft.begin()
    draft.add(0, {"x": x[:2]})
    draft.add(1, {"x": x[2:]})
    entry = {
        "shape": [5, 3],
        "dtype": "float64",
        "pieces": [
            {"file": "rank-0000.safetensors", "slice": [[0, 2], [0, 3]]},
            {"file": "rank-0001.safetensors", "slice": [[2, 5], [0, 3]]},
        ],
    }
    manifest = Manifest(10, 10, "tp2", {}, "byte", {}, {"x": entry})
    path = draft.finish(manifest, {})
    np.testing.assert_array_equal(read(path, manifest, "x"), x)


# What a run keeps.


def test_a_tied_table_is_kept_once_and_shared_again(tmp_path: Path) -> None:
    """Case K7."""
    do(tmp_path, config(steps=3))
    held = arrays(tmp_path, 3)
    assert "weights/embedding.token.weight" in held
    assert not any("head" in key for key in held)
    model, tokenizer = load_model(tmp_path / "checkpoints" / "step-000003")
    assert model.head.weight is model.parameters()["embedding.token.weight"]
    assert tokenizer.vocab == 256
    assert_bitwise(
        {f"weights/{name}": p.array for name, p in model.parameters().items()},
        {key: x for key, x in held.items() if key.startswith("weights/")},
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_are_kept_in_their_own_precision(tmp_path: Path, dtype: str) -> None:
    do(tmp_path, config(steps=1, dtype=dtype))
    assert {x.dtype.name for x in arrays(tmp_path, 1).values()} == {dtype}


def test_a_checkpoint_does_not_depend_on_the_ranks_that_wrote_it(tmp_path: Path) -> None:
    """Replicas hold the same, so one writes: the same files from any number of ranks."""
    found = []
    for layout in ("dp1", "dp2", "dp3"):
        do(tmp_path / layout, config(steps=1), layout)
        path = tmp_path / layout / "checkpoints" / "step-000001"
        found.append(sorted(child.name for child in path.iterdir()))
    assert found == [["manifest.json", "rank-0000.safetensors"]] * 3
