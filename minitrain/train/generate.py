"""Text from a model: one token after the other, drawn from what the model expects next.

Token number n is drawn with a random number that depends on (seed, n) alone, so the same seed gives
the same text, with the cache or without, and a longer text begins as the shorter one does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitrain.array import stream, to_host
from minitrain.autograd.tensor import no_grad
from minitrain.errors import UserError
from minitrain.nn.cache import caching
from minitrain.nn.families import Model
from minitrain.nn.module import window as looking_through


class SamplingError(UserError):
    """Sampling options or a prompt that cannot be."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits: below 1 likely tokens win more often, 0 is always the
            likeliest.
        top_k: draw from the k likeliest tokens only; None from all.
        top_p: draw from the fewest likeliest tokens that have this probability together (Holtzman
            et al. 2020, section 3.1), after top_k and temperature; 1 from all.
        seed: of the random numbers.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise SamplingError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise SamplingError(f"top-k must keep at least 1 token, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top-p must lie in (0, 1], got {self.top_p}")

    def choose(self, logits: np.ndarray[Any, Any], number: int) -> int:
        """The id of generated token `number`, from the logits (V,); of equal ones the lowest id.

        Raises:
            SamplingError: logits that are not finite: the training has gone wrong.
        """
        if not np.isfinite(logits).all():
            raise SamplingError("the model's logits are not finite; take an earlier checkpoint")
        order = np.argsort(-logits, kind="stable")[: self.top_k]  # the likeliest first
        if self.temperature == 0:
            return int(order[0])
        scores = logits[order].astype(np.float64)
        with np.errstate(over="ignore"):  # a tiny temperature: e^-inf is the 0 that is meant
            p = np.exp((scores - scores[0]) / self.temperature)
        upto = np.cumsum(p / p.sum())
        kept = int(np.searchsorted(upto, self.top_p)) + 1  # the fewest that reach top_p
        upto = upto[:kept]
        drawn = stream(self.seed, "token", number).random() * upto[-1]
        return int(order[np.searchsorted(upto, drawn, side="right")])


def generate(model: Model, prompt: Sequence[int], tokens: int, sampling: Sampling, *,
             cache: bool = True, ends: Collection[int] = ()) -> Iterator[int]:  # fmt: skip
    """Ids that continue a prompt, one by one.

    A prompt longer than the model's context counts with its last tokens only. When prompt and text
    fill the context, its last half stays and the rest is forgotten: positions shift then, which
    costs one computation of that half, and not one for each token that follows.

    Args:
        model: filled. It is only read, so several texts may be drawn from it at a time.
        prompt: at least one id; see `Tokenizer.start` for a text that starts from nothing.
        tokens: how many ids to generate at most.
        cache: keep keys and values. Without it the same numbers are computed again for each token.
        ends: ids that end a text; the one that is drawn is not part of it.

    Raises:
        SamplingError: an empty prompt, or an id that the model does not have.
    """
    if not len(prompt):
        raise SamplingError("a prompt needs at least one token; start with Tokenizer.start")
    context, vocab = model.config.context, model.config.vocab
    bad = [token for token in prompt if not 0 <= token < vocab]
    if bad:
        raise SamplingError(f"the prompt has id {bad[0]}, but the model's ids are 0 to {vocab - 1}")
    window, done = [int(token) for token in prompt[-context:]], 0
    reader = caching(model) if cache else model
    for number in range(tokens):
        logits = _next(reader, window, done)
        window.append(sampling.choose(logits, number))
        if window[-1] in ends:
            return
        yield window[-1]
        done = len(window) - 1 if cache else 0
        if len(window) > context:
            window, done = window[-max(1, context // 2) :], 0


def _next(model: Model, window: list[int], done: int) -> np.ndarray[Any, Any]:
    """The logits (V,) of what follows the window, whose first `done` tokens are in the cache."""
    x: Any = np.array([window[done:]])
    positions = np.arange(done, len(window))
    *links, finish = model.chain()
    with no_grad(), looking_through(None):  # the caller's may be one for training
        for link in links:
            x = link(x, positions)
        return to_host(finish(x[:, -1:], positions[-1:]).array[0, -1])
