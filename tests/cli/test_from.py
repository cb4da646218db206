"""`minitrain train --from`: a run that begins with weights one has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import SMALL, invoke, train, trained

from minitrain.nn import Llama, LlamaConfig
from minitrain.train.data.text import Corpus
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


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "mistral"])
def test_fine_tuning_begins_with_the_loss_of_transformers_and_goes_back_there(
    folder: Path, family: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'minitrain[peers]'")
    torch = pytest.importorskip("torch", reason="pip install 'minitrain[peers]'")
    torch.manual_seed(3)
    own = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    others = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 40,
              "max_position_embeddings": 16}  # fmt: skip
    sizes = own if family == "gpt2" else others
    if family == "mistral":
        sizes = {**sizes, "sliding_window": None}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=256, bos_token_id=1, eos_token_id=2, **sizes
    )
    peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    peer.save_pretrained("theirs")
    trained("--from", "theirs", *ON, "--run-dir", "new", "--layout", "dp2")
    corpus = Corpus.load(str(folder / "new.txt"), 16, ByteTokenizer())
    nats, count = 0.0, 0
    for batch in corpus.evaluation(16, 8):
        with torch.no_grad():
            logits = peer(torch.from_numpy(batch.tokens)).logits.flatten(0, 1)
        labels = torch.from_numpy(batch.labels).flatten()
        nats += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += batch.valid
    found = losses("new")
    assert found[0] == pytest.approx(nats / count, abs=1e-5)
    assert found[6] < found[0] - 0.05
    assert invoke("convert", "new", "out").exit_code == 0
    again = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    assert (again.config.bos_token_id, again.config.eos_token_id) == (1, 2)
    assert again.config.model_type == family
    assert again(torch.zeros(1, 16, dtype=torch.int64)).logits.shape == (1, 16, 256)
