"""What CuPy has of NumPy: names, methods and keywords, read from an installed CuPy (no GPU needed).

`python tests/cupy_names.py` in an environment with CuPy writes them to cupy_names.json, beside this
file; where that exists it keeps only what the installed version has as well, so that running it
with the oldest and the newest supported CuPy leaves what can be relied on. The stand-in for CuPy
refuses everything else.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".json")
# Names that NumPy lacks and the project uses.
EXTRA = ("asnumpy", "cuda")

# Kind ("functions", "ufuncs", "methods", "others") -> name -> its keywords, or a ufunc's methods.
Names = dict[str, dict[str, list[str]]]


def names(cupy: Any) -> Names:
    """What this CuPy has."""
    found: Names = {"functions": {}, "ufuncs": {}, "methods": {}, "others": {}}
    for name in dir(cupy):
        value = getattr(cupy, name)
        if name.startswith("_") or not (hasattr(np, name) or name in EXTRA):
            continue
        if isinstance(value, cupy.ufunc):
            found["ufuncs"][name] = [m for m in ("at", "outer", "reduce") if hasattr(value, m)]
        elif callable(value) and not isinstance(value, type):
            found["functions"][name] = keywords(value)
        else:
            found["others"][name] = []
    for name in dir(cupy.ndarray):
        if not name.startswith("_") and hasattr(np.ndarray, name):
            found["methods"][name] = keywords(getattr(cupy.ndarray, name))
    return found


def keywords(function: Any) -> list[str]:
    """The parameters that a function names, from its signature or the first line of its help."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled
        return _from_help(function)
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        named += _from_help(function)
    return named


def _from_help(function: Any) -> list[str]:
    first = (inspect.getdoc(function) or "").partition("\n")[0]
    inside = re.search(r"\((.*)\)", first)
    return re.findall(r"(\w+)=", inside.group(1)) if inside else []


def common(a: Names, b: Names) -> Names:
    """What both have."""
    return {
        kind: {
            name: [k for k in given if k in b[kind][name]]
            for name, given in a[kind].items()
            if name in b[kind]
        }
        for kind in a
    }


def load() -> Names:
    """The committed list."""
    stored: Names = json.loads(FILE.read_text())
    return stored


def write(found: Names) -> None:
    """Write the list, a name a line."""
    kinds = []
    for kind, entries in found.items():
        lines = ",\n".join(
            f"  {json.dumps(n)}: {json.dumps(k)}" for n, k in sorted(entries.items())
        )
        kinds.append(f"{json.dumps(kind)}: {{\n{lines}\n}}")
    FILE.write_text("{\n" + ",\n".join(kinds) + "\n}\n")


if __name__ == "__main__":
    import cupy as installed

    here = names(installed)
    write(common(load(), here) if FILE.exists() else here)
