"""What a Hugging Face folder holds is used, equal to what replaces it, kept, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import minitrain as mt
from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig
from minitrain.train.checkpoint.weights import load_model
from minitrain.train.data.subword import SubwordTokenizer
from minitrain.train.data.tokenizer import ByteTokenizer, IdTokenizer
from minitrain.train.generate import Sampling, generate
from minitrain.train.huggingface.config import config_from, config_to
from minitrain.train.huggingface.names import WeightsError
from minitrain.train.huggingface.pretrained import PretrainedError, read, write
from minitrain.train.sample import Writer, find
from minitrain_cli.main import main

CONFIGS: dict[str, Any] = {
    "gpt": GPTConfig(vocab=31, context=12, layers=2, heads=3, width=24),
    "llama": LlamaConfig(vocab=31, context=12, layers=2, heads=4, width=24, tied=True, base=500.0),
}
TABLES = {"gpt": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
TOKENS = np.random.default_rng(5).integers(0, 31, (2, 12))


def folder_of(family: str, path: Path) -> Path:
    """A folder in their layout of a model with random weights."""
    model = (GPT if family == "gpt" else Llama)(CONFIGS[family]).initialize(seed=3)
    write(path, model, IdTokenizer(31))
    return path


def add(folder: Path, arrays: dict[str, Any]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **arrays}, file)


def edit(folder: Path, change: dict[str, Any], name: str = "config.json") -> dict[str, Any]:
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | change))
    return dict(before | change)


def convert(*paths: Path) -> None:
    result = CliRunner().invoke(main, ["convert", *map(str, paths)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("family", CONFIGS)
def test_a_head_beside_a_tied_table_is_equal_or_refused(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    table = load_file(folder / "model.safetensors")[TABLES[family]]
    add(folder, {"lm_head.weight": table})
    assert read(folder)[0].config.tied
    add(folder, {"lm_head.weight": table + 1})
    with pytest.raises(WeightsError, match=r"lm_head.weight differs .* to false there to keep"):
        read(folder)
    edit(folder, {"tie_word_embeddings": False})
    model = read(folder)[0]
    np.testing.assert_array_equal(model.parameters()["head.weight"].array, table + 1)


@pytest.mark.parametrize(
    ("family", "name", "right", "wrong"),
    [
        ("gpt", "transformer.h.0.attn.bias", np.tri(12)[None, None] > 0, np.ones((1, 1, 12, 12))),
        ("gpt", "transformer.h.1.attn.bias", np.tri(12)[None, None], np.tri(12, k=1)[None, None]),
        ("gpt", "transformer.h.1.attn.masked_bias", np.float32(-1e4), np.float32(0)),
        (
            "llama",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            (500.0 ** -(np.arange(0, 6, 2) / 6)).astype(np.float32),
            (10000.0 ** -(np.arange(0, 6, 2) / 6)).astype(np.float32),
        ),
    ],
)
def test_a_buffer_is_what_the_model_computes_or_refused(
    family: str, name: str, right: Any, wrong: Any, tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path / "model")
    add(folder, {name: np.ascontiguousarray(right)})
    assert read(folder)[0].parameters()["norm.weight"].array.dtype == np.float32
    add(folder, {name: np.ascontiguousarray(wrong)})
    with pytest.raises(WeightsError, match=f"{name} is not .*take it out"):
        read(folder)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_round_trip_keeps_every_key_file_and_type(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "theirs")
    ids = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 3}
    config = edit(folder, {**ids, "use_cache": False, "torch_dtype": "bfloat16", "_name": "x"})
    edit(folder, {"eos_token_id": [2, 5], "temperature": 0.6}, "generation_config.json")
    edit(folder, {"chat_template": "{{ x }}"}, "tokenizer_config.json")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.model").write_bytes(b"\xff\x00\xfe")
    weights = load_file(folder / "model.safetensors")
    kinds = [ml_dtypes.bfloat16, np.float16, np.float32]
    weights = {name: x.astype(kinds[i % 3]) for i, (name, x) in enumerate(weights.items())}
    save_file(weights, folder / "model.safetensors")

    convert(folder, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    for name in set(names) - {"config.json", "model.safetensors"}:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    with safe_open(tmp_path / "back" / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(weights)
        for name, x in weights.items():
            again = file.get_tensor(name)
            assert again.dtype == x.dtype
            np.testing.assert_array_equal(again, x)


def test_a_text_ends_at_an_end_of_the_source(tmp_path: Path) -> None:
    folder = folder_of("gpt", tmp_path / "theirs")
    run = ["generate", str(tmp_path / "ours"), "--tokens", "30", "--json"]
    edit(folder, {"eos_token_id": 7})
    convert(folder, tmp_path / "ours")
    whole = json.loads(CliRunner().invoke(main, [*run, "--past-end"]).stdout)["ids"]
    assert len(whole) == 30
    last = whole[10]
    for number, (ids, name) in enumerate(
        [(last, "config.json"), ([30, last], "generation_config.json")]
    ):
        edit(folder, {"eos_token_id": ids}, name)
        run[1] = str(tmp_path / f"ours-{number}")
        convert(folder, Path(run[1]))
        found = json.loads(CliRunner().invoke(main, run).stdout)["ids"]
        assert found == whole[: whole.index(last)]
        assert json.loads(CliRunner().invoke(main, [*run, "--past-end"]).stdout)["ids"] == whole


def test_what_a_tokenizer_puts_before_a_text_comes_before_a_prompt(tmp_path: Path) -> None:
    """Llama's <|begin_of_text|>, without which a converted model writes worse; a run made here has
    never seen it."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'minitrain[tokenizers]'")
    made = SubwordTokenizer.train(b"the cat sat on the mat. " * 9, 270)
    inner = tokenizers.Tokenizer.from_str(made.files["tokenizer.json"])
    inner.add_special_tokens(["<s>"])
    bos = inner.token_to_id("<s>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    config = LlamaConfig(vocab=bos + 1, context=12, layers=1, heads=2, width=8)
    model = Llama(config).initialize(0)
    rng = np.random.default_rng(0)
    for parameter in model.parameters().values():
        parameter.array = rng.normal(size=parameter.array.shape).astype(np.float32)
    write(tmp_path / "theirs", model, SubwordTokenizer(inner))
    convert(tmp_path / "theirs", tmp_path / "ours")
    writer, greedy = Writer(find(tmp_path / "ours")), Sampling(temperature=0.0)
    ids = SubwordTokenizer(inner).encode(b"the cat").tolist()
    with_bos = list(generate(writer.model, [bos, *ids], 4, greedy))
    assert writer.opening == (bos,)
    assert writer.write(4, greedy, b"the cat").ids == with_bos
    assert with_bos != list(generate(writer.model, ids, 4, greedy))
    assert made.opening == ByteTokenizer().opening == ()


def test_the_text_that_is_shown_is_decoded_at_once(tmp_path: Path) -> None:
    """Numbers stand apart, and so do the words of tokenizers that mark where a word begins."""
    convert(folder_of("gpt", tmp_path / "theirs"), tmp_path / "ours")
    run = ["generate", str(tmp_path / "ours"), "--tokens", "2", "--prompt", "4 5"]
    found = json.loads(CliRunner().invoke(main, [*run, "--json"]).stdout)
    shown = CliRunner().invoke(main, run).stdout
    assert shown.split() == ["4", "5", *map(str, found["ids"])]
    assert found["prompt"] + found["text"] == shown.removesuffix("\n")


def test_files_that_no_index_names_are_refused(tmp_path: Path) -> None:
    folder = folder_of("gpt", tmp_path / "model")
    save_file({"lora": np.ones(1, np.float32)}, folder / "adapter_model.safetensors")
    with pytest.raises(PretrainedError, match=r"holds adapter_model.safetensors, which is not"):
        read(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    arrays = load_file(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(arrays, "part.safetensors")}))
    assert read(folder)[0].config == CONFIGS["gpt"]
    save_file({**arrays, "more": np.ones(1, np.float32)}, folder / "part.safetensors")
    with pytest.raises(PretrainedError, match=r"holds more, which model.*json does not name"):
        read(folder)


def test_rope_scaling_of_type_default_means_none() -> None:
    theirs = config_to(CONFIGS["llama"], "float32")
    for part in ({"type": "default"}, {"rope_type": "default", "factor": 1.0}, {}):
        assert config_from(theirs | {"rope_scaling": part}) == config_from(theirs)


def test_truncation_and_padding_of_a_tokenizer_are_kept_and_not_used(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="pip install 'minitrain[tokenizers]'")
    from minitrain.train.data.subword import SubwordTokenizer

    plain = SubwordTokenizer.train(b"to be or not to be" * 9, 270)
    plain.inner.enable_truncation(4)
    plain.inner.enable_padding(length=12)
    (tmp_path / "tokenizer.json").write_text(plain.inner.to_str())
    again, text = SubwordTokenizer.load(tmp_path), b"not to be, not to be"
    assert again.decode(again.encode(text)) == text
    kept = json.loads(again.files["tokenizer.json"])
    assert kept["truncation"]["max_length"] == 4
    assert kept["padding"]["strategy"] == {"Fixed": 12}


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_that_lack_default_as_in_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'minitrain[peers]'")
    torch = pytest.importorskip("torch", reason="pip install 'minitrain[peers]'")
    folder = folder_of(family, tmp_path / "theirs")
    theirs = json.loads((folder / "config.json").read_text())
    if family == "llama":  # a head of its own, as theirs has one by default
        head = np.random.default_rng(1).normal(0, 1, (31, 24)).astype(np.float32)
        add(folder, {"lm_head.weight": head})
    needed = {
        "gpt": "vocab_size n_positions n_layer n_head n_embd",
        "llama": "vocab_size max_position_embeddings num_hidden_layers num_attention_heads "
        "hidden_size intermediate_size",
    }[family].split()
    bare = {name: theirs[name] for name in ("model_type", "architectures", *needed)}
    (folder / "config.json").write_text(json.dumps(bare))
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = peer(torch.from_numpy(TOKENS)).logits.numpy()
    with mt.no_grad():
        found = read(folder)[0](TOKENS).array
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("family", CONFIGS)
def test_what_goes_back_is_the_peers_model_again(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'minitrain[peers]'")
    torch = pytest.importorskip("torch", reason="pip install 'minitrain[peers]'")
    folder = folder_of(family, tmp_path / "theirs")
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    peer.generation_config.eos_token_id = 7
    peer.save_pretrained(tmp_path / "half")
    convert(tmp_path / "half", tmp_path / "ours")
    assert load_model(find(tmp_path / "ours"))[0].config == read(tmp_path / "half")[0].config
    convert(tmp_path / "ours", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert again.generation_config.eos_token_id == 7
    assert again.config.to_dict() | {"_name_or_path": ""} == peer.config.to_dict() | {
        "_name_or_path": ""
    }
    for name, x in peer.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name
