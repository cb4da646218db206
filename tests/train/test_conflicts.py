"""Values that are legal alone and not together."""

from __future__ import annotations

from typing import Any

import pytest

from minitrain.train.config import resolve
from minitrain.train.option import ConfigError


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
