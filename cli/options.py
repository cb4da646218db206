"""Command-line options made from the configuration's fields, which alone define them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click

from minitrain.train.config.option import NONE, Option
from minitrain.train.config.resolve import DEFAULT, PRESETS, asked, resolve
from minitrain.train.config.sections import OPTIONS, RunConfig
from minitrain.train.config.sources import from_file

from .arguments import Given, given_path
from .groups import GroupedOption

_PATHS = ("data.path", "data.val_path", "data.tokenizer")
_GROUPS = {"data": "text", "loss": "optimizer"}
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


class ConfigSources(NamedTuple):
    """What the command line says of the configuration, in the order of `resolve`'s arguments.

    Attributes:
        preset, file: None where not given.
        sets: texts of --set, such as "optimizer.lr=1e-4".
        flags: texts by `Option.flag`, of the flags that were given only.
    """

    preset: str | None
    file: str | None
    sets: tuple[str, ...]
    flags: dict[str, str]

    def said(self) -> set[str]:
        """The keys that the command line or its file says something of."""
        return set(asked(self.sets, self.flags)) | (
            set(from_file(Path(self.file), OPTIONS)) if self.file else set()
        )

    def resolve(self) -> RunConfig:
        """The configuration.

        Raises:
            ConfigError: one that is refused.
        """
        return resolve(*self)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option of a run to a command, which gets them as `given: ConfigSources`."""
    return _with(command, list(OPTIONS.values()), DEFAULT)


def options_of(options: Iterable[Option], default: str = DEFAULT) -> Callable[[Any], Any]:
    """Add some options of a run, and where their values come from, to a command.

    default: what --help calls the preset where none is given.
    """
    chosen = list(options)

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        return _with(command, chosen, default)

    return add


def _with(command: Callable[..., Any], chosen: list[Option], default: str) -> Callable[..., Any]:
    @functools.wraps(command)
    def with_given(
        *args: Any, preset: str | None, config: str | None, set_: tuple[str, ...], **others: Any
    ) -> Any:
        texts = {option.flag: others.pop(option.flag) for option in chosen}
        flags = {flag: text for flag, text in texts.items() if text is not None}
        return command(*args, given=ConfigSources(preset, config, set_, flags), **others)

    decorators: list[Callable[[Any], Any]] = [
        click.option(
            "--preset",
            type=Given(choices=lambda: PRESETS),
            metavar=f"[{'|'.join(PRESETS)}]",
            help=f"Where the defaults come from. [{default}]",
        ),
        click.option(
            "--config", type=given_path, metavar="FILE", help="Read options from a TOML file."
        ),
        click.option(
            "--set",
            "set_",
            type=Given(choices=lambda: (f"{key}=" for key in OPTIONS)),
            multiple=True,
            metavar="KEY=VALUE",
            help="Such as optimizer.lr=1e-4.",
        ),
        *map(_click_option, chosen),
    ]
    added: Callable[..., Any] = with_given
    for decorator in reversed(decorators):  # --help lists the last one applied first
        added = decorator(added)
    return added


def _click_option(option: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Its texts are read by `resolve`, like those of --set, so that both refuse alike."""
    metavar = f"[{'|'.join(option.choices)}]" if option.choices else _METAVARS[option.kind]
    name = "--" + option.flag.replace("_", "-")
    summary = f"{option.help[0].upper()}{option.help[1:]}. [{_defaults(option)}]"
    files = option.key in _PATHS
    return click.option(
        name,
        option.flag,
        cls=GroupedOption,
        group=_GROUPS.get(option.section, option.section),
        type=Given(files, lambda: option.choices),
        metavar=metavar,
        help=summary,
    )


def _defaults(option: Option) -> str:
    """The default, and that of each preset that has its own: `128; nano: 32`."""
    own = [
        f"; {name}: {values[option.key]}"
        for name, values in PRESETS.items()
        if option.key in values
    ]
    return f"{NONE if option.default is None else option.default}{''.join(own)}"
