"""Hugging Face's config.json of GPT-2, and of Llama and its kin, to our configurations and back.

Every key is used, or fixed to what our models compute, or has no part in the logits and is kept for
the way back; any other is refused by name: a model that is nearly the right one computes something
else.
"""

from __future__ import annotations

from typing import Any

from minitrain.nn.config import Config, GPTConfig, LlamaConfig
from minitrain.train.huggingface.keys import FamilyError, check, check_known
from minitrain.train.huggingface.rope import rope as rope_of
from minitrain.train.huggingface.rope import stretch as stretch_of
from minitrain.train.huggingface.rope import stretch_to

# Keys whose value our models fix: name -> the values that mean the same, the default first.
_GPT_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
}
_LLAMA_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
}
# What Llama's kin have beside; Qwen2 has biases in attention without a key that says so.
_KIN_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"use_sliding_window": (False,)},
    "mistral": {},
}
_KIN_KNOWN = {
    "llama": (),
    "qwen2": ("sliding_window", "max_window_layers", "layer_types"),
    "mistral": ("sliding_window",),
}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Keys that are used, and those that have no part in the logits.
_GPT_KNOWN = (
    *("vocab_size", "n_positions", "n_ctx", "n_layer", "n_head", "n_embd", "n_inner"),
    *("embd_pdrop", "attn_pdrop", "resid_pdrop", "reorder_and_upcast_attn"),
)
_LLAMA_KNOWN = (
    *("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads"),
    *("head_dim", "num_key_value_heads", "hidden_size", "intermediate_size", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("partial_rotary_factor", "pretraining_tp"),
)
_BOTH_KNOWN = (
    *("model_type", "architectures", "initializer_range", "tie_word_embeddings", "dtype"),
    *("torch_dtype", "transformers_version", "use_cache", "return_dict"),
    *("return_dict_in_generate", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("sep_token_id", "decoder_start_token_id", "id2label", "label2id", "num_labels"),
    *("problem_type", "task_specific_params", "finetuning_task", "is_encoder_decoder"),
    *("is_decoder", "chunk_size_feed_forward", "tokenizer_class", "prefix"),
    *("gradient_checkpointing", "attn_implementation", "torchscript", "use_bfloat16"),
)
_NAMES: dict[type, str] = {GPTConfig: "gpt2 models", LlamaConfig: "llama models"}


def config_from(theirs: dict[str, Any]) -> Config:
    """Our configuration of a model, from the content of its config.json.

    Raises:
        FamilyError: naming the key, its value, and what our models have instead.
    """
    if not isinstance(theirs, dict):
        raise FamilyError(f"config.json holds {theirs!r:.40}, not an object of names and values")
    family = theirs.get("model_type")
    if family not in ("gpt2", *_KIN_FIXED):
        raise FamilyError(
            f"model_type {family!r} is none of gpt2, {', '.join(_KIN_FIXED)}, the families that "
            "minitrain has"
        )
    try:
        return _gpt_from(theirs) if family == "gpt2" else _llama_from(theirs, family)
    except KeyError as error:
        raise FamilyError(f"config.json of a {family} lacks the key {error}") from None
    except OverflowError as error:
        raise FamilyError(
            f"config.json of a {family} has a number that is too large: {error}"
        ) from None


def config_to(config: Config, dtype: str, kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of a config.json for a configuration of ours and the dtype of its weights; what
    is kept of the one that the model came from, if it is still this model's.

    Raises:
        FamilyError: a mixture of experts, which neither of their families is.
    """
    if config.mixture is not None:
        raise FamilyError(
            f"Hugging Face's {_NAMES[type(config)]} are dense, and this model has a mixture of "
            f"{config.mixture.experts} experts; only dense models can be converted"
        )
    if kept is not None and config_from(kept) == config:
        return kept
    theirs = _gpt_to(config) if isinstance(config, GPTConfig) else _llama_to(config)
    # The older name of the same key is `torch_dtype`; each version takes the one it knows.
    return theirs | {"dtype": dtype, "torch_dtype": dtype, "tie_word_embeddings": config.tied}


def _gpt_from(theirs: dict[str, Any]) -> GPTConfig:
    check(theirs, _GPT_FIXED)
    check_known(theirs, [*_GPT_FIXED, *_GPT_KNOWN, *_BOTH_KNOWN])
    check({"n_ctx": theirs.get("n_ctx")}, {"n_ctx": (theirs["n_positions"], None)})
    rates = {name: theirs.get(name, 0.1) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if any(rate != rates["resid_pdrop"] for rate in rates.values()):
        raise FamilyError(f"{rates} differ, but a model here has one dropout rate; set them equal")
    return GPTConfig(
        vocab=theirs["vocab_size"],
        context=theirs["n_positions"],
        layers=theirs["n_layer"],
        heads=theirs["n_head"],
        width=theirs["n_embd"],
        hidden=theirs.get("n_inner"),
        dropout=rates["resid_pdrop"],
        tied=theirs.get("tie_word_embeddings", True),
        std=theirs.get("initializer_range", 0.02),
    )


def _gpt_to(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab,
        "n_positions": config.context,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "n_inner": config.hidden,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout),
        "initializer_range": config.std,
        # Theirs default to ids of GPT-2's own vocabulary, which this one may not have.
        "bos_token_id": None,
        "eos_token_id": None,
        **{name: values[0] for name, values in _GPT_FIXED.items()},
    }


def _llama_from(theirs: dict[str, Any], family: str) -> LlamaConfig:
    fixed = _LLAMA_FIXED | _KIN_FIXED[family]
    check(theirs, fixed)
    check_known(theirs, [*fixed, *_LLAMA_KNOWN, *_KIN_KNOWN[family], *_BOTH_KNOWN])
    _check_layers(theirs.get("layer_types"))
    rope, context = rope_of(theirs), theirs["max_position_embeddings"]
    if family == "mistral":  # within its window attention is what it is elsewhere
        context = min(context, theirs.get("sliding_window") or context)
    config = LlamaConfig(
        vocab=theirs["vocab_size"],
        context=context,
        layers=theirs["num_hidden_layers"],
        heads=theirs["num_attention_heads"],
        kv_heads=theirs.get("num_key_value_heads"),
        width=theirs["hidden_size"],
        hidden=theirs["intermediate_size"],
        biased=family == "qwen2",
        base=rope.get("rope_theta", 10000.0),
        stretch=stretch_of(rope),
        epsilon=theirs.get("rms_norm_eps", 1e-6),
        tied=theirs.get("tie_word_embeddings", False),
        std=theirs.get("initializer_range", 0.02),
    )
    check(theirs, {"head_dim": (config.width // config.heads, None)})
    return config


def _check_layers(kinds: list[str] | None) -> None:
    for kind in kinds or ():
        if kind != "full_attention":
            raise FamilyError(
                f"config.json has layer_types with {kind!r}, but layers here have 'full_attention'"
            )


def _llama_to(config: LlamaConfig) -> dict[str, Any]:
    family = "qwen2" if config.biased else "llama"
    return {
        "model_type": family,
        "architectures": [_CLASSES[family]],
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.groups,
        "head_dim": config.width // config.heads,
        "hidden_size": config.width,
        "intermediate_size": config.features,
        "rope_theta": config.base,
        **stretch_to(config.stretch),
        "rms_norm_eps": config.epsilon,
        "initializer_range": config.std,
        "bos_token_id": None,
        "eos_token_id": None,
        **{name: values[0] for name, values in (_LLAMA_FIXED | _KIN_FIXED[family]).items()},
    }
