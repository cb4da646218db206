"""`minitrain train --from`: a run that begins with weights one has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import SMALL, invoke, train, trained

from minitrain.nn import Llama, LlamaConfig
from minitrain.train.data.tokenizer import ByteTokenizer
from minitrain.train.huggingface import pretrained

pytestmark = pytest.mark.usefixtures("folder")
ON = ("--steps", 6, "--warmup", 1, "--lr", 5e-3, "--batch", 8, "--data", "new.txt")


@pytest.fixture(autouse=True)
def new_text(folder: Path) -> None:
    """The text to go on with."""
    (folder / "new.txt").write_bytes(b"It was the age of wisdom, it was the age of fools. " * 45)


def losses(run: str) -> dict[int, float]:
    """Held-out losses by step."""
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return {record["step"]: record["val_loss"] for record in records if "val_loss" in record}


def score(*args: Any) -> float:
    found: dict[str, float] = json.loads(invoke("eval", *args, "--json").stdout)
    return found["nats_per_token"]


@pytest.mark.parametrize("source", ["old", "old/checkpoints/step-000004"])
def test_a_run_begins_where_another_one_ended(folder: Path, source: str) -> None:
    """With a new text, batch, rate and layout; and goes on from its own checkpoint."""
    trained(*SMALL, "--run-dir", "old", "--width", 16)
    result = trained("--from", source, *ON, "--run-dir", "new", "--layout", "dp2,tp2")
    assert "weights and tokenizer from old/checkpoints/step-000004\n" in result.stderr
    text = Path("new.txt").read_bytes()
    Path("end.txt").write_bytes(text[len(text) - len(text) // 10 :])
    before = score("old", "--data", "end.txt")
    assert losses("new")[0] == pytest.approx(before, rel=1e-6)
    assert losses("new")[6] < before - 0.05
    assert "going on" in trained("--resume", "--run-dir", "new", "--steps", 8).stderr


def test_a_folder_of_hugging_face_is_trained_on_and_comes_out_again(folder: Path) -> None:
    """Also what a configuration of ours does not say: hidden sizes, an untied head, a base."""
    sizes = LlamaConfig(vocab=256, context=16, layers=1, heads=2, kv_heads=1, width=16, hidden=24,
                        base=5000.0, tied=False)  # fmt: skip
    model = Llama(sizes)
    pretrained.write(folder / "theirs", model.initialize(seed=3), ByteTokenizer())
    trained("--from", "theirs", *ON, "--run-dir", "new", "--context", 12, "--dtype", "bfloat16",
            "--layout", "shard2,zero3")  # fmt: skip
    assert losses("new")[6] < losses("new")[0] - 0.05
    trained("--resume", "--run-dir", "new", "--steps", 7)
    assert invoke("convert", "new", "out").exit_code == 0
    again, tokenizer = pretrained.read(folder / "out")
    assert again.config == sizes
    assert tokenizer.spec == "byte"
    old, new = (m.parameters()["head.weight"].array for m in (model, again))
    assert 0 < np.abs(new - old).max() < 0.1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--resume",), "--from begins a new run and --resume goes on with one"),
        (("--layers", 3), "model.layers is 1 in old/checkpoints/step-000004 and 3 here"),
        (("--context", 17), "model.context is 16 at most in old"),
        (("--set", "data.tokenizer=bpe:300"), "data.tokenizer is byte in old"),
        (("--run-dir", "old"), "old already holds a run"),
    ],
)
def test_another_model_is_refused(folder: Path, args: tuple[Any, ...], words: str) -> None:
    trained(*SMALL, "--run-dir", "old")
    result = train("--from", "old", *ON, *args)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert words in result.stderr


def test_what_is_no_model_is_refused(folder: Path) -> None:
    result = train("--from", "nowhere", *ON)
    assert result.exit_code == 2
    assert "nowhere is neither a checkpoint nor a run that has one" in result.stderr
