"""What an option of a run is: made from a dataclass field, the only place that defines it.

A field's type says which values it takes: `int`, `float` or `str`, `Literal` for a choice,
`Annotated` with a Rule for a range, `| None` for what can be switched off. Flags, `--set` and TOML
files all go through the same `Option`. Standard library only: `--help` must be quick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from minitrain.errors import UserError
from minitrain.layout import did_you_mean
from minitrain.schedules import instruction
from minitrain.schedules.times import read_times

# TOML has no null, and a flag is text: this is how a None is written in either.
NONE = "none"


class ConfigError(UserError):
    """A configuration that cannot be: an unknown key, a wrong type or value, or an odd pair."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy, in words (after "must be") and as a test."""

    words: str
    holds: Callable[[Any], bool]


Count: TypeAlias = Annotated[int, Rule("a whole number of at least 1", lambda n: n >= 1)]
# Of an array's axis: a longer one is a slip of the keyboard, and NumPy's own counts would overflow.
Size: TypeAlias = Annotated[
    int, Rule("a whole number of at least 1 and below 2^31", lambda n: 1 <= n < 2**31)
]
Natural: TypeAlias = Annotated[int, Rule("a whole number of at least 0", lambda n: n >= 0)]
Positive: TypeAlias = Annotated[float, Rule("a finite number above 0", lambda x: x > 0)]
NotNegative: TypeAlias = Annotated[float, Rule("a finite number of at least 0", lambda x: x >= 0)]
Fraction: TypeAlias = Annotated[
    float, Rule("a number of at least 0 and below 1", lambda x: 0 <= x < 1)
]
Text: TypeAlias = Annotated[
    str, Rule("text that UTF-8 can hold, not empty", lambda t: t != "" and _encodes(t))
]

Numbers: TypeAlias = Annotated[
    str, Rule("whole numbers with commas between, such as 3,4,4,3", lambda t: _counts(t))
]
FourTimes: TypeAlias = Annotated[
    str, Rule("F,B,W or F,B,W,T, times such as 1,1.2,0.8,0.1", lambda t: _is_read(read_times, t))
]
Instructions: TypeAlias = Annotated[
    str,
    Rule(
        "instructions of each stage with / between, such as F0 F1 B0 B1 / F0 B0 F1 B1",
        lambda t: all(_is_read(instruction.read, w) for w in t.replace("/", " ").split()),
    ),
]
Held: TypeAlias = Annotated[float, Rule("a finite number of at least 1", lambda x: x >= 1)]


def setting(default: Any, help: str, flag: str | None = None) -> Any:
    """A field with its default and help; `flag` where the flag is not called as the field is."""
    metadata = {"help": help} if flag is None else {"help": help, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


def _is_read(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except UserError:
        return False
    return True


def _counts(text: str) -> bool:
    return text.isascii() and all(part.strip().isdecimal() for part in text.split(","))


def _encodes(text: str) -> bool:
    """False for lone surrogates, which a file name that is not UTF-8 brings in."""
    return text.encode("utf-8", "replace") == text.encode("utf-8", "surrogatepass")


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a run.

    Attributes:
        section, name: where it lives in the configuration: config.<section>.<name>.
        flag: its name on the command line, without dashes: `weight_decay` for --weight-decay.
        kind: int, float or str.
        choices: the values it takes, where they can be listed.
        rule: what its values satisfy.
        optional: whether None (written "none") is a value.
        default: the value where nothing is said.
        help: one line for people.
    """

    section: str
    name: str
    flag: str
    kind: type
    choices: tuple[str, ...]
    rule: Rule
    optional: bool
    default: Any
    help: str

    @property
    def key(self) -> str:
        """Its name in --set and in messages: section.name."""
        return f"{self.section}.{self.name}"

    def read(self, text: str) -> Any:
        """The value that a text on the command line stands for; what is not a number stays."""
        if self.optional and text == NONE:
            return None
        try:
            return self.kind(text)
        except ValueError:
            return text

    def check(self, value: Any) -> Any:
        """The value, as the option's type, if it is legal.

        Raises:
            ConfigError: "key = value must be …", with the reason where the type alone is wrong.
        """
        if self.optional and value in (None, NONE):
            return None
        # A 1 in TOML stands for 1.0; floats hold whole numbers exactly up to 2**53.
        number = self.kind is float and type(value) is int and abs(value) <= 2**53
        if (type(value) is self.kind or number) and self._holds(self.kind(value)):
            return self.kind(value)
        words = f'{self.rule.words}, or "{NONE}"' if self.optional else self.rule.words
        raise ConfigError(f"{self.key} = {_shown(value)} must be {words}{self._hint(value)}")

    def _holds(self, value: Any) -> bool:
        finite = self.kind is not float or math.isfinite(value)
        return finite and self.rule.holds(value)

    def _hint(self, value: Any) -> str:
        """Why a value that looks right is not: a quoted number, 10.0 for 10, fp16."""
        if self.choices and isinstance(value, str):
            return did_you_mean(value.replace("fp", "float"), self.choices)
        if isinstance(value, str) and type(self.read(value)) is self.kind is not str:
            return "; it is quoted text, so leave out the quotes"
        if self.kind is int and isinstance(value, float) and value.is_integer():
            return f"; write {int(value)}"
        return ""


def _shown(value: Any) -> str:
    """A value on one line, much as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def options_of(config: type) -> dict[str, Option]:
    """The options of a configuration made of sections, by key, in the order of the fields.

    Raises:
        TypeError: two fields with one flag. That is a mistake in the program.
    """
    found: dict[str, Option] = {}
    flags: dict[str, str] = {}
    for section, group in get_type_hints(config).items():
        hints = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            option = _option(section, field, hints[field.name])
            if option.flag in flags:
                raise TypeError(f"{flags[option.flag]} and {option.key} are both --{option.flag}")
            flags[option.flag] = option.key
            found[option.key] = option
    return found


def _option(section: str, field: dataclasses.Field[Any], hint: Any) -> Option:
    inner = [part for part in get_args(hint) if part is not NoneType]
    optional = len(inner) < len(get_args(hint))
    hint = inner[0] if optional else hint
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        kind, rule = str, Rule("one of " + ", ".join(choices), choices.__contains__)
    else:
        choices = ()
        kind, rule = get_args(hint)
    return Option(
        section=section,
        name=field.name,
        flag=field.metadata.get("flag", field.name),
        kind=kind,
        choices=choices,
        rule=rule,
        optional=optional,
        default=field.default,
        help=field.metadata["help"],
    )
