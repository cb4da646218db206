"""What a model is, told without arrays: its sizes, and its modules with the shapes of their
parameters. Standard library only, so that the planner can ask what 2128 ranks would hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

from minitrain.errors import UserError
from minitrain.nn.mixture import MixtureConfig
from minitrain.nn.shapes import ModuleShape, Shape
from minitrain.nn.sizes import check_sizes


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Attributes:
        vocab: V, how many token ids there are.
        context: T, how many tokens the model can look at.
        layers: L, how many blocks.
        heads: H, of width / heads features each.
        width: C, features of a token between the blocks.
        hidden: F, features inside an MLP; 4 · width if None.
        dropout: the rate at the embedding, the attention weights and the residual branches.
        tied: whether the head shares the token table.
        std: spread of the initial weights; positions get std / 2, residual outputs std / √(2L).
        mixture: of experts, in place of MLPs; None: there is none.
    """

    vocab: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    hidden: int | None = None
    dropout: float = 0.0
    tied: bool = True
    std: float = 0.02
    mixture: MixtureConfig | None = None

    def __post_init__(self) -> None:
        check_sizes("GPT", self)
        if self.dropout >= 1:
            raise UserError(f"GPT: dropout must be below 1, got {self.dropout}")
        if self.width % self.heads:
            raise UserError(
                f"GPT: width {self.width} is not divisible by {self.heads} heads; "
                f"take a width of {self.width // self.heads * self.heads or self.heads}"
            )

    @property
    def features(self) -> int:
        """F, features inside an MLP."""
        return self.hidden or 4 * self.width

    def modules(self) -> Iterator[ModuleShape]:
        """What the model is made of; see ModuleShape."""
        c, table = self.width, (self.vocab, self.width)
        norm = {"weight": (c,), "bias": (c,)}
        heads = (self.heads, c // self.heads)
        yield ModuleShape(
            0, "embedding", "Embedding",
            {"token.weight": table, "position.weight": (self.context, c)},
        )  # fmt: skip
        for i in range(self.layers):
            link, block = i + 1, f"blocks.{i}"
            yield ModuleShape(link, f"{block}.attention_norm", "LayerNorm", norm)
            yield ModuleShape(
                link, f"{block}.attention", "Attention",
                {"qkv.weight": (c, 3, *heads), "qkv.bias": (3, *heads),
                 "out.weight": (*heads, c), "out.bias": (c,)},
            )  # fmt: skip
            yield ModuleShape(link, f"{block}.mlp_norm", "LayerNorm", norm)
            yield from _mlps(self, i)
        yield ModuleShape(self.layers + 1, "norm", "LayerNorm", norm)
        yield _head(self, table)

    def mlp(self, link: int, path: str, features: int | None = None) -> ModuleShape:
        """The MLP of a link at a path, of so many features."""
        c, f = self.width, features or self.features
        shapes = {"up.weight": (c, f), "up.bias": (f,), "down.weight": (f, c), "down.bias": (c,)}
        return ModuleShape(link, path, "MLP", shapes)


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama.

    Attributes:
        vocab: V, how many token ids there are.
        context: T, how many tokens the model is meant to look at.
        layers: L, how many blocks.
        heads: H, of width / heads features each, an even number.
        kv_heads: K, key/value heads, each shared by heads / kv_heads queries; heads if None.
        width: C, features of a token between the blocks.
        hidden: F, features inside an MLP; if None 8/3 · width, rounded up to a multiple of 8.
        biased: whether queries, keys and values have biases, as in Qwen2.
        base: of the rotary positions' angles.
        stretch: of these for longer texts, as in Llama 3.1, see autograd.rotary; None: none.
        epsilon: added to the mean square in norms.
        tied: whether the head shares the token table.
        std: spread of the initial weights; residual outputs get std / √(2L).
        mixture: of experts, in place of MLPs; None: there is none.
    """

    vocab: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    width: int = 128
    hidden: int | None = None
    biased: bool = False
    base: float = 10000.0
    stretch: tuple[float, float, float, float] | None = None
    epsilon: float = 1e-5
    tied: bool = False
    std: float = 0.02
    mixture: MixtureConfig | None = None

    def __post_init__(self) -> None:
        check_sizes("Llama", self)
        if self.base == 0:
            raise UserError("Llama: base must be above 0, such as 10000, got 0")
        if self.stretch is not None:
            object.__setattr__(self, "stretch", tuple(self.stretch))  # JSON has made a list of it
            factor, low, high, context = self.stretch
            if not (factor >= 1 and context > 0 and 0 < low < high < math.inf):
                raise UserError(
                    f"Llama: stretch must be a factor of at least 1, two rising numbers of turns, "
                    f"and a context, such as (8.0, 1.0, 4.0, 8192), got {self.stretch}"
                )
        if self.width % (2 * self.heads):
            raise UserError(
                f"Llama: width {self.width} does not give {self.heads} heads an even number of "
                f"features; take a multiple of {2 * self.heads}"
            )
        if self.groups < 1 or self.heads % self.groups:
            raise UserError(
                f"Llama: {self.heads} heads cannot share {self.groups} key/value heads evenly; "
                f"take a kv_heads that divides {self.heads}"
            )

    @property
    def groups(self) -> int:
        """K, the number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def features(self) -> int:
        """F, features inside an MLP: with three matrices 8/3 · width weighs as much as 4 · width
        with two."""
        return self.hidden or 8 * math.ceil(self.width / 3)

    def modules(self) -> Iterator[ModuleShape]:
        """What the model is made of; see ModuleShape."""
        c, d, table = self.width, self.width // self.heads, (self.vocab, self.width)
        norm = {"weight": (c,)}
        yield ModuleShape(0, "embedding", "TokenEmbedding", {"token.weight": table})
        for i in range(self.layers):
            link, block = i + 1, f"blocks.{i}"
            yield ModuleShape(link, f"{block}.attention_norm", "RMSNorm", norm)
            heads = {"q": (self.heads, d), "kv": (2, self.groups, d)}
            shapes = {f"{part}.weight": (c, *outer) for part, outer in heads.items()}
            biases = {f"{part}.bias": outer for part, outer in heads.items() if self.biased}
            shapes |= {**biases, "out.weight": (self.heads, d, c)}
            yield ModuleShape(link, f"{block}.attention", "GroupedAttention", shapes)
            yield ModuleShape(link, f"{block}.mlp_norm", "RMSNorm", norm)
            yield from _mlps(self, i)
        yield ModuleShape(self.layers + 1, "norm", "RMSNorm", norm)
        yield _head(self, table)

    def mlp(self, link: int, path: str, features: int | None = None) -> ModuleShape:
        """The MLP of a link at a path, of so many features."""
        c, f = self.width, features or self.features
        shapes = {"gate_up.weight": (c, 2, f), "down.weight": (f, c)}
        return ModuleShape(link, path, "GatedMLP", shapes)


Config: TypeAlias = GPTConfig | LlamaConfig

FAMILIES: dict[str, type[GPTConfig] | type[LlamaConfig]] = {"gpt": GPTConfig, "llama": LlamaConfig}

TABLE = "embedding.token.weight"
"""The name of the token table, which a tied head goes by too."""


def _mlps(config: Config, block: int) -> Iterator[ModuleShape]:
    """The MLP of a block, or the mixture that it has instead."""
    link, path = block + 1, f"blocks.{block}.mlp"
    if config.mixture is None or not config.mixture.has(block):
        yield config.mlp(link, path)
    else:
        yield from config.mixture.modules(link, path, config.width, partial(config.mlp, link, path))


def _head(config: Config, table: Shape) -> ModuleShape:
    names = {"weight": TABLE} if config.tied else {}
    return ModuleShape(config.layers + 1, "head", "Head", {"weight": table}, names)


def to_values(config: Config) -> dict[str, Any]:
    """A configuration as plain data, such as {"family": "gpt", "layers": 4, …}."""
    families = {kind: family for family, kind in FAMILIES.items()}
    return {"family": families[type(config)], **asdict(config)}


def from_values(values: Mapping[str, Any]) -> Config:
    """The configuration that `to_values` gave.

    Raises:
        UserError: a family that is not known, or a size that one family does not have.
    """
    family = values.get("family")
    if family not in FAMILIES:
        raise UserError(f"model family {family!r} is none of {', '.join(FAMILIES)}")
    sizes = {name: value for name, value in values.items() if name != "family"}
    try:
        if sizes.get("mixture") is not None:
            sizes["mixture"] = MixtureConfig(**sizes["mixture"])
        return FAMILIES[family](**sizes)
    except TypeError as error:
        raise UserError(f"model family {family}: {error}") from None
