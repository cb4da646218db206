"""A checkpoint that was cut off or edited is refused in a line, and never read wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_run import Arrays, assert_bitwise, load
from some_checkpoint import about, some

from minitrain.train.checkpoint.files import match, save
from minitrain.train.checkpoint.manifest import CheckpointError, read_manifest


def broken_by(name: str, path: Path) -> None:
    data, manifest = path / "rank-0000.safetensors", path / "manifest.json"
    tree = json.loads(manifest.read_text())
    entry = tree["arrays"]["weights/b"]
    edits: dict[str, Any] = {
        "cut off": lambda: data.write_bytes(data.read_bytes()[:-9]),
        "empty file": lambda: data.write_bytes(b""),
        "file gone": data.unlink,
        "manifest gone": manifest.unlink,
        "manifest cut": lambda: manifest.write_bytes(manifest.read_bytes()[:-40]),
        "manifest a list": lambda: manifest.write_text("[]"),
        "manifest a number": lambda: manifest.write_text("3"),
        "not UTF-8": lambda: manifest.write_bytes(b"\xff"),
        "unknown key": lambda: tree.update(extra=1),
        "key gone": lambda: tree.pop("updates"),
        "arrays a list": lambda: tree.update(arrays=[]),
        "more updates than steps": lambda: tree.update(updates=11),
        "step a text": lambda: tree.update(step="ten"),
        "another step": lambda: tree.update(step=20),
        "another shape": lambda: entry.update(shape=[5]),
        "a negative shape": lambda: entry.update(shape=[-4]),
        "a vast shape": lambda: entry.update(shape=[1 << 60]),
        "shape a text": lambda: entry.update(shape="4"),
        "no shape": lambda: entry.pop("shape"),
        "another dtype": lambda: entry.update(dtype="float32"),
        "no dtype at all": lambda: entry.update(dtype="real"),
        "no pieces": lambda: entry.update(pieces=[]),
        "half a piece": lambda: entry["pieces"][0].update(slice=[[0, 2]]),
        "slice of one": lambda: entry["pieces"][0].update(slice=[[0, 1]]),
        "slice of two axes": lambda: entry["pieces"][0].update(slice=[[0, 4], [0, 4]]),
        "another file": lambda: entry["pieces"][0].update(file="rank-0001.safetensors"),
        "array not in the file": lambda: tree["arrays"].update({"weights/c": entry}),
    }
    edits[name]()
    if tree != json.loads(path.joinpath("manifest.json").read_text() if "manifest" not in name
                          and name != "not UTF-8" else json.dumps(tree)):  # fmt: skip
        manifest.write_text(json.dumps(tree))


def without_checksums(path: Path) -> None:
    """As checkpoints were before there were any: each of the other checks is on its own."""
    tree = json.loads((path / "manifest.json").read_text())
    del tree["checksums"]
    (path / "manifest.json").write_text(json.dumps(tree))


def load_all(path: Path, held: Arrays) -> None:
    found = load(path)
    match({key: x.shape for key, x in held.items()}, read_manifest(path), path)
    assert_bitwise(found, held)


@pytest.mark.parametrize(
    "name",
    [
        *("cut off", "empty file", "file gone", "manifest gone", "manifest cut"),
        *("manifest a list", "manifest a number", "not UTF-8", "unknown key", "key gone"),
        *("arrays a list", "more updates than steps", "step a text", "another step"),
        *("another shape", "a negative shape", "a vast shape", "shape a text", "no shape"),
        *("another dtype", "no dtype at all", "no pieces", "half a piece", "slice of one"),
        *("slice of two axes", "another file", "array not in the file"),
    ],
)
def test_a_broken_checkpoint_is_refused_in_a_line_and_never_read_wrongly(
    tmp_path: Path, name: str
) -> None:
    held = {key: x for key, x in some().items() if key.startswith("weights")}
    path = save(tmp_path, about(), held, files={})
    without_checksums(path)
    broken_by(name, path)
    with pytest.raises(CheckpointError) as caught:
        load_all(path, held)
    message = str(caught.value)
    assert message.startswith(f"{path} is not a whole checkpoint: ")
    assert "\n" not in message
