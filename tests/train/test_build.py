"""A configuration made real: every option that can be set changes what a run does."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
from small_run import arrays, config, records

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn.layers import Linear
from minitrain.optim import SGD, AdamW
from minitrain.train import synchronised
from minitrain.train.build import model_of, optimizer_of, schedule_of, stepper_of
from minitrain.train.checkpoint.files import Draft
from minitrain.train.config.sections import OPTIONS, RunConfig
from minitrain.train.data.text import Corpus
from minitrain.train.folder import RunFolder
from minitrain.train.loop import train
from minitrain.train.resume import FREE
from minitrain.train.run import Run

# Another value for each option, and what must be set beside it for the option to matter. A new
# option needs a line here, and with it a proof that something reads it.
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "model.family": ("llama", {"dropout": 0.0}),
    "model.layers": (2, {}),
    "model.heads": (1, {}),
    "model.kv_heads": (1, {"family": "llama", "dropout": 0.0}),
    "model.width": (12, {}),
    "model.context": (4, {}),
    "model.dropout": (0.4, {}),
    "mixture.experts": (4, {}),
    "mixture.top_k": (1, {"experts": 4}),
    "mixture.every": (2, {"experts": 4, "layers": 2}),
    "mixture.hidden": (3, {"experts": 4}),
    "mixture.shared": (1, {"experts": 4}),
    "mixture.scores": ("sigmoid", {"experts": 4}),
    "mixture.gates": ("raw", {"experts": 4}),
    "mixture.capacity": (0.5, {"experts": 4}),
    "mixture.scope": ("sequence", {"experts": 4}),
    "mixture.balance": (0.5, {"experts": 4}),
    "mixture.z_loss": (0.5, {"experts": 4}),
    "mixture.bias_rate": (0.5, {"experts": 4}),
    "data.path": ("two.txt", {}),
    "data.tokenizer": ("one.json", {}),
    "data.val_path": ("two.txt", {}),
    "data.batch": (4, {}),
    "data.micro_batches": (2, {}),
    "loss.smoothing": (0.2, {}),
    "loss.z_loss": (0.1, {}),
    "optimizer.name": ("sgd", {}),
    "optimizer.lr": (2e-2, {}),
    "optimizer.min_lr": (2e-3, {"warmup": 1}),
    "optimizer.warmup": (2, {}),
    "optimizer.schedule": ("constant", {"warmup": 1}),
    "optimizer.beta1": (0.5, {}),
    "optimizer.beta2": (0.5, {}),
    "optimizer.epsilon": (1e-3, {}),
    "optimizer.momentum": (0.5, {"optimizer": "sgd"}),
    "optimizer.weight_decay": (0.3, {}),
    "optimizer.clip": (1e-3, {}),
    "optimizer.frozen": ("embedding.*", {}),
    "run.stages": ("1,1", {"layers": 2}),
    "run.steps": (4, {}),
    "run.seed": (1, {}),
    "run.dtype": ("float32", {}),
    "run.recompute": ("full", {}),
    "run.eval_every": (1, {}),
    "run.save_every": (1, {}),
    "run.sample_every": (2, {}),
    "run.saving": ("background", {}),
    "run.keep": (1, {}),
    "run.check_replicas": (1, {}),
}
TIMES = {"tokens_per_second", "flops_per_second", "step_seconds", "comm_seconds", "peak_bytes"}
TIMES |= {"val_seconds"}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts and a tokenizer, in which the test then works."""
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_bytes(bytes(i * i % 91 + 32 for i in range(900)))
    Path("two.txt").write_bytes(bytes(i * i % 89 + 32 for i in range(900)))
    return tmp_path


def effect(
    given: RunConfig, name: str, monkeypatch: pytest.MonkeyPatch, layout: str = "dp1"
) -> tuple[Any, ...]:
    """All that a run leaves behind but times: checkpoints, records, and the work it did."""
    calls: list[tuple[str, str]] = []
    forward, finish, check = Linear.forward, Draft.finish, synchronised.check_replicas

    def counted(linear: Linear, *args: Any) -> Any:
        calls.append((threading.current_thread().name, linear.path))  # by rank
        return forward(linear, *args)

    def finished(draft: Draft, *args: Any) -> Path:
        calls.append(("saved by", threading.current_thread().name.partition("-")[0]))
        return finish(draft, *args)

    def checked(*args: Any) -> None:
        calls.append(("replicas", "checked"))
        check(*args)

    data = given.data
    corpus = Corpus.load(data.path, given.model.context, data.tokenizer, held_out=data.val_path)
    run = Run(given, Layout.parse(layout), corpus, RunFolder(Path(name)), None)
    with monkeypatch.context() as patch:
        patch.setattr(Linear, "forward", counted)
        patch.setattr(Draft, "finish", finished)
        patch.setattr(synchronised, "check_replicas", checked)
        run_ranks(run.layout.size, train, run)
    lines = [{k: v for k, v in r.items() if k not in TIMES} for r in records(Path(name))]
    steps = sorted(path.name for path in run.folder.checkpoints.iterdir())
    bits = hashlib.sha256()
    for key, x in arrays(Path(name), given.run.steps).items():
        bits.update(key.encode() + x.tobytes())
    return bits.hexdigest(), lines, steps, sorted(calls)


@pytest.mark.parametrize("key", OTHER)
def test_every_option_changes_what_a_run_does(
    key: str, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, beside = OTHER[key]
    if key == "data.tokenizer":
        pytest.importorskip("tokenizers")
        other = "bpe:260"
    flags = {"steps": 3, "data": "one.txt", **beside}
    base, changed = config(**flags), config(**{**flags, OPTIONS[key].flag: other})
    assert changed.value(OPTIONS[key]) == other
    layout = "pp2" if key == "run.stages" else "dp1"
    first = effect(base, "base", monkeypatch, layout)
    assert first != effect(changed, "changed", monkeypatch, layout)


def test_a_run_is_what_its_configuration_says_and_nothing_else(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would pass if runs differed by themselves."""
    given = config(steps=3, data="one.txt")
    assert effect(given, "a", monkeypatch) == effect(given, "b", monkeypatch)


def test_every_option_is_either_free_or_kept() -> None:
    assert set(FREE) <= set(OPTIONS)
    auto = {"run.times", "run.memory", "run.instructions"}  # what they do: test_found_schedule.py
    sync = {key for key in OPTIONS if key.startswith("sync.")}  # the same: test_async.py
    apart = {"data.documents"}  # what it does: data/test_documents.py
    assert {*OTHER, "run.stages"} | auto | sync | apart == set(OPTIONS)


def test_stages_say_which_rank_has_which_blocks() -> None:
    """An option that changes no number, only where it is computed."""

    def rank(group: Group, stages: str) -> set[str]:
        given = config(layers=4, stages=stages)
        model = stepper_of(given, Layout(pp=2), group, vocab=9).model
        return {name.split(".")[1] for name in model.parameters if name.startswith("blocks.")}

    assert run_ranks(2, rank, "3,1") == [{"0", "1", "2"}, {"3"}]
    assert run_ranks(2, rank, "0, 4") == [set(), {"0", "1", "2", "3"}]


def test_parts_are_made_of_their_options() -> None:
    given = config(optimizer="sgd", momentum=0.25, weight_decay=0.5, lr=0.5, warmup=2, min_lr=0.125)
    assert optimizer_of(given.optimizer) == SGD(momentum=0.25, decay=0.5)
    given = config(beta1=0.5, beta2=0.75, epsilon=0.125, weight_decay=0.25)
    assert optimizer_of(given.optimizer) == AdamW(0.5, 0.75, 0.125, 0.25)
    rates = [schedule_of(config(lr=0.5, warmup=2, min_lr=0.125)).rate(k) for k in (1, 2, 20, 99)]
    assert rates == [0.25, 0.5, 0.125, 0.125]
    given = config(lr=0.1, warmup=2, schedule="constant")
    assert [schedule_of(given).rate(k) for k in (1, 2, 3, 20, 99)] == [0.05, 0.1, 0.1, 0.1, 0.1]
    sizes = model_of(config(layers=3, heads=4, width=16, context=5), vocab=77).config
    assert (sizes.vocab, sizes.layers, sizes.heads, sizes.width, sizes.context) == (77, 3, 4, 16, 5)
