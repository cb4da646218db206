"""`minitrain convert`: to Hugging Face's layout and back, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from minitrain.nn import Llama, LlamaConfig
from minitrain.train.build import load_model, save_model
from minitrain.train.tokenizer import ByteTokenizer
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
        ("nowhere", "nowhere is no checkpoint, and no run that has one"),
        ("bert", "model_type 'bert' is none of gpt2 and llama"),
        ("broken", "broken holds no whole model"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(
    source: str, words: str, tmp_path: Path
) -> None:
    for name, text in (("bert", '{"model_type": "bert"}'), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    result = invoke("convert", tmp_path / source, tmp_path / "new")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()
