"""Which layouts can run a model: every way of using so many ranks. Plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from minitrain.errors import UserError
from minitrain.layout import AXES, CP_KINDS, SCHEDULES, Layout
from minitrain.nn.config import Config
from minitrain.parallel.table import check_layout


def layouts(ranks: int, config: Config, *, micro_batches: int = 4) -> Iterator[Layout]:
    """Every layout of exactly so many ranks that can run a configuration's model."""
    folds = range(1, ranks + 1) if config.mixture else (1,)
    for sizes, ep in itertools.product(_factors(ranks, len(AXES)), folds):
        axes: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
        uses = [_uses(axis, ranks) for axis, ranks in axes.items() if ranks > 1]
        for words in itertools.product(*uses):
            how = {name: value for use in words for name, value in use.items()}
            try:
                layout = Layout(**axes, **how, ep=ep)
                check_layout(layout, config, micro_batches=micro_batches)
            except UserError:
                continue
            yield layout


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors, in order."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield first, *rest


def _uses(axis: str, ranks: int) -> list[dict[str, Any]]:
    """The ways to use an axis of more than one rank."""
    flags = (False, True)
    if axis == "pp":
        return [{"schedule": name} for name in SCHEDULES]
    if axis == "shard":
        return [{"zero": stage, "owner": owner, "keep": keep}
                for stage in (1, 2, 3) for owner in flags for keep in flags]  # fmt: skip
    if axis == "cp":
        inner = [n for n in range(2, ranks) if ranks % n == 0]
        rings = [{"cp_kind": kind, "ulysses": n} for kind in ("ring", "zigzag") for n in inner]
        return [{"cp_kind": kind} for kind in CP_KINDS] + rings
    return [{"sp": sp} for sp in flags] if axis == "tp" else [{}]
