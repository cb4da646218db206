"""The configuration of a run. A dataclass field is the only definition of an option.

What is given on the command line wins over `--set`, that over a TOML file, that over the preset.
Standard library only, so that `--help` is quick.
"""
# ruff: noqa: RUF009  (_option is dataclasses.field with less to write)

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minitrain.layout import did_you_mean
from minitrain.train.conflicts import conflicts
from minitrain.train.option import (
    ConfigError,
    Count,
    Fraction,
    Natural,
    NotNegative,
    Option,
    Positive,
    Text,
    options_of,
)
from minitrain.train.sources import from_file, from_flags, from_set, write

__all__ = [
    "OPTIONS",
    "PRESETS",
    "ConfigError",
    "DataOptions",
    "LossOptions",
    "ModelOptions",
    "OptimizerOptions",
    "RunConfig",
    "RunOptions",
    "check",
    "notes",
    "resolve",
    "to_toml",
]


def _option(default: Any, help: str, flag: str | None = None) -> Any:
    """A field with its default and help; `flag` where the flag is not called as the field is."""
    metadata = {"help": help} if flag is None else {"help": help, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelOptions:
    """The shape of the model; its vocabulary comes from the tokenizer."""

    family: Literal["gpt", "llama"] = _option("gpt", "GPT-2 or Llama")
    layers: Count = _option(4, "transformer blocks")
    heads: Count = _option(4, "attention heads of a block")
    kv_heads: Count | None = _option(None, "key/value heads of a Llama's block; none: as heads")
    width: Count = _option(128, "features of a position, a multiple of heads")
    context: Count = _option(64, "tokens that the model sees at once")
    dropout: Fraction = _option(0.0, "share of activations dropped while training")


@dataclass(frozen=True)
class DataOptions:
    """The text, and how much of it a step takes, whatever the layout."""

    path: Text | None = _option(
        None, "text file, or folder of them; none: Python's own documentation", flag="data"
    )
    tokenizer: Text = _option(
        "byte", "byte, bpe:SIZE to train one, ids:SIZE for a .bin file, or a tokenizer.json"
    )
    batch: Count = _option(12, "sequences of a step, over all ranks")
    micro_batches: Count = _option(1, "parts of the batch, computed one after the other")


@dataclass(frozen=True)
class LossOptions:
    """What is added to the cross-entropy that is trained on, and so to a step's `loss`.

    Held-out figures are the plain cross-entropy: they compare with those of any other run.
    """

    smoothing: Fraction = _option(0.0, "share of a label spread over all tokens, in training only")
    z_loss: NotNegative = _option(
        0.0, "weight of the squared log of softmax's sum, in training only"
    )


@dataclass(frozen=True)
class OptimizerOptions:
    """How weights are stepped: a warm-up to lr, then a fall to min_lr at the last step."""

    name: Literal["adamw", "sgd"] = _option("adamw", "which optimizer", flag="optimizer")
    lr: Positive = _option(1e-3, "peak learning rate")
    min_lr: NotNegative = _option(
        1e-4, "learning rate at the last step; a constant one stays at lr"
    )
    warmup: Natural = _option(100, "steps over which the learning rate rises to its peak")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = _option(
        "cosine", "how it falls from there; constant: not at all; wsd: in the last fifth only"
    )
    beta1: Fraction = _option(0.9, "AdamW's decay of the mean of gradients")
    beta2: Fraction = _option(0.99, "AdamW's decay of the mean of squared gradients")
    epsilon: Positive = _option(1e-8, "AdamW's term that keeps the division finite")
    momentum: Fraction = _option(0.9, "SGD's decay of the sum of gradients")
    weight_decay: NotNegative = _option(0.1, "decay of weights, not of norms and biases")
    clip: Positive | None = _option(1.0, "largest global norm of the gradient; none: no limit")


@dataclass(frozen=True)
class RunOptions:
    """How long a run is, how exact, and what it writes when."""

    steps: Count = _option(2000, "optimizer steps")
    seed: Natural = _option(0, "seed of initial weights, samples and dropout")
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = _option(
        "float32", "type of weights and activations; in 16 bits, weights stay float32 beside"
    )
    recompute: Literal["none", "selective", "full"] = _option(
        "none", "what runs again in the backward; full: blocks; none, selective: attention weights"
    )
    eval_every: Count = _option(250, "steps between evaluations on the held-out text")
    save_every: Count = _option(500, "steps between checkpoints; the last step has one too")


@dataclass(frozen=True)
class RunConfig:
    """All options of a run, in sections. The defaults are the preset `cpu`."""

    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    loss: LossOptions = LossOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    run: RunOptions = RunOptions()

    def value(self, option: Option) -> Any:
        """The value of one option."""
        return getattr(getattr(self, option.section), option.name)


OPTIONS = options_of(RunConfig)

# Small enough for every test, with 8 heads, 6 links and 16 positions for up to 8 ranks an axis.
_NANO = {
    "model.heads": 8,
    "model.width": 32,
    "model.context": 16,
    "data.batch": 24,
}
PRESETS: dict[str, dict[str, Any]] = {"cpu": {}, "nano": _NANO}


def resolve(
    preset: str | None = None,
    file: str | Path | None = None,
    sets: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The configuration that preset, file, sets and flags give; the later ones win.

    Args:
        preset: a name of PRESETS; `cpu` where None.
        file: a TOML file of sections, such as the config.toml of a run.
        sets: texts such as "optimizer.lr=1e-4".
        flags: values or texts by `Option.flag`, such as {"lr": "1e-4"}. A None is not given;
            the text "none" is.

    Raises:
        ConfigError: one line with the key, the value and where it came from, or every
            broken rule between values.
    """
    given = dict(_from_preset(preset or "cpu"))
    if file is not None:
        given |= from_file(Path(file), OPTIONS)
    for text in sets:
        given |= from_set(text, OPTIONS)
    return from_values(given | from_flags(flags or {}, OPTIONS))


def check(config: RunConfig) -> None:
    """Refuse values that are illegal alone or together, every broken rule in one ConfigError."""
    problems = []
    for option in OPTIONS.values():
        try:
            option.check(config.value(option))
        except ConfigError as error:
            problems.append(str(error))
    if not problems:
        problems = list(conflicts(config))
    if problems:
        raise ConfigError("; ".join(problems))


def notes(config: RunConfig) -> list[str]:
    """One-line remarks on what is legal but may not be meant."""
    warmup, steps = config.optimizer.warmup, config.run.steps
    if warmup < steps:
        return []
    reached = "comes to its peak at the last step" if warmup == steps else "never comes to its peak"
    return [
        f"the warm-up of {warmup} steps takes the whole run of {steps}: the learning rate {reached}"
    ]


def values(config: RunConfig) -> dict[str, Any]:
    """Every option by key, such as {"model.layers": 4}; `from_values` takes it back."""
    return {key: config.value(option) for key, option in OPTIONS.items()}


def from_values(stored: Mapping[str, Any]) -> RunConfig:
    """The configuration of what `values` gave, as a checkpoint keeps it.

    Raises:
        ConfigError: an unknown key, or values that are refused.
    """
    unknown = [key for key in stored if key not in OPTIONS]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}{did_you_mean(unknown[0], OPTIONS)}")
    config = _build(stored)
    check(config)
    return config


def to_toml(config: RunConfig) -> str:
    """A TOML file of every option: resolve(file=…) of it gives an equal configuration."""
    return write(values(config))


def _build(given: Mapping[str, Any]) -> RunConfig:
    """The defaults, with the given values by key in their place."""
    config = RunConfig()
    for key, value in given.items():
        section, name = key.split(".")
        group = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: group})
    return config


def _from_preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f"; there are {', '.join(PRESETS)}"
        raise ConfigError(f"--preset: unknown preset {name!r}{hint}")
    return PRESETS[name]
