"""Presets: the shapes of published models, each with its source."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from minitrain.errors import UserError
from minitrain.nn.config import Config, GPTConfig, LlamaConfig
from minitrain.planner.architecture import Architecture
from minitrain.planner.clusters import named


@dataclass(frozen=True)
class Preset:
    """A published model.

    Attributes:
        shape: None where the parts are not public or not a transformer's; then only the count is.
        printed: parameters as its source prints them, in billions.
        note: what the shape leaves out or guesses; "" where nothing.
    """

    name: str
    shape: Architecture | None
    printed: float
    source: str
    note: str

    @property
    def parameters(self) -> float:
        """Of the shape, else as printed."""
        return self.shape.parameters if self.shape else self.printed * 1e9


@cache
def presets() -> dict[str, Preset]:
    """All of them, by name."""
    return {row["name"]: _preset(row) for row in table("models.csv")}


def preset(name: str) -> Preset:
    """The model of this name, however it is written: "gpt-3-175b" is "GPT-3 175B"."""
    return named(name, presets(), "model")


def shape_of(name: str) -> Architecture:
    """A preset's shape; a UserError where only its count is known."""
    found = preset(name)
    if found.shape is None:
        raise UserError(f"only the number of parameters of {found.name} is known ({found.note})")
    return found.shape


def shape_from(config: Config) -> Architecture:
    """The shape of a model of our own."""
    gpt = isinstance(config, GPTConfig)
    return Architecture(
        config.vocab,
        config.context,
        config.layers,
        config.heads,
        config.heads if isinstance(config, GPTConfig) else config.groups,
        config.width,
        config.features,
        config.width // config.heads,
        tied=config.tied,
        gated=not gpt,
        biased=gpt,
        biased_heads=isinstance(config, LlamaConfig) and config.biased,
        positions=config.context if gpt else 0,
    )


def latent_attention(
    width: int, heads: int, *, query_rank: int, kv_rank: int, plain: int, rotary: int, value: int
) -> int:
    """Weights of DeepSeek's attention, its two norms' gains included.

    Queries go through `query_rank` features, keys and values share `kv_rank`; a head has `plain`
    features without positions, `rotary` ones with (whose key all heads share), and `value`.
    """
    queries = width * query_rank + query_rank + query_rank * heads * (plain + rotary)
    shared = width * (kv_rank + rotary) + kv_rank
    return queries + shared + kv_rank * heads * (plain + value) + heads * value * width


def table(name: str) -> list[dict[str, str]]:
    """The rows of a table that ships with the package."""
    text = files(__package__).joinpath("data", name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def _preset(row: dict[str, str]) -> Preset:
    shape = None
    if row["layers"]:
        types = {f.name: str(f.type) for f in fields(Architecture)}
        values = {name: _value(row[name], types[name]) for name in types if name in row}
        shape = Architecture(**values)  # type: ignore[arg-type]
    return Preset(row["name"], shape, float(row["printed_b"]), row["source"], row["note"])


def _value(cell: str, kind: str) -> int | bool | None:
    if not cell:
        return None
    return bool(int(cell)) if kind == "bool" else int(cell)
