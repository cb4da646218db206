"""Where the values of options come from: a TOML file, `--set`, flags; and the file they go to.

Every refusal is one line that names the source, the key and the value.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from minitrain.layout import did_you_mean
from minitrain.train.config.option import NONE, ConfigError, Option

OptionTable: TypeAlias = Mapping[str, Option]


def from_file(path: Path, options: OptionTable) -> dict[str, Any]:
    """The values by key of a TOML file of sections."""
    source = f"--config {path}"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        twice = "; a key or section may be given once only" if _doubled(error) else ""
        raise ConfigError(f"{source} is not a TOML file: {error}{twice}") from None
    layout = tree.pop("layout", "dp1")  # which is of the ranks; see `layout_in`
    if not isinstance(layout, str):
        raise ConfigError(f'{source}: layout must be words such as "dp2,tp2", not {layout!r}')
    if not tree:
        raise ConfigError(f"{source} sets nothing; give it lines such as [optimizer] and lr = 1e-4")
    values = {}
    for section, group in tree.items():
        for name, value in _group(section, group, source, options).items():
            option = _find(f"{section}.{name}", source, options)
            values[option.key] = _checked(option, value, source)
    return values


def layout_in(path: Path) -> str | None:
    """The layout that a TOML file of sections says above these; None if it says none, or is a pipe,
    which has been read."""
    if not path.is_file():
        return None
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("layout")
    except (OSError, ValueError, RecursionError):  # `from_file` tells
        return None
    return found if isinstance(found, str) else None


def _doubled(error: Exception) -> bool:
    """Whether tomllib complains of a second value for a key, which its words do not make plain."""
    return "overwrite" in str(error) or "twice" in str(error)


def _group(section: str, group: Any, source: str, options: OptionTable) -> dict[str, Any]:
    """The keys of one section of a file, once it is known to be a section."""
    sections = list(dict.fromkeys(option.section for option in options.values()))
    if section in sections and isinstance(group, dict):
        return group
    if section in sections:
        raise ConfigError(
            f"{source}: {section} must be a section, [{section}] above lines of key = value, "
            f"not {group!r}"
        )
    if isinstance(group, dict):
        hint = did_you_mean(section, sections) or f" (there are {', '.join(sections)})"
        raise ConfigError(f"{source}: unknown section [{section}]{hint}")
    return {_find(section, source, options).name: group}


def from_set(text: str, options: OptionTable) -> dict[str, Any]:
    """The value by key of one `--set section.name=value`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text} has no value; write --set {text}=VALUE")
    option = _find(key.strip(), "--set", options)
    return {option.key: _checked(option, option.read(value.strip()), "--set")}


def from_flags(flags: Mapping[str, Any], options: OptionTable) -> dict[str, Any]:
    """The values by key of the flags that were given; one that is None was not."""
    by_flag = {option.flag: option for option in options.values()}
    values = {}
    for flag, value in flags.items():
        if flag not in by_flag:
            raise ConfigError(f"unknown flag {flag!r}{did_you_mean(flag, by_flag)}")
        if value is not None:
            option = by_flag[flag]
            value = option.read(value) if isinstance(value, str) else value
            values[option.key] = _checked(option, value, f"--{flag.replace('_', '-')}")
    return values


def _checked(option: Option, value: Any, source: str) -> Any:
    try:
        return option.check(value)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _find(key: str, source: str, options: OptionTable) -> Option:
    """The option of a key, or a refusal with the nearest one."""
    if key in options:
        return options[key]
    name = key.rpartition(".")[2].replace("-", "_")
    same = [option.key for option in options.values() if name in (option.name, option.flag)]
    hint = f"; did you mean {same[0]}?" if same else did_you_mean(key, options)
    example = next(iter(options))
    raise ConfigError(
        f"{source}: unknown key {key!r}{hint or f'; a key is section.name, such as {example}'}"
    )


def write(values: Mapping[str, int | float | str | None]) -> str:
    """Values by key as a TOML file of sections."""
    lines = []
    for section, keys in groupby(values, lambda key: key.partition(".")[0]):
        lines.append(f"[{section}]")
        lines += [f"{key.partition('.')[2]} = {_toml(values[key])}" for key in keys]
        lines.append("")
    return "\n".join(lines)


def _toml(value: int | float | str | None) -> str:
    if value is None or isinstance(value, str):
        # JSON's text is TOML's, but for the one control character that JSON leaves as it is.
        return json.dumps(value or NONE, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
