"""The configuration of a run, from all that says something of it.

What is given on the command line wins over `--set`, that over a TOML file, that over the preset.
Standard library only, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minitrain.layout import did_you_mean
from minitrain.train.config.conflicts import conflicts, idle
from minitrain.train.config.option import ConfigError
from minitrain.train.config.sections import OPTIONS, RunConfig
from minitrain.train.config.sources import from_file, from_flags, from_set, write

# Small enough for every test, with 8 heads, 6 links and 16 positions for up to 8 ranks an axis.
_NANO = {
    "model.heads": 8,
    "model.width": 32,
    "model.context": 16,
    "data.batch": 24,
}
PRESETS: dict[str, dict[str, Any]] = {"small": {}, "nano": _NANO}
DEFAULT = "small"
ALIASES = {"cpu": "small"}
"""Older names of presets."""


def resolve(
    preset: str | None = None,
    file: str | Path | None = None,
    sets: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The configuration that preset, file, sets and flags give; the later ones win.

    Args:
        preset: a name of PRESETS, or an alias; DEFAULT where None.
        file: a TOML file of sections, such as the config.toml of a run.
        sets: texts such as "optimizer.lr=1e-4".
        flags: values or texts by `Option.flag`, such as {"lr": "1e-4"}. A None is not given;
            the text "none" is.

    Raises:
        ConfigError: one line with the key, the value and where it came from, or every
            broken rule between values.
    """
    given = dict(PRESETS[preset_called(preset)])
    if file is not None:
        given |= from_file(Path(file), OPTIONS)
    said = asked(sets, flags)
    config = from_values(given | said)
    if problems := list(idle(config, said)):
        raise ConfigError("; ".join(problems))
    return config


def asked(sets: Iterable[str] = (), flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values by key that sets and flags give; see `resolve`."""
    said: dict[str, Any] = {}
    for text in sets:
        said |= from_set(text, OPTIONS)
    return said | from_flags(flags or {}, OPTIONS)


def preset_called(name: str | None) -> str:
    """The name in PRESETS that a name or an alias means; DEFAULT where None.

    Raises:
        ConfigError: there is none.
    """
    name = ALIASES.get(name or DEFAULT, name or DEFAULT)
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f"; there are {', '.join(PRESETS)}"
        raise ConfigError(f"--preset: unknown preset {name!r}{hint}")
    return name


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


def to_toml(config: RunConfig, layout: object = None) -> str:
    """A TOML file of every option: resolve(file=…) of it gives an equal configuration; above them
    the layout of its ranks, if it is given."""
    return ("" if layout is None else f'layout = "{layout}"\n\n') + write(values(config))


def _build(given: Mapping[str, Any]) -> RunConfig:
    """The defaults, with the given values by key in their place."""
    config = RunConfig()
    for key, value in given.items():
        section, name = key.split(".")
        group = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: group})
    return config
