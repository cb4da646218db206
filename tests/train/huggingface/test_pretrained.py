"""Hugging Face folders: written ones load in transformers and give the same logits, theirs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import minitrain as mt
from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig
from minitrain.train.data.tokenizer import ByteTokenizer, IdTokenizer
from minitrain.train.huggingface.config import config_to
from minitrain.train.huggingface.names import to_theirs
from minitrain.train.huggingface.pretrained import PretrainedError, read, write

MODELS: dict[str, Any] = {
    "gpt": lambda: GPT(GPTConfig(vocab=31, context=12, layers=2, heads=3, width=24)),
    "llama": lambda: Llama(
        LlamaConfig(vocab=31, context=12, layers=2, heads=4, kv_heads=2, width=24, base=500.0)
    ),
}
TOKENS = np.random.default_rng(5).integers(0, 31, (2, 12))


def filled(family: str, dtype: str = "float32") -> Any:
    model, rng = MODELS[family](), np.random.default_rng(7)
    for parameter in model.parameters().values():
        parameter.array = rng.normal(0, 0.3, parameter.declared).astype(dtype)
    return model


def logits(model: Any) -> Any:
    with mt.no_grad():
        return model(TOKENS).array


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", MODELS)
def test_a_round_trip_is_bitwise(family: str, dtype: str, tmp_path: Path) -> None:
    model = filled(family, dtype)
    write(tmp_path / "model", model, IdTokenizer(31))
    again, tokenizer = read(tmp_path / "model")
    assert type(again) is type(model)
    assert tokenizer.spec == "ids:31"
    assert logits(again).dtype == dtype
    np.testing.assert_array_equal(logits(again), logits(model))


@pytest.mark.parametrize("family", MODELS)
def test_arrays_that_are_not_contiguous_are_written_rightly(family: str, tmp_path: Path) -> None:
    """safetensors takes the memory of a view for its values, without a word."""
    model = filled(family)
    expected = logits(model)
    for parameter in model.parameters().values():
        parameter.array = np.asfortranarray(parameter.array)
        if parameter.ndim > 1:
            assert not parameter.array.flags.c_contiguous
    write(tmp_path / "model", model, IdTokenizer(31))
    np.testing.assert_allclose(logits(read(tmp_path / "model")[0]), expected, rtol=0, atol=1e-5)
    # The pitfall is there: this is what a careless writer would get.
    x = np.arange(6.0).reshape(2, 3).T
    save_file({"x": x}, tmp_path / "careless.safetensors")
    with safe_open(tmp_path / "careless.safetensors", "np") as file:
        assert (file.get_tensor("x") != x).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_short_floats_and_files_in_shards_are_read(dtype: Any, tmp_path: Path) -> None:
    model = filled("llama")
    for parameter in model.parameters().values():  # values that the short type holds exactly
        parameter.array = parameter.array.astype(dtype).astype(np.float32)
    arrays = {n: p.array for n, p in model.parameters().items()}
    theirs = {name: x.astype(dtype) for name, x in to_theirs(model.config, arrays).items()}
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(theirs)}
    for place in set(places.values()):
        part = {name: x for name, x in theirs.items() if places[name] == place}
        save_file(part, tmp_path / place)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config_to(model.config, "bfloat16")))
    again, _ = read(tmp_path)
    assert logits(again).dtype == np.float32
    np.testing.assert_array_equal(logits(again), logits(model))


@pytest.mark.parametrize("family", MODELS)
def test_transformers_loads_what_is_written_and_the_other_way(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'minitrain[peers]'")
    torch = pytest.importorskip("torch", reason="pip install 'minitrain[peers]'")
    model = filled(family)
    write(tmp_path / "ours", model, IdTokenizer(31))
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert peer.dtype == torch.float32
    with torch.no_grad():
        theirs = peer.eval()(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(theirs, logits(model), rtol=0, atol=1e-5)
    assert np.abs(theirs).max() > 1
    peer.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    again, _ = read(tmp_path / "theirs")
    np.testing.assert_array_equal(logits(again), logits(model))


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="pip install 'minitrain[tokenizers]'")
    from minitrain.train.data.subword import SubwordTokenizer

    tokenizer = SubwordTokenizer.train(b"to be or not to be" * 9, 270)
    model = GPT(GPTConfig(vocab=270, context=8, layers=1, heads=1, width=4)).initialize()
    write(tmp_path / "bpe", model, tokenizer)
    again = read(tmp_path / "bpe")[1]
    np.testing.assert_array_equal(again.encode(b"not to"), tokenizer.encode(b"not to"))
    transformers = pytest.importorskip("transformers", reason="pip install 'minitrain[peers]'")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "bpe")
    assert theirs("not to")["input_ids"] == tokenizer.encode(b"not to").tolist()


def test_without_a_tokenizer_256_tokens_are_bytes(tmp_path: Path) -> None:
    model = GPT(GPTConfig(vocab=256, context=8, layers=1, heads=1, width=4)).initialize()
    write(tmp_path / "bytes", model, ByteTokenizer())
    assert read(tmp_path / "bytes")[1].spec == "byte"


def test_a_folder_that_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PretrainedError, match=r"does not hold a whole model: .*config\.json"):
        read(tmp_path)
    write(tmp_path / "model", filled("gpt"), IdTokenizer(31))
    with pytest.raises(PretrainedError, match="model already exists"):
        write(tmp_path / "model", filled("gpt"), IdTokenizer(31))
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(PretrainedError, match="model does not hold a whole model"):
        read(tmp_path / "model")
    weights.rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(PretrainedError, match=r"pickled weights .* are never read"):
        read(tmp_path / "model")


def test_weights_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    model = filled("gpt")
    write(tmp_path / "model", model, IdTokenizer(31))
    arrays = {n: p.array.astype(np.int8) for n, p in model.parameters().items()}
    save_file(to_theirs(model.config, arrays), tmp_path / "model" / "model.safetensors")
    with pytest.raises(PretrainedError, match="is of type I8, but weights can only be F64, F32"):
        read(tmp_path / "model")
