"""The table of placements: for a model and a layout, where every parameter lives and is stepped.

A pure function of the two: no arrays, no ranks. What fills a rank, what reduces its gradients, the
norm, the checkpoint's manifest, the oracle and the planner all read it, so nothing states a cut
twice. Holding nothing of a parameter, or of all of them, is a normal case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from minitrain.cut import cut_sizes
from minitrain.layout import Layout, LayoutError
from minitrain.nn.config import Config, ModuleShape
from minitrain.parallel.cuts import tensor_places
from minitrain.parallel.placement import FLAT, Place, Placement, Shape, cut

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


Table = dict[str, Entry]


def placements(
    config: Config,
    layout: Layout,
    *,
    stages: Sequence[int] | None = None,
    frozen: Collection[str] = (),
) -> Table:
    """Every parameter of a configuration's model by global name, in the model's order.

    Args:
        stages: blocks of each pipeline stage, the embedding before the first and the head after
            the last; spread evenly where None.
        frozen: names or patterns such as "embedding.*" of parameters that are never stepped.

    Raises:
        LayoutError: stages that do not fit; UserError: a pattern that fits no name.
    """
    return table_of(config.modules(), config.layers, layout, stages=stages, frozen=frozen)


def table_of(
    modules: Iterable[ModuleShape],
    layers: int,
    layout: Layout,
    *,
    stages: Sequence[int] | None = None,
    frozen: Collection[str] = (),
) -> Table:
    """The same for a model that is known by its modules: one's own may be among them."""
    stage_of = _stages(layers, layout, stages)
    shapes: dict[str, Shape] = {}
    places: dict[str, Place] = {}
    on: dict[str, set[int]] = {}
    for module in modules:
        cuts = dict(tensor_places(module.kind, module.shapes, layout.tp))
        for part, shape in module.shapes.items():
            name = module.name(part)
            shapes[name] = shape
            on.setdefault(name, set()).add(stage_of[module.link])
            if part in cuts:
                places[name] = cuts[part]  # a shared one is cut once
    _check_patterns(frozen, shapes)
    return {
        name: _entry(name, shape, on[name], places.get(name), layout, frozen)
        for name, shape in shapes.items()
    }


def _entry(name: str, shape: Shape, stages: set[int], tensor: Place | None, layout: Layout,
           frozen: Collection[str]) -> Entry:  # fmt: skip
    """Where one parameter lives and is stepped; places in the order pp, tp, shard."""
    placement = Placement(partial=frozenset(DATA_AXES))
    if layout.pp > 1:
        holds = tuple(0 if stage in stages else None for stage in range(layout.pp))
        placement = placement.with_place(Place("pp", None, holds))
        if len(stages) > 1:  # a tied table: each stage uses it
            placement = placement.with_partial("pp")
    if tensor is not None:
        placement = placement.with_place(tensor)
    # Peers along tp that hold one key/value head have other queries; those under sp, what is whole
    # on all of them, other positions.
    if (tensor is None and layout.sp) or (tensor and len(set(tensor.holds)) < len(tensor.holds)):
        placement = placement.with_partial("tp")
    state = placement
    if layout.shard > 1:
        state = placement.with_place(cut("shard", FLAT, layout.shard))
    if layout.zero == 3:
        placement = state
    return Entry(shape, placement, None if _fits(name, frozen) else state)


def stage_sizes(layers: int, layout: Layout, stages: Sequence[int] | None = None) -> list[int]:
    """Blocks of each pipeline stage.

    Raises:
        LayoutError: stages of another number than pp, or that don't make up the layers.
    """
    if stages is None:
        return cut_sizes(layers, layout.pp)
    if len(stages) != layout.pp or sum(stages) != layers or min(stages) < 0:
        raise LayoutError(
            f"stages {','.join(map(str, stages))} have {sum(stages)} blocks on {len(stages)} "
            f"stages, but the model has {layers} blocks and the layout pp{layout.pp}; give "
            f"{layout.pp} numbers that add up to {layers}"
        )
    return list(stages)


def _stages(layers: int, layout: Layout, stages: Sequence[int] | None) -> list[int]:
    """The stage of each link of the chain: the embedding, the blocks, the head."""
    sizes = stage_sizes(layers, layout, stages)
    return [0, *(stage for stage, size in enumerate(sizes) for _ in range(size)), layout.pp - 1]


def own_links(
    layers: int, layout: Layout, stage: int, stages: Sequence[int] | None = None
) -> range:
    """Which links of the chain a pipeline stage keeps."""
    found = [link for link, of in enumerate(_stages(layers, layout, stages)) if of == stage]
    return range(found[0], found[-1] + 1) if found else range(0)


def _fits(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(patterns: Collection[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(list(names)[:3])
            raise LayoutError(f"no parameter is called {pattern!r}; there are {some}, …")
