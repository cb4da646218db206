"""What the numbers of a model's configuration can be, told by the types of its fields."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from minitrain.errors import UserError


def check_sizes(family: str, config: Any) -> None:
    """Refuse a whole number below 1, a real one that is negative or not finite, and other types.

    A field that may be None is left to be derived from the others then.

    Raises:
        UserError: naming the family, the field and its value.
    """
    for field in fields(config):
        value, kind = getattr(config, field.name), str(field.type)
        if value is None and kind.endswith("None"):
            continue
        if kind.partition(" ")[0] not in _KINDS:  # what is no number says itself what it can be
            continue
        if problem := _problem(kind.partition(" ")[0], value):
            raise UserError(f"{family}: {field.name} must be {problem}, got {value!r}")


def _problem(kind: str, value: Any) -> str | None:
    """What a value of a field of this type must be, if it is not."""
    if kind == "bool" or isinstance(value, bool):
        return None if kind == "bool" == type(value).__name__ else _KINDS[kind]
    if not isinstance(value, Integral if kind == "int" else Real):
        return _KINDS[kind]
    if kind == "int":
        return "at least 1" if value < 1 else None
    return None if 0 <= float(value) < math.inf else "a finite number of at least 0"


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
