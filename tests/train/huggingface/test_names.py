"""GPT-2 and Llama against transformers: logits, loss, every gradient by name, and the mapping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig
from minitrain.train.huggingface.config import FamilyError, config_from, config_to
from minitrain.train.huggingface.names import WeightsError, entries, from_theirs, to_theirs

pytest.importorskip("torch", reason="PyTorch runs the peer; pip install 'minitrain[peers]'")
pytest.importorskip("transformers", reason="the peer; pip install 'minitrain[peers]'")
import torch
import transformers
from transformers.models.llama import modeling_llama

CONFIGS: dict[str, GPTConfig | LlamaConfig] = {
    "gpt": GPTConfig(vocab=31, context=12, layers=2, heads=3, width=24),
    # A hidden width equal to the width: no shape tells whether a weight was turned around.
    "gpt-untied": GPTConfig(vocab=17, context=9, layers=1, heads=1, width=8, hidden=8, tied=False),
    "llama": LlamaConfig(vocab=31, context=12, layers=2, heads=4, kv_heads=2, width=24, hidden=20),
    "llama-multiquery": LlamaConfig(
        vocab=19, context=9, layers=1, heads=4, kv_heads=1, width=16, hidden=16, base=500.0
    ),
    "llama-multihead-tied": LlamaConfig(
        vocab=17, context=70, layers=1, heads=2, width=8, epsilon=1e-2, tied=True
    ),
}
# Measured: 1.4e-15 and 8.4e-7.
BOUNDS = {"float64": 1e-12, "float32": 1e-5}


def peer_of(config: GPTConfig | LlamaConfig, dtype: str) -> Any:
    """Their model of our configuration, by way of the config.json, with random weights all over."""
    theirs = config_to(config, dtype)
    theirs |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    family = "GPT2" if isinstance(config, GPTConfig) else "Llama"
    options = {"GPT2": transformers.GPT2Config, "Llama": transformers.LlamaConfig}[family](**theirs)
    options._attn_implementation = "sdpa"  # theirs in eager mode rounds to float32
    with torch.random.fork_rng():
        torch.manual_seed(3)
        peer = getattr(
            transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}"
        )
        model = peer(options).to(getattr(torch, dtype))
        for parameter in model.parameters():  # gains and biases too, so that none hides in 1 or 0
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def filled(config: GPTConfig | LlamaConfig, arrays: dict[str, Any]) -> GPT | Llama:
    model = GPT(config) if isinstance(config, GPTConfig) else Llama(config)
    for name, parameter in model.parameters().items():
        parameter.array = arrays[name]
    return model


def exact_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norm and their angles compute in float32 whatever the model is; make that float64."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + self.variance_epsilon))

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        base = self.config.rope_parameters["rope_theta"]
        width = self.config.head_dim
        powers = torch.arange(0, width, 2, dtype=torch.float64) / width
        freqs = position_ids[:, :, None].double() * base**-powers
        both = torch.cat((freqs, freqs), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles)


def error(ours: Any, reference: Any) -> float:
    """The largest |a - b|, as a share of the largest |b| of the tensor."""
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_every_gradient_equal_transformers(
    config: GPTConfig | LlamaConfig, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "float64":
        exact_llama(monkeypatch)
    peer, bound = peer_of(config, dtype), BOUNDS[dtype]
    state = {name: x.numpy() for name, x in peer.state_dict().items()}
    model = filled(config, from_theirs(config, state, dtype))
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, config.vocab, (3, config.context))
    tokens[1, :2] = 0, config.vocab - 1
    cotangent = rng.normal(size=(*tokens.shape, config.vocab)).astype(dtype)

    logits = model(tokens)
    logits.backward(cotangent)
    expected = peer(torch.from_numpy(tokens)).logits
    expected.backward(torch.from_numpy(cotangent))

    assert logits.array.dtype == dtype
    assert error(logits.array, expected.detach().numpy()) < bound
    theirs = {name: p.grad.numpy() for name, p in peer.named_parameters()}
    ours = to_theirs(config, {name: p.grad for name, p in model.parameters().items()})
    assert set(ours) == set(theirs)
    for name, reference in theirs.items():
        assert error(ours[name], reference) < bound, name
        assert error(np.zeros_like(reference), reference) > bound, name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_config_json_round_trips(config: GPTConfig | LlamaConfig) -> None:
    explicit = config_from(config_to(config, "float32"))
    assert config_to(explicit, "float32") == config_to(config, "float32")
    assert type(explicit) is type(config)
    # And by way of the peer's own reading and writing.
    peer = {GPTConfig: transformers.GPT2Config, LlamaConfig: transformers.LlamaConfig}[type(config)]
    assert config_from(peer(**config_to(config, "float32")).to_dict()) == explicit


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gpt", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("gpt", {"attn_pdrop": 0.2}, "set them equal"),
        ("gpt", {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon = 0.001"),
        ("gpt", {"model_type": "bert"}, "model_type 'bert' is none of gpt2, llama, qwen2, mistral"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ("llama", {"rope_parameters": {"type": "linear", "factor": 2.0}}, "type = 'linear'"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters = \[1\]"),
        ("llama", {"head_dim": 64}, "head_dim = 64, but the models here have 6"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1, .* have 0.0"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor = 2.0"),
        ("llama", {"rope_scaling": {"beta_fast": 32}}, "rope_scaling.beta_fast = 32, which"),
        ("llama", {"sliding_window": 4096}, "sliding_window = 4096, which minitrain doesn't know"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = .*take it out"),
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("gpt", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ("gpt", {"n_ctx": 99}, "n_ctx = 99, but the models here have 12"),
    ],
)
def test_what_our_models_lack_is_refused(family: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(FamilyError, match=words):
        config_from(config_to(CONFIGS[family], "float32") | change)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"num_attention_heads": 0}, "heads must be at least 1, got 0"),
        ("llama", {"num_attention_heads": "4"}, "heads must be a whole number, got '4'"),
        ("llama", {"hidden_size": 24.0}, "width must be a whole number, got 24.0"),
        ("llama", {"rope_theta": 0}, "base must be above 0"),
        ("llama", {"rope_theta": "x"}, "base must be a number, got 'x'"),
        ("llama", {"rope_theta": float("inf")}, "base must be a finite number of at least 0"),
        ("llama", {"rms_norm_eps": None}, "epsilon must be a number, got None"),
        ("llama", {"tie_word_embeddings": "no"}, "tied must be true or false, got 'no'"),
        ("llama", {"intermediate_size": 0}, "hidden must be at least 1, got 0"),
        ("gpt", {"n_positions": None}, "context must be a whole number, got None"),
        ("gpt", {"n_layer": True}, "layers must be a whole number, got True"),
        ("gpt", {"initializer_range": -0.1}, "std must be a finite number of at least 0, got -0.1"),
    ],
)
def test_sizes_that_are_none_are_named(family: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_from(config_to(CONFIGS[family], "float32") | change)


@pytest.mark.parametrize("content", [[1], None, "gpt2"])
def test_a_config_that_is_no_object_is_refused(content: Any) -> None:
    with pytest.raises(FamilyError, match="not an object of names and values"):
        config_from(content)


def test_the_base_of_the_angles_is_found_where_each_version_keeps_it() -> None:
    theirs = config_to(CONFIGS["llama"], "float32")
    del theirs["rope_theta"]
    for change, base in (
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": None, "rope_theta": 5e5}, 5e5),
    ):
        assert config_from(theirs | change).base == base  # type: ignore[union-attr]


def test_a_key_that_lacks_is_named() -> None:
    theirs = config_to(CONFIGS["llama"], "float32")
    del theirs["hidden_size"]
    with pytest.raises(FamilyError, match="lacks the key 'hidden_size'"):
        config_from(theirs)


def random_weights(config: GPTConfig | LlamaConfig) -> dict[str, Any]:
    model = GPT(config) if isinstance(config, GPTConfig) else Llama(config)
    rng = np.random.default_rng(2)
    return {name: rng.normal(size=p.declared) for name, p in model.parameters().items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_mapping_is_a_bijection_onto_contiguous_arrays(config: GPTConfig | LlamaConfig) -> None:
    weights = random_weights(config)
    theirs = to_theirs(config, weights)
    assert all(x.flags.c_contiguous for x in theirs.values())
    assert sum(x.size for x in theirs.values()) == sum(x.size for x in weights.values())
    assert sorted(entry.ours for entry in entries(config)) == sorted(weights)
    back = from_theirs(config, theirs, np.float64)
    assert set(back) == set(weights)
    for name, x in weights.items():
        assert back[name].flags.c_contiguous
        np.testing.assert_array_equal(back[name], x)


def test_a_model_saved_without_its_head_and_with_buffers_is_understood() -> None:
    config = CONFIGS["gpt"]
    weights = random_weights(config)
    bare = {k.removeprefix("transformer."): x for k, x in to_theirs(config, weights).items()}
    bare["h.0.attn.bias"] = np.tri(12)[None, None]
    back = from_theirs(config, bare, np.float64)
    np.testing.assert_array_equal(back["blocks.1.mlp.up.weight"], weights["blocks.1.mlp.up.weight"])
    tied = to_theirs(config, weights)
    tied["lm_head.weight"] = tied["transformer.wte.weight"]
    assert set(from_theirs(config, tied)) == set(weights)


def test_other_names_and_shapes_are_refused() -> None:
    config = CONFIGS["llama"]
    theirs = to_theirs(config, random_weights(config))
    lacking = {name: x for name, x in theirs.items() if name != "lm_head.weight"}
    with pytest.raises(WeightsError, match=r"1 missing \['lm_head.weight'\], 0 that"):
        from_theirs(config, lacking)
    with pytest.raises(WeightsError, match=r"0 missing \[\], 1 that no parameter has \['more'\]"):
        from_theirs(config, theirs | {"more": np.ones(1)})
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(
        WeightsError, match=rf"{name} has the shape \(20, 24\), .* needs \(24, 20\)"
    ):
        from_theirs(config, theirs | {name: theirs[name].T})
