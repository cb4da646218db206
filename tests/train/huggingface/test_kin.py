"""Llama's kin in Hugging Face's layout: Llama 3.1, Qwen2 and Mistral, and what they have beside."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import minitrain as mt
from minitrain.autograd.rotary import frequencies
from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.nn import LlamaConfig
from minitrain.oracle.task import NANO_LLAMA
from minitrain.parallel import placements
from minitrain.planner.models import shape_from
from minitrain.train.huggingface.config import config_from, config_to
from minitrain.train.huggingface.names import from_theirs

SMALL = LlamaConfig(vocab=31, context=40, layers=2, heads=4, kv_heads=2, width=24, hidden=20)
KIN = {
    "qwen2": replace(SMALL, biased=True, tied=True),
    "llama3": replace(SMALL, width=64, stretch=(8.0, 1.0, 4.0, 16.0)),
    "both": replace(SMALL, biased=True, stretch=(4.0, 1.0, 2.0, 12.0), base=100.0),
}
# What the released Llama 3.1 says.
RELEASED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize("name", KIN)
def test_logits_equal_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'minitrain[peers]'")
    torch = pytest.importorskip("torch", reason="pip install 'minitrain[peers]'")
    config = KIN[name]
    theirs = config_to(config, "float32")
    options = transformers.AutoConfig.for_model(**theirs)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        peer = transformers.AutoModelForCausalLM.from_config(options).eval()
        for parameter in peer.parameters():  # biases too, so that none hides in 0
            torch.nn.init.normal_(parameter, std=0.3)
    assert ("bias" in " ".join(peer.state_dict())) == config.biased
    arrays = from_theirs(config, {k: x.numpy() for k, x in peer.state_dict().items()})
    model = mt.nn.Llama(config)
    for key, parameter in model.parameters().items():
        parameter.array = arrays[key]
    tokens = np.random.default_rng(5).integers(0, config.vocab, (3, config.context))
    with torch.no_grad(), mt.no_grad():
        expected = peer(torch.from_numpy(tokens)).logits.numpy()
        found = model(tokens).array
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    assert config_from(options.to_dict()) == config


@pytest.mark.parametrize("layout", ["dp2,tp2,sp", "tp3,sp", "pp2,shard2,zero3"])
def test_every_layout_equals_one_device(layout: str) -> None:
    config = replace(NANO_LLAMA, layers=2, biased=True, stretch=(4.0, 1.0, 2.0, 12.0), base=100.0)
    report = mt.verify(config, layout, steps=2)
    assert report.ok, report.first
    assert any("attention.kv.bias" in row.tensor for row in report.rows)


def test_the_frequencies_of_llama_3_1() -> None:
    """Fast pairs as before, slow ones by the factor, and between them in order."""
    plain, found = (frequencies(128, 5e5, s) for s in (None, (8.0, 1.0, 4.0, 8192.0)))
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(found[turns >= 4], plain[turns >= 4])
    np.testing.assert_allclose(found[turns <= 1], plain[turns <= 1] / 8, rtol=1e-15)
    assert (np.diff(found) < 0).all()
    assert ((turns > 1) & (turns < 4)).any()


def kin(family: str, **more: Any) -> dict[str, Any]:
    theirs = config_to(SMALL, "float32") | {"model_type": family} | more
    own = ("attention_bias", "mlp_bias") if family != "llama" else ()
    return {key: value for key, value in theirs.items() if key not in own}


def test_what_kin_say_is_understood_or_refused() -> None:
    assert config_from(kin("llama", rope_scaling=RELEASED)).stretch == (8.0, 1.0, 4.0, 8192.0)
    assert config_from(kin("mistral", sliding_window=None)) == SMALL
    assert config_from(kin("mistral", sliding_window=16)) == replace(SMALL, context=16)
    assert config_from(kin("qwen2", layer_types=["full_attention"] * 2)).biased
    for wrong, words in (
        (kin("qwen2", use_sliding_window=True), "use_sliding_window"),
        (kin("qwen2", layer_types=["sliding_attention"]), "sliding_attention"),
        (kin("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (kin("llama", rope_scaling={"rope_type": "llama3", "factor": 4.0}), "low_freq_factor"),
        (kin("llama", rope_scaling={**RELEASED, "high_freq_factor": 0.5}), "rising"),
    ):
        with pytest.raises(UserError, match=words):
            config_from(wrong)


@pytest.mark.parametrize("name", KIN)
def test_the_planner_counts_their_biases(name: str) -> None:
    config = KIN[name]
    table = placements(config, Layout())
    assert shape_from(config).parameters == sum(prod(entry.shape) for entry in table.values())
