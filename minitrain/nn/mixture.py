"""What a mixture of experts is, told without arrays. Standard library only, as nn.config is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from minitrain.errors import UserError
from minitrain.nn.shapes import ModuleShape, Shape
from minitrain.nn.sizes import check_sizes

SCORES = ("softmax", "sigmoid")
SCOPES = ("batch", "sequence")


@dataclass(frozen=True)
class MixtureConfig:
    """Experts in place of a block's MLP, of which each token meets a few.

    Attributes:
        experts: E, how many there are.
        top_k: k, how many of them each token chooses.
        every: a mixture in every so many-th block, the last of each; 1 is every block.
        hidden: F, features inside an expert; those of the model's MLPs if None.
        shared: experts that all tokens meet beside those they choose; together they are one MLP.
        scores: what the router makes of its logits: "softmax" over the experts (Shazeer et al.
            2017), or a "sigmoid" for each by itself (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1).
        normalised: whether a token's k gates are divided by their sum. A single gate never is: as
            a 1 it would teach the router nothing.
        capacity: an expert takes at most capacity · k · tokens / E choices, rounded up, of those
            the first; None: all.
        scope: what load and capacity are counted over: the tokens of the whole micro-batch, or of
            each sequence.
        balance: weight of the balance loss E · Σ fᵢ · Pᵢ (Fedus et al. 2021, section 2.2), of the
            share fᵢ of choices and the mean score Pᵢ of each expert.
        z_loss: weight of the mean square of log Σ e^logit (Zoph et al. 2022, section 3).
        bias_rate: how much is added to the bias of an expert that was chosen less than the mean,
            and taken from the others, after each step. It counts for the choice alone (Wang et al.
            2024, "Auxiliary-loss-free load balancing"). 0: there is no bias.
    """

    experts: int = 8
    top_k: int = 2
    every: int = 1
    hidden: int | None = None
    shared: int | None = None
    scores: str = "softmax"
    normalised: bool = True
    capacity: float | None = None
    scope: str = "batch"
    balance: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        check_sizes("mixture", self)
        if self.top_k > self.experts:
            raise UserError(
                f"mixture: a token cannot choose {self.top_k} of {self.experts} experts; take a "
                f"top_k of at most {self.experts}"
            )
        for name, choices in (("scores", SCORES), ("scope", SCOPES)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"mixture: {name} must be one of {', '.join(choices)}, "
                    f"got {getattr(self, name)!r}"
                )
        if self.capacity == 0:
            raise UserError("mixture: capacity must be above 0, such as 1.25, got 0")

    def has(self, block: int) -> bool:
        """Whether block number `block`, from 0, has a mixture."""
        return (block + 1) % self.every == 0

    def room(self, tokens: int) -> int:
        """How many choices an expert takes of those of so many tokens, at least one if there are
        any. The factor counts as it is written: 1.1 is eleven tenths."""
        if self.capacity is None:
            return tokens
        return ceil(Fraction(str(self.capacity)) * self.top_k * tokens / self.experts)

    def modules(
        self, link: int, path: str, width: int, mlp: Callable[[int | None], ModuleShape]
    ) -> Iterator[ModuleShape]:
        """What the mixture at a path is made of; see ModuleShape.

        Args:
            mlp: the family's MLP of so many features, or of its own number if None.
        """
        dense, experts = mlp(self.hidden), self.experts
        bias: dict[str, Shape] = {"bias": (experts,)} if self.bias_rate else {}
        yield ModuleShape(
            link, f"{path}.router", "Router", {"weight": (width, experts), **bias}, untrained=bias
        )
        kind = {"MLP": "Experts", "GatedMLP": "GatedExperts"}[dense.kind]
        shapes = {p: (experts, *s) for p, s in dense.shapes.items() if p.endswith("weight")}
        yield ModuleShape(link, f"{path}.experts", kind, shapes, used=self.top_k / experts)
        if self.shared:
            hidden = dense.shapes["down.weight"][0]
            yield mlp(self.shared * hidden)._replace(path=f"{path}.shared")
