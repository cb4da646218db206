"""`minitrain eval`: the same number as in training, and for each document its own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, invoke, trained

from minitrain.nn import GPT, GPTConfig
from minitrain.train.checkpoint.weights import save_model
from minitrain.train.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("folder")


def scored(*args: Any) -> dict[str, Any]:
    result = invoke("eval", *args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_held_out_text_scores_as_it_did_in_training(folder: Path, dtype: str) -> None:
    """Also as a file of its own; on two ranks the sums are the same to rounding."""
    outcome = json.loads(trained(*SMALL, "--dtype", dtype, "--json").stdout)
    text = (folder / "text.txt").read_bytes()
    Path("end.txt").write_bytes(text[len(text) - len(text) // 10 :])
    for args in ((), ("runs/0001-nano", "--data", "end.txt")):
        found = scored(*args)
        assert found["nats_per_token"] == outcome["val_loss"]
        assert found["bits_per_byte"] == outcome["val_bits_per_byte"]
        assert found["tokens"] == len(text) // 10 - 1
        assert found["perplexity"] == math.exp(outcome["val_loss"])


def test_a_document_is_a_file_or_a_line_and_the_whole_is_their_sum(folder: Path) -> None:
    trained(*SMALL)
    (folder / "many").mkdir()
    Path("many/one.txt").write_text("It was the best of times. " * 5)
    Path("many/two.jsonl").write_text('{"text": "zq"}\n\n{"text": "x"}\n{"text": "was the"}\n')
    found = scored("--data", "many")
    documents = {each["document"]: each for each in found["documents"]}
    assert list(documents) == ["one.txt", "two.jsonl:1", "two.jsonl:4"]  # "x" predicts nothing
    assert [each["tokens"] for each in found["documents"]] == [129, 1, 6]
    nats = sum(each["nats_per_token"] * each["tokens"] for each in found["documents"])
    assert found["nats_per_token"] == pytest.approx(nats / 136, rel=1e-12)
    Path("alone.txt").write_text("was the")
    alone = scored("--data", "alone.txt")["nats_per_token"]
    assert documents["two.jsonl:4"]["nats_per_token"] == alone
    text = invoke("eval", "--data", "many").stdout
    worst = max(documents.values(), key=lambda each: each["bits_per_byte"])["document"]
    assert text.splitlines()[2].split()[0] == worst
    assert text.splitlines()[-1].split()[:2] == ["all", "136"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--data", "nowhere"), "nowhere cannot be read"),
        (("--data", "short"), "short has no document of two tokens or more"),
        ((), "is of no run, so nothing is held out; give a text with --data"),
    ],
)
def test_what_cannot_be_scored_is_one_line(folder: Path, args: tuple[str], words: str) -> None:
    model = GPT(GPTConfig(vocab=256, context=8, layers=1, heads=1, width=8))
    save_model(model.initialize(seed=3), ByteTokenizer(), folder / "run" / "checkpoints")
    Path("short").write_text("x")
    result = invoke("eval", "run", *args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert words in result.stderr


def test_what_is_held_out_is_told_and_can_be_chosen(folder: Path) -> None:
    (folder / "many").mkdir()
    for name in "abcd":
        Path(f"many/{name}.txt").write_text(
            "It was the best of times. " * (1 if name == "d" else 9)
        )
    small = (*SMALL[:-2], "--data", "many")
    said = trained(*small).stderr
    assert "held out, as the last tenth: the end of c.txt, d.txt\n" in said
    assert "worse than chance" not in said
    Path("other.txt").write_bytes(bytes(range(128, 256)) * 20)
    result = trained(*small, "--val-data", "other.txt", "--run-dir", "b", "--layout", "dp2")
    assert "held out, as" not in result.stderr
    assert "predict it worse than chance does; choose another with --val-data" in result.stderr
    records = [json.loads(line) for line in Path("b/metrics.jsonl").read_text().splitlines()]
    assert records[0]["val_tokens"] == 128 * 20 - 1
    assert "going on" in trained("--resume", "--run-dir", "b", "--steps", 5).stderr
    Path("other.txt").write_bytes(b"else" * 640)
    refused = invoke("train", "--resume", "--run-dir", "b", "--steps", 6)
    assert "is not the text that" in refused.stderr
    ids = invoke("train", "--val-data", "x.bin", "--tokenizer", "ids:300")
    assert "--val-data goes with texts" in ids.stderr
