"""The table of placements: for a model and a layout, where every parameter lives and is stepped.

A pure function of the two: no arrays, no ranks. What fills a rank, what reduces its gradients, the
norm, the checkpoint's manifest, the oracle and the planner all read it, so nothing states a cut
twice. Holding nothing of a parameter, or of all of them, is a normal case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import NamedTuple

from minitrain.layout import Layout, LayoutError
from minitrain.nn.config import Config
from minitrain.nn.shapes import ModuleShape
from minitrain.parallel.cuts import EXPERTS, tensor_places
from minitrain.parallel.folds import expert_places, flat_place, folds_of
from minitrain.parallel.placement import Place, Placement, Shape
from minitrain.parallel.stages import chunks_of, schedule_of

DATA_AXES = ("dp", "shard", "cp")
"""Along these ranks have other tokens, so every gradient starts as a partial sum."""


class Entry(NamedTuple):
    """A parameter in the table.

    Attributes:
        shape: of the whole.
        placement: where it lives.
        state: where it is stepped, and so where the optimizer's arrays are: the same, and a flat
            place where ZeRO cuts it; None if it is frozen.
    """

    shape: Shape
    placement: Placement
    state: Placement | None

    @property
    def stepped(self) -> Placement:
        """Where its gradient ends up: where it is stepped, or lives."""
        return self.placement if self.state is None else self.state

    @property
    def unsharded(self) -> Placement:
        """Where it is while a unit computes with it: without the flat place of ZeRO 3."""
        return self.placement.unsharded()


Placements = dict[str, Entry]


def placements(
    config: Config,
    layout: Layout,
    *,
    stages: Sequence[int] | None = None,
    frozen: Collection[str] = (),
) -> Placements:
    """Every parameter of a configuration's model by global name, in the model's order.

    Args:
        stages: blocks of each (virtual) stage of the pipeline, the embedding before the first and
            the head after the last; by cost where None.
        frozen: names or patterns such as "embedding.*" of parameters that are never stepped.

    Raises:
        LayoutError: stages that do not fit; UserError: a pattern that fits no name.
    """
    return dict(_cached(config, layout, None if stages is None else tuple(stages), tuple(frozen)))


@lru_cache(maxsize=8)  # thousands of ranks in one process ask for the same
def _cached(
    config: Config, layout: Layout, stages: tuple[int, ...] | None, frozen: tuple[str, ...]
) -> Placements:
    return table_of(config.modules(), config, layout, stages=stages, frozen=frozen)


def table_of(
    modules: Iterable[ModuleShape],
    config: Config,
    layout: Layout,
    *,
    stages: Sequence[int] | None = None,
    frozen: Collection[str] = (),
) -> Placements:
    """The same for a model that is known by its modules: one's own may be among them."""
    chunks = enumerate(chunks_of(config, layout, stages))
    ranks = {link: rank for rank, own in chunks for chunk in own for link in chunk}
    shapes: dict[str, Shape] = {}
    places: dict[str, Place] = {}
    experts, untrained = set[str](), set[str]()
    on: dict[str, set[int]] = {}
    for module in modules:
        cuts = dict(tensor_places(module.kind, module.shapes, layout.tp)) if layout.tp > 1 else {}
        for part, shape in module.shapes.items():
            name = module.name(part)
            shapes[name] = shape
            on.setdefault(name, set()).add(ranks[module.link])
            experts |= {name} if module.kind in EXPERTS else set()
            untrained |= {name} if part in module.untrained else set()
            if part in cuts:
                places[name] = cuts[part]  # a shared one is cut once
    _check_patterns(frozen, [name for name in shapes if name not in untrained])
    folds = {name: folds_of(layout)["shard"] if name in experts else 1 for name in shapes}
    owned = _owned(shapes, on, folds, layout) if layout.owner else {}
    return {
        name: _entry(
            shape,
            on[name],
            tuple(expert_places(layout)) if name in experts else (),
            places.get(name),
            None if name in untrained else flat_place(layout, folds[name], owned.get(name)),
            layout,
            frozen=name in untrained or _fits(name, frozen),
        )
        for name, shape in shapes.items()
    }


def _owned(shapes: dict[str, Shape], on: dict[str, set[int]], folds: dict[str, int],
           layout: Layout) -> dict[str, int]:  # fmt: skip
    """For each parameter the one rank of the shard axis that steps it, or, of an expert's, the one
    of those that share a piece: of those on the same stages the largest goes first, to the rank
    that has the least."""
    loads: dict[frozenset[int], list[int]] = {}
    found = {}
    for name in sorted(shapes, key=lambda name: -prod(shapes[name])):
        load, fold = loads.setdefault(frozenset(on[name]), [0] * layout.shard), folds[name]
        owner = load.index(min(load)) // fold
        for rank in range(owner * fold, owner * fold + fold):
            load[rank] += prod(shapes[name]) // fold
        found[name] = owner
    return found


def _entry(shape: Shape, ranks: set[int], experts: tuple[Place, ...], tensor: Place | None,
           flat: Place | None, layout: Layout, *, frozen: bool) -> Entry:  # fmt: skip
    """Where one parameter lives and is stepped; places in the order pp, ep, tp, shard.

    Args:
        flat: what ZeRO would add; None: it cuts nothing of it.
    """
    placement = Placement(partial=frozenset(DATA_AXES))
    if layout.pp > 1:
        holds = tuple(0 if rank in ranks else None for rank in range(layout.pp))
        placement = placement.with_place(Place("pp", None, holds))
        if len(ranks) > 1:  # a tied table: both ends of the chain use it
            placement = placement.with_partial("pp")
    for place in (*experts, *([tensor] if tensor else [])):
        placement = placement.with_place(place)
    # Peers along tp that hold one key/value head have other queries; those under sp, what is whole
    # on all of them, other positions.
    if (tensor is None and layout.sp) or (tensor and len(set(tensor.holds)) < len(tensor.holds)):
        placement = placement.with_partial("tp")
    state = placement
    if layout.zero is not None and flat is not None:
        state = placement.with_place(flat)
    if layout.zero == 3:
        placement = state
    return Entry(shape, placement, None if frozen else state)


def _fits(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(patterns: Collection[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(list(names)[:3])
            raise LayoutError(f"no parameter is called {pattern!r}; there are {some}, …")
    if all(_fits(name, patterns) for name in names):
        raise LayoutError(
            f"{', '.join(patterns)} freezes every parameter, so nothing would be trained; leave "
            "some out"
        )


def check_layout(
    layout: Layout,
    config: Config,
    *,
    batch: int | None = None,
    micro_batches: int = 1,
    stages: Sequence[int] | None = None,
    frozen: Collection[str] = (),
) -> None:
    """Refuse a layout that cannot run a model of a configuration's sizes; nothing is sent for it.

    Args:
        batch, micro_batches: sequences of the global batch, and what it is cut into.
        stages: blocks of each (virtual) stage of the pipeline; by cost where None.
        frozen: patterns of the names of parameters that are not trained.

    Raises:
        LayoutError: naming both numbers; experts to cut, of which the model has none; a pattern
            that fits no name, and patterns that fit all.
    """
    schedule_of(layout, micro_batches)
    layout.check(
        batch=batch,
        micro_batches=micro_batches,
        heads=config.heads,
        layers=config.layers,
        vocab=config.vocab,
        context=config.context,
        experts=config.mixture.experts if config.mixture else None,
    )
    if layout.ep > 1 and config.mixture is None:
        raise LayoutError(
            f"layout {layout} cuts experts over {layout.ep} ranks, but the model has none; give it "
            f"some, such as --experts {2 * layout.ep}, or leave ep{layout.ep} out"
        )
    chunks_of(config, layout, stages)
    if frozen:
        placements(config, layout, frozen=frozen)
