"""Values that are legal alone and not together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minitrain.train.config.option import ConfigError
from minitrain.train.config.resolve import resolve, to_toml
from minitrain.train.config.sections import RunConfig


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"family": "lama"}, "must be one of gpt, llama"),
        ({"kv_heads": 2}, "kv_heads = 2 is for a llama, but model.family = gpt"),
        ({"family": "llama", "kv_heads": 3}, "kv_heads = 3 does not divide model.heads = 4"),
        ({"family": "llama", "width": 20}, "an even number of features; use a multiple of 8"),
        ({"family": "llama", "dropout": 0.1}, "a llama has no dropout"),
    ],
)
def test_what_a_family_cannot_be_is_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(flags=flags)
    assert resolve(flags={"family": "llama", "kv_heads": 2}).model.kv_heads == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"top_k": 3}, "mixture.top_k = 3, but there are no experts; leave it out, or add some"),
        ({"capacity": 1.0}, r"mixture.capacity = 1\.0, but there are no experts"),
        ({"experts": 4, "top_k": 5}, "top_k = 5 is more than mixture.experts = 4; use at most 4"),
        ({"experts": 4, "sync": "async"}, "which --sync async lets run apart; leave experts out"),
        ({"experts": 4, "router_scores": "tanh"}, "must be one of softmax, sigmoid"),
    ],
)
def test_what_a_mixture_cannot_be_is_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(flags=flags)
    assert resolve(flags={"experts": 4, "top_k": 4}).mixture.experts == 4


def test_an_end_above_the_peak_is_refused_where_the_rate_falls_to_it() -> None:
    for schedule in ("cosine", "linear", "wsd"):
        with pytest.raises(ConfigError, match=r"min_lr = 0\.0001 is above optimizer\.lr = 1e-05"):
            resolve(flags={"lr": 1e-5, "min_lr": 1e-4, "schedule": schedule})
        assert resolve(flags={"lr": 5e-5, "schedule": schedule}).optimizer.last_lr == 5e-6
    assert resolve(flags={"lr": 1e-5, "schedule": "constant"}).optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"beta1": 0.9, "optimizer": "sgd"}, "beta1 means nothing where optimizer.name = sgd"),
        ({"momentum": 0.9}, "momentum means nothing where optimizer.name = adamw"),
        ({"min_lr": 0, "schedule": "constant"}, "min_lr means nothing where optimizer.schedule"),
    ],
)
def test_an_option_that_means_nothing_is_refused_where_it_is_asked_for(
    flags: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Also with its default value; but a file of a whole configuration has them all."""
    with pytest.raises(ConfigError, match=words):
        resolve(flags=flags)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(RunConfig()))
    assert resolve(file=file).optimizer.momentum == 0.9


def test_short_names_of_types_are_answered_with_the_long_ones() -> None:
    for short, long in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        with pytest.raises(ConfigError, match=f"did you mean {long}\\?"):
            resolve(flags={"dtype": short})
