"""`minitrain convert`: to Hugging Face's layout and back, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from minitrain.nn import Llama, LlamaConfig
from minitrain.train.checkpoint.weights import load_model, save_model
from minitrain.train.data.tokenizer import ByteTokenizer, IdTokenizer
from minitrain.train.huggingface import pretrained
from minitrain_cli.main import main


def invoke(*args: Any) -> Result:
    return CliRunner().invoke(main, list(map(str, args)))


def test_there_and_back_again(tmp_path: Path) -> None:
    config = LlamaConfig(vocab=256, context=8, layers=1, heads=2, kv_heads=1, width=8, hidden=12)
    model = Llama(config)
    model.initialize(seed=1)
    step = save_model(model, ByteTokenizer(), tmp_path / "run" / "checkpoints")

    result = invoke("convert", tmp_path / "run", tmp_path / "theirs")
    assert result.exit_code == 0, result.output
    assert "llama of 4,600 float32 parameters, tokenizer byte" in result.stdout
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    result = invoke("convert", tmp_path / "theirs", tmp_path / "back", "--json")
    assert json.loads(result.stdout) == {
        "target": str(tmp_path / "back"),
        "family": "llama",
        "parameters": 4600,
        "dtype": "float32",
        "tokenizer": "byte",
    }

    again, tokenizer = load_model(tmp_path / "back" / "checkpoints" / step.name)
    assert (again.config, tokenizer.spec) == (config, "byte")
    for name, parameter in model.parameters().items():
        np.testing.assert_array_equal(again.parameters()[name].array, parameter.array)
    texts = [invoke("generate", tmp_path / name, "--json").stdout for name in ("run", "back")]
    ids = [json.loads(text)["ids"] for text in texts]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "nowhere is neither a checkpoint nor a run that has one"),
        ("bert", "model_type 'bert' is none of gpt2, llama, qwen2, mistral"),
        ("broken", "broken does not hold a whole model"),
        ("list", "config.json holds [1], not an object of names and values"),
        (
            "latin",
            "latin does not hold a whole model: config.json: 'utf-8' codec can't decode byte 0xff",
        ),
        ("x" * 300, "File name too long"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(
    source: str, words: str, tmp_path: Path
) -> None:
    configs = {"bert": b'{"model_type": "bert"}', "broken": b"{", "list": b"[1]", "latin": b"\xff"}
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(text)
    result = invoke("convert", tmp_path / source, tmp_path / "new")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A folder with a run in ours and the same model in Hugging Face's layout."""
    model = Llama(LlamaConfig(vocab=9, context=8, layers=1, heads=2, width=8))
    model.initialize(seed=1)
    save_model(model, IdTokenizer(9), tmp_path / "ours" / "checkpoints")
    pretrained.write(tmp_path / "theirs", model, IdTokenizer(9))
    return tmp_path


@pytest.mark.parametrize("source", ["ours", "theirs"])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("theirs", "already exists; take another folder, or remove it"),
        ("theirs/config.json", "already exists; take another folder"),
        ("theirs/config.json/new", "Not a directory; take another folder"),
        ("ours/" + "x" * 300, "File name too long; take another folder"),
    ],
)
def test_a_target_that_cannot_be_is_refused(
    source: str, target: str, words: str, folders: Path
) -> None:
    before = sorted(folders.rglob("*"))
    result = invoke("convert", folders / source, folders / target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(folders.rglob("*")) == before


@pytest.mark.parametrize("source", ["ours", "theirs"])
@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError, os._exit])
def test_an_interrupted_conversion_leaves_nothing_in_the_way(
    source: str, how: Any, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """os._exit stands for a kill: nothing is tidied up, but the next attempt finds its way."""
    writers = {
        "ours": "minitrain.train.huggingface.pretrained",
        "theirs": "minitrain.train.checkpoint.files",
    }

    def stop(arrays: Any, path: Path, *rest: Any) -> None:
        path.write_bytes(b"half")
        if how is os._exit:
            monkeypatch.setattr("shutil.rmtree", lambda *a, **k: None)
            raise KeyboardInterrupt
        raise how("no more")

    with monkeypatch.context() as patch:
        patch.setattr(f"{writers[source]}.save_file", stop)
        result = invoke("convert", folders / source, folders / "new")
    monkeypatch.undo()
    assert result.exit_code != 0
    assert not (folders / "new").exists()
    assert len(list(folders.glob(".new.part"))) == (how is os._exit)
    result = invoke("convert", folders / source, folders / "new")
    assert result.exit_code == 0, result.output
    assert {path.name for path in folders.iterdir()} == {"ours", "theirs", "new"}
    files = [path.name for path in (folders / "new").rglob("*") if path.is_file()]
    assert len(files) == {"ours": 2, "theirs": 3}[source]  # with what goes back
    assert any((folders / "new").rglob("*.safetensors"))


@pytest.mark.parametrize("places", [[1], "x", None, {"norm.weight": None}])
def test_an_index_without_places_is_refused(places: Any, folders: Path) -> None:
    (folders / "theirs" / "model.safetensors").unlink()
    index = folders / "theirs" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    result = invoke("convert", folders / "theirs", folders / "new")
    assert result.exit_code == 2
    assert "has no weight_map of names and their files" in result.stderr
