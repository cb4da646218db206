"""How tensor parallelism cuts modules: a table, read by the strategy, the oracle and the planner.

    column       the outputs of a linear are cut: each rank computes some features of all tokens
    row          the inputs of a linear are cut: each rank computes a partial sum of all features
    vocabulary   rows of a table or a head are cut by token id

A column linear needs a whole input, a row linear gives a partial sum; so a module that begins with
the one and ends with the other is entered and left once, however many linears it has (Shoeybi et
al. 2019, "Megatron-LM", section 3). What is cut is an array axis: heads and halves are axes of
their own, so no piece ever mixes queries with keys, or a gate with its value.

A module of one's own says how it is cut, or that nothing of it is, in its class:

    @declared(column("up", axis=1), row("down", axis=0))
    class SquaredReLU(nn.Module): ...

What is in no table is refused: nobody knows whether it works on a part of its features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from minitrain.cut import cut_sizes
from minitrain.parallel.placement import Place, Shape


@dataclass(frozen=True)
class Cut:
    """How a part of a module is cut.

    Attributes:
        part: a linear or table of the module, such as "qkv"; "" for its own weight.
        role: "column", "row" or "vocabulary".
        axis: of the part's weight; a column's bias loses the same one.
        unit: "heads", "kv_heads" where sizes follow the heads of attention; else None.
    """

    part: str
    role: str
    axis: int
    unit: str | None = None

    @property
    def weight(self) -> str:
        """The path of the weight in the module."""
        return f"{self.part}.weight".lstrip(".")

    @property
    def bias(self) -> str:
        """The path of the bias in the module, if it has one."""
        return f"{self.part}.bias".lstrip(".")


def column(part: str, axis: int, unit: str | None = None) -> Cut:
    """A linear of which each rank has some outputs, along an axis of its weight."""
    return Cut(part, "column", axis, unit)


def row(part: str, axis: int, unit: str | None = None) -> Cut:
    """A linear of which each rank has some inputs; its bias is whole, added after the sum."""
    return Cut(part, "row", axis, unit)


def vocabulary(part: str, axis: int = 0) -> Cut:
    """A weight of which each rank has the rows of some token ids."""
    return Cut(part, "vocabulary", axis)


CUTS: dict[str, tuple[Cut, ...]] = {
    "Embedding": (vocabulary("token"),),
    "TokenEmbedding": (vocabulary("token"),),
    "Attention": (column("qkv", 2, "heads"), row("out", 0, "heads")),
    "GroupedAttention": (column("q", 1, "heads"), column("kv", 2, "kv_heads"),
                         row("out", 0, "heads")),
    "MLP": (column("up", 1), row("down", 0)),
    "GatedMLP": (column("gate_up", 2), row("down", 0)),
    "Head": (vocabulary(""),),
}  # fmt: skip
"""Kind of module → what is cut of it."""

POSITIONWISE = {"LayerNorm", "RMSNorm", "Dropout", "Linear", "Block", "LlamaBlock"}
"""Kinds that treat each position by itself, with whole parameters: under sp they see some."""

WHOLE = {"Table", "AttentionCore", "CrossEntropy", "GPT", "Llama"}
"""Kinds that need what they are given whole: parts of those above, the loss, the model itself."""


def kind_of(module: type) -> str | None:
    """The kind of a module class in the tables; None if it is in none.

    Classes of `minitrain.nn` go by their bare names; a subclass of one is not one of them.
    """
    if module in _declared:
        return _declared[module]
    name = module.__qualname__
    known = name in CUTS or name in POSITIONWISE or name in WHOLE or name in _MIXTURE
    return name if known and module.__module__.startswith("minitrain.nn.") else None


EXPERTS: dict[str, tuple[Cut, ...]] = {
    "Experts": (column("up", 2), row("down", 1)),
    "GatedExperts": (column("gate_up", 3), row("down", 1)),
}
"""How each expert of a mixture is cut, by kind: their weights have a row for each expert. What
enters and leaves all of them together is expert parallelism's business."""

_MIXTURE = {"Mixture", "Router", "Gate", "Stack", *EXPERTS}

T = TypeVar("T", bound=type)

_declared: dict[type, str] = {}


def declared(*cuts: Cut) -> Callable[[T], T]:
    """A decorator that says how a module class is cut; without cuts it is position-wise.

    It holds for this class alone: a subclass may compute something else, so it says it again.
    """

    def declare(module: T) -> T:
        kind = f"{module.__module__}.{module.__qualname__}"
        _declared[module] = kind
        if cuts:
            CUTS[kind] = cuts
        else:
            POSITIONWISE.add(kind)
        return module

    return declare


def tensor_places(
    kind: str, shapes: Mapping[str, Shape], ranks: int
) -> Iterator[tuple[str, Place]]:
    """For each parameter of a module that is cut over tp ranks, its path in the module and place.

    Args:
        kind: of the module; one that is in no table has no cuts.
        shapes: of its parameters, whole, by path.
    """
    cuts = CUTS.get(kind) or EXPERTS.get(kind, ())
    heads = {cut.unit: shapes[cut.weight][cut.axis] for cut in cuts if cut.unit}
    units = by_heads(heads["heads"], heads.get("kv_heads"), ranks) if heads else {}
    for cut in cuts:
        holds, sizes = units.get(cut.unit, (tuple(range(ranks)), None))
        yield cut.weight, Place("tp", cut.axis, holds, sizes)
        if cut.role == "column" and cut.bias in shapes:
            axis = cut.axis - (len(shapes[cut.weight]) - len(shapes[cut.bias]))
            yield cut.bias, Place("tp", axis, holds, sizes)


Unit = tuple[tuple[int, ...], tuple[int, ...]]  # the piece of each rank, the pieces' sizes


def by_heads(heads: int, kv_heads: int | None, ranks: int) -> dict[str | None, Unit]:
    """How query heads and key/value heads are cut: unit -> (holds, sizes).

    With at least as many key/value heads as ranks these are cut, and their queries go with them.
    With fewer, each is held by several ranks, which share its queries among them: 6 queries of 2
    key/value heads on 4 ranks are 2, 1 | 2, 1 queries, and the first two ranks hold head 0.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    group, everyone = heads // kv_heads, tuple(range(ranks))
    if kv_heads >= ranks:
        sizes = tuple(cut_sizes(kv_heads, ranks))
        queries = tuple(size * group for size in sizes)
        return {"heads": (everyone, queries), "kv_heads": (everyone, sizes)}
    sharers = cut_sizes(ranks, kv_heads)
    queries = tuple(size for count in sharers for size in cut_sizes(group, count))
    holds = tuple(head for head, count in enumerate(sharers) for _ in range(count))
    return {"heads": (everyone, queries), "kv_heads": (holds, (1,) * kv_heads)}
