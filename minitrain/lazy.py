"""Packages whose names load on first use, so that an import costs only what is used of it."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any


def attribute(package: str, names: Mapping[str, Collection[str]], name: str) -> Any:
    """The attribute of a package that one of its modules defines; for its `__getattr__`.

    names: by module of the package, the names that it gives the package.
    """
    for module, given in names.items():
        if name in given:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
