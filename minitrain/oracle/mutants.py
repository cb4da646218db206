"""Known faults, each a bug that real projects shipped, planted to see that they are found.

A mutant is one small change to the parallel code, made for as long as it is planted. The suite
must catch every one; `minitrain verify --fault NAME` shows how.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from minitrain.errors import UserError
from minitrain.layout import did_you_mean
from minitrain.oracle.mutants_data import DATA
from minitrain.oracle.mutants_tensor import TENSOR

Patch = tuple[Any, str, Any]  # owner, attribute, what stands in its place

MUTANTS: dict[str, Patch] = {**DATA, **TENSOR}


def check_name(name: str | None) -> None:
    """Refuse a name that is no fault's; None is none.

    Raises:
        UserError: with the names there are.
    """
    if name is not None and name not in MUTANTS:
        hint = did_you_mean(name, MUTANTS) or f"; there are {', '.join(MUTANTS)}"
        raise UserError(f"unknown fault {name!r}{hint}")


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Inside, the parallel code has the fault of this name; none for None."""
    check_name(name)
    with ExitStack() as stack:
        if name is not None:
            owner, attribute, replacement = MUTANTS[name]
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield
