"""Keys of a config.json that must have the value which our models compute with, or none at all."""

from __future__ import annotations

from typing import Any

from minitrain.errors import UserError

_KNOWN_PREFIXES = ("_", "summary_", "output_")


class FamilyError(UserError):
    """A config.json of a model that is not one of ours."""


def check(theirs: dict[str, Any], fixed: dict[str, tuple[Any, ...]], part: str = "") -> None:
    """Refuse another value than those that mean the same to our models, the default first.

    Raises:
        FamilyError: naming the key, its value, and what our models have instead.
    """
    for name, values in fixed.items():
        if theirs.get(name, values[0]) not in values:
            raise FamilyError(
                f"config.json has {part}{name} = {theirs[name]!r}, but the models here have "
                f"{values[0]!r}"
            )


def check_known(theirs: dict[str, Any], known: list[str], part: str = "") -> None:
    """Refuse a key that nobody knows: a model may depend on it.

    Raises:
        FamilyError: naming it.
    """
    for name, value in theirs.items():
        if name not in known and not name.startswith(_KNOWN_PREFIXES):
            raise FamilyError(
                f"config.json has {part}{name} = {value!r:.40}, which minitrain doesn't know; take "
                "it out if nothing that the model computes depends on it"
            )
