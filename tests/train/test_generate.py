"""Sampling: which tokens may be drawn and how often; the cache; prompts of every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.nn import GPT, GPTConfig, Llama, LlamaConfig
from minitrain.train.generate import Sampling, SamplingError, generate

CONTEXT, VOCAB = 8, 13


def loud(model: Any) -> Any:
    """Weights large enough that every position matters in the logits."""
    rng = np.random.default_rng(1)
    for parameter in model.parameters().values():
        parameter.array = rng.normal(0, 0.5, parameter.declared)
    return model


MODELS: dict[str, Any] = {
    "gpt": loud(GPT(GPTConfig(vocab=VOCAB, context=CONTEXT, layers=2, heads=2, width=8))),
    "llama": loud(
        Llama(LlamaConfig(vocab=VOCAB, context=CONTEXT, layers=2, heads=4, kv_heads=2, width=16))
    ),
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("length", [1, 3, CONTEXT - 1, CONTEXT, CONTEXT + 1, 40])
def test_the_cache_changes_no_token(family: str, length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    sampling = Sampling(temperature=2.0, seed=3)
    cached, plain = (
        list(generate(MODELS[family], prompt, 30, sampling, cache=cache)) for cache in (True, False)
    )
    assert cached == plain
    assert len(cached) == 30
    assert len(set(cached)) > 3


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_are_the_models_likeliest(family: str) -> None:
    model, ids = MODELS[family], [5, 0, VOCAB - 1]
    for token in generate(model, ids[:], CONTEXT - 3, Sampling(temperature=0)):
        assert token == model(np.array([ids])).array[0, -1].argmax()
        ids.append(token)


def test_a_long_prompt_counts_with_its_last_tokens_only() -> None:
    model, sampling = MODELS["gpt"], Sampling(seed=1)
    last = list(range(CONTEXT))
    short = list(generate(model, last, 20, sampling))
    assert list(generate(model, [7, 7, 7, *last], 20, sampling)) == short
    assert list(generate(model, [*last[:-1], 12], 20, sampling)) != short


def test_a_full_context_goes_on_with_its_last_half() -> None:
    model, prompt, greedy = MODELS["gpt"], list(range(CONTEXT)), Sampling(temperature=0)
    first, second = generate(model, prompt, 2, greedy)
    kept = [*prompt, first][-CONTEXT // 2 :]
    assert second == next(generate(model, kept, 1, greedy))


def test_a_context_of_one_token_works() -> None:
    model = loud(GPT(GPTConfig(vocab=5, context=1, layers=1, heads=1, width=4)))
    ids = list(generate(model, [2], 6, Sampling(temperature=0)))
    table = model(np.arange(5)[:, None]).array[:, 0].argmax(axis=1)
    expected, token = [], 2
    for _ in range(6):
        token = int(table[token])
        expected.append(token)
    assert ids == expected


def test_the_same_seed_gives_the_same_text_and_a_longer_one_begins_with_it() -> None:
    model = MODELS["llama"]
    texts = [list(generate(model, [1], 20, Sampling(seed=seed))) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert list(generate(model, [1], 50, Sampling(seed=0)))[:20] == texts[0]


def drawn(sampling: Sampling, logits: Any, count: int = 4000) -> Any:
    ids = [sampling.choose(np.asarray(logits, np.float32), n) for n in range(count)]
    return np.bincount(ids, minlength=len(logits)) / count


def test_tokens_are_drawn_as_often_as_the_softmax_says() -> None:
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    # The spread of a frequency over 4000 draws is 0.008 at the most.
    np.testing.assert_allclose(
        drawn(Sampling(temperature=1), logits), [0.1, 0.4, 0.3, 0.2], atol=0.03
    )
    hot = np.exp(logits / 2) / np.exp(logits / 2).sum()
    np.testing.assert_allclose(drawn(Sampling(temperature=2), logits), hot, atol=0.03)
    kept = drawn(Sampling(temperature=1, top_k=2), logits)
    np.testing.assert_allclose(kept, [0, 4 / 7, 3 / 7, 0], atol=0.03)
    # 0.4 + 0.3 do not reach 0.75, so the third is in; they do reach 0.69, so it is not.
    kept = drawn(Sampling(temperature=1, top_p=0.75), logits)
    np.testing.assert_allclose(kept, [0, 4 / 9, 3 / 9, 2 / 9], atol=0.03)
    kept = drawn(Sampling(temperature=1, top_p=0.69), logits)
    np.testing.assert_allclose(kept, [0, 4 / 7, 3 / 7, 0], atol=0.03)
    # Of the top three, 4/9 and 3/9 reach 0.7 together: top-p looks at what top-k left.
    kept = drawn(Sampling(temperature=1, top_k=3, top_p=0.7), logits)
    np.testing.assert_allclose(kept, [0, 4 / 7, 3 / 7, 0], atol=0.03)


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=9),
    temperature=st.sampled_from([0, 1e-300, 0.5, 1, 100]),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1]),
    number=st.integers(0, 1000),
)
def test_a_drawn_token_is_among_the_likeliest(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, number: int
) -> None:
    x = np.array(logits, np.float32)
    token = Sampling(temperature, top_k, top_p).choose(x, number)
    order = np.argsort(-x, kind="stable").tolist()
    assert order.index(token) < (top_k or len(logits))
    if temperature == 0 or top_p == 1e-9:
        assert token == order[0]


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(6, np.float32)
    assert Sampling(temperature=0).choose(logits, 0) == 0
    assert set(np.flatnonzero(drawn(Sampling(top_k=2), logits, 100))) == {0, 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature must be a finite number >= 0, got -1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"top_k": 0}, "top-k must keep at least 1 token, got 0"),
        ({"top_p": 0}, r"top-p must lie in \(0, 1\], got 0"),
        ({"top_p": 1.5}, "got 1.5"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        Sampling(**options)


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "at least one token"), ([3, 13], "id 13, .* ids are 0 to 12")]
)
def test_bad_prompts_are_refused(prompt: list[int], words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        next(generate(MODELS["gpt"], prompt, 1, Sampling()))


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(SamplingError, match="not finite"):
        Sampling().choose(np.array([1, np.nan], np.float32), 0)
