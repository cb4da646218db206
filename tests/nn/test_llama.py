"""What makes a Llama one, without a peer: names and shapes, relative positions, shared heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minitrain.autograd.tensor import Tensor
from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig
from minitrain.nn.config import from_values, to_values
from minitrain.nn.families import declare

CONFIG = LlamaConfig(vocab=11, context=16, layers=1, heads=4, kv_heads=2, width=24, hidden=20)
TOKENS = np.random.default_rng(2).integers(0, 11, (2, 9))


def loud(config: LlamaConfig) -> Llama:
    """Weights large enough that every position matters in the logits."""
    model, rng = Llama(config), np.random.default_rng(1)
    for parameter in model.parameters().values():
        parameter.array = rng.normal(0, 0.5, parameter.declared)
    return model


def test_the_parameters_have_these_names_and_shapes() -> None:
    """Those that checkpoints and placements rely on; heads and halves are axes."""
    assert {name: p.declared for name, p in Llama(CONFIG).parameters().items()} == {
        "embedding.token.weight": (11, 24),
        "blocks.0.attention_norm.weight": (24,),
        "blocks.0.attention.q.weight": (24, 4, 6),
        "blocks.0.attention.kv.weight": (24, 2, 2, 6),
        "blocks.0.attention.out.weight": (4, 6, 24),
        "blocks.0.mlp_norm.weight": (24,),
        "blocks.0.mlp.gate_up.weight": (24, 2, 20),
        "blocks.0.mlp.down.weight": (20, 24),
        "norm.weight": (24,),
        "head.weight": (11, 24),
    }
    assert "head.weight" not in Llama(LlamaConfig(tied=True)).parameters()


def test_only_distances_between_positions_count() -> None:
    model = loud(CONFIG)
    here = model(TOKENS).array
    far = model(TOKENS, np.arange(9) + 1000).array
    stretched = model(TOKENS, 2 * np.arange(9)).array
    np.testing.assert_allclose(far, here, rtol=0, atol=1e-11)
    assert np.abs(stretched - here).max() > 1e-2


def test_no_token_sees_a_later_one() -> None:
    model = loud(CONFIG)
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    moved = np.abs(model(changed).array - model(TOKENS).array).max(axis=(0, 2))
    assert (moved[:5] == 0).all()
    assert (moved[5:] > 1e-3).all()


def test_grouped_heads_are_plain_heads_with_copied_keys_and_values() -> None:
    grouped = loud(CONFIG)
    plain = Llama(LlamaConfig(**{**to_sizes(CONFIG), "kv_heads": None}))
    for name, parameter in plain.parameters().items():
        x = grouped.parameters()[name].array
        parameter.array = np.repeat(x, 2, axis=2) if name.endswith("kv.weight") else x
    np.testing.assert_allclose(plain(TOKENS).array, grouped(TOKENS).array, rtol=0, atol=1e-12)


def to_sizes(config: LlamaConfig) -> dict[str, Any]:
    values = to_values(config)
    assert values.pop("family") == "llama"
    return values


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"width": 20, "heads": 4}, "width 20 does not give 4 heads an even .* multiple of 8"),
        ({"heads": 4, "kv_heads": 3}, "4 heads cannot share 3 key/value heads evenly"),
        ({"heads": 4, "kv_heads": 0}, "kv_heads must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LlamaConfig(**sizes)


@pytest.mark.parametrize("dropout", [1, 1.5])
def test_a_gpt_that_drops_everything_is_refused(dropout: float) -> None:
    with pytest.raises(ValueError, match=f"GPT: dropout must be below 1, got {dropout}"):
        GPTConfig(dropout=dropout)


@pytest.mark.parametrize(
    "tokens", [[[1, 2]], np.array([1, 2]), np.array(1), "12", Tensor(np.array([[1]]))]
)
def test_tokens_that_are_no_batch_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"token ids of shape \(B, T\), .* not "):
        Llama(CONFIG).initialize(0)(tokens)


def test_families_go_to_plain_values_and_back() -> None:
    for config, kind in ((CONFIG, Llama), (GPTConfig(dropout=0.5, tied=False), GPT)):
        again = from_values(to_values(config))
        assert again == config
        assert type(declare(again)) is kind
    with pytest.raises(ValueError, match="family 'bert' is none of gpt, llama"):
        from_values({"family": "bert"})
    with pytest.raises(ValueError, match="unexpected keyword argument 'kv_heads'"):
        from_values({"family": "gpt", "kv_heads": 2})
