"""What a layout is: the sizes of the mesh axes and how each is used. Standard library only.

A layout is written as comma-separated words in any order: `dp2,pp2,1f1b,shard2,zero3,tp2,sp`.
An axis that is not written has size 1. Batch, micro-batches and precision belong to the run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from minitrain.errors import UserError

# The last axis is the fastest: neighbours in the world are tp peers, which talk the most.
AXES = ("dp", "pp", "shard", "cp", "tp")
CP_KINDS = ("ring", "zigzag", "ulysses", "gather")

# These hold several pieces of the model on a stage: two where the layout does not say.
_CHUNKED = ("interleaved", "zb-v", "v-half", "v-min", "dualpipe-v")
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", *_CHUNKED, "zb-auto")
# A word that says how an axis is used needs that axis beside it: `dp4,zero3` is no ZeRO over dp.
_OWNER = {
    **dict.fromkeys(("zero", "owner", "keep"), "shard"),
    **dict.fromkeys(("schedule", "chunks"), "pp"),
    **dict.fromkeys(("cp_kind", "ulysses"), "cp"),
    "sp": "tp",
}
_DEFAULTS = (("shard", "zero", 1), ("pp", "schedule", "1f1b"), ("cp", "cp_kind", "zigzag"))
_WORDS: dict[str, tuple[str, object]] = {
    "sp": ("sp", True),
    "owner": ("owner", True),
    "keep": ("keep", True),
    **{word: ("schedule", word) for word in SCHEDULES},
    **{word: ("cp_kind", word) for word in CP_KINDS},
}
_NUMBERED = (*AXES, "ep", "zero", "chunks", "ulysses")


class LayoutError(UserError):
    """A layout that cannot be: malformed, or not fitting the model, the batch or the ranks."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence ending such as `; did you mean tp2?`, or "" when nothing known is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes (numbers of ranks) and how each axis is used.

    Attributes:
        dp: data-parallel replicas.
        pp: pipeline stages.
        shard: ranks that optimizer state (zero 1), gradients (2) and parameters (3) are cut over.
        cp, tp: ranks that a sequence is cut over, and that weights are cut over.
        ep: ranks that experts are cut over, folded into dp × shard × cp: no ranks of its own.
        zero: the ZeRO stage; 1 where shard > 1 and none is given.
        owner: whole tensors are stepped by one rank each, instead of a piece by every rank.
        keep: under zero 3, gathered parameters are kept until the step's end.
        sp: sequence parallelism between the tensor-parallel regions.
        schedule: the pipeline schedule, one of SCHEDULES; 1f1b where pp > 1 and none is given.
        chunks: pieces of the model on each stage; at least 2 under the schedules that need them.
        cp_kind: one of CP_KINDS; zigzag where cp > 1 and none is given.
        ulysses: cp ranks that exchange positions for heads inside each place of a ring.
        order: the axes from the slowest to the fastest; it only decides which links carry what.

    Raises:
        LayoutError: sizes below 1 and unknown words, all in one message.
    """

    dp: int = 1
    pp: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int | None = None
    owner: bool = False
    keep: bool = False
    sp: bool = False
    schedule: str | None = None
    chunks: int = 1
    cp_kind: str | None = None
    ulysses: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        _refuse("malformed layout", list(_malformed(self)))
        for axis, how, default in _DEFAULTS:
            if getattr(self, axis) > 1 and getattr(self, how) is None:
                object.__setattr__(self, how, default)
        if self.schedule in _CHUNKED and self.chunks == 1:
            object.__setattr__(self, "chunks", 2)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that a string such as `dp2,tp2,sp` describes; case does not matter.

        Raises LayoutError for an unknown word, what is set twice, or zero3 without its axis.
        """
        values: dict[str, Any] = {}
        for word in text.lower().split(","):
            name, value = _read(word.strip())
            if name in values:
                raise LayoutError(f"layout {text!r} sets {name} twice; keep one of the two")
            values[name] = value
        for how, axis in _OWNER.items():
            if how in values and axis not in values:
                raise LayoutError(
                    f"layout {text!r} says how {axis} is used ({how} = {values[how]}) but not how "
                    f"many ranks it has; add {axis} with a number, such as {axis}2"
                )
        return cls(**values)

    def __str__(self) -> str:
        """The canonical words, every axis above 1 with its how: parse(str(layout)) == layout."""
        hows = {
            "pp": [self.schedule, f"chunks{self.chunks}" if self.chunks != 1 else None],
            "shard": [
                f"zero{self.zero}" if self.zero is not None else None,
                "owner" if self.owner else None,
                "keep" if self.keep else None,
            ],
            "cp": [self.cp_kind, f"ulysses{self.ulysses}" if self.ulysses != 1 else None],
            "tp": ["sp" if self.sp else None],
        }
        words = []
        for axis in (*AXES, "ep"):
            how = [word for word in hows.get(axis, []) if word]
            if how or getattr(self, axis) != 1:
                words += [f"{axis}{getattr(self, axis)}", *how]
        if self.order != AXES:
            words.append("order=" + "-".join(self.order))
        return ",".join(words) or "dp1"

    @property
    def size(self) -> int:
        """The number of ranks: the product of the axes."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """The number of parts that each micro-batch is cut into: dp × shard."""
        return self.dp * self.shard

    @property
    def exchange(self) -> int:
        """How many cp ranks exchange positions for heads: the innermost ones."""
        return self.cp if self.cp_kind == "ulysses" else self.ulysses

    @property
    def ring(self) -> int:
        """How many pieces of a sequence there are, each of `exchange` ranks."""
        return self.cp // self.exchange

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a world rank lies on each axis: row-major in `order`, the last axis fastest."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is not in layout {self}, which has {self.size} rank(s)")
        place = {}
        for axis in reversed(self.order):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank that lies at some coordinates."""
        rank = 0
        for axis in self.order:
            rank = rank * getattr(self, axis) + coordinates[axis]
        return rank

    def data_index(self, rank: int) -> int:
        """Which part of a micro-batch a world rank computes: the same for its pp, cp, tp peers."""
        place = self.coordinates(rank)
        return place["dp"] * self.shard + place["shard"]

    def check(
        self,
        *,
        ranks: int | None = None,
        batch: int | None = None,
        micro_batches: int = 1,
        heads: int | None = None,
        layers: int | None = None,
        vocab: int | None = None,
        context: int | None = None,
        experts: int | None = None,
    ) -> None:
        """Refuse what cannot run, every violated rule in one LayoutError. None is not asked about.

        Uneven cuts are legal (the first ranks get one more), but no rank may be left with nothing,
        except of a sequence that is cut over cp: one may have fewer positions than pieces.
        A batch is asked to divide evenly, because ranks with fewer sequences would only wait.

        Args:
            ranks: how many ranks there are.
            batch, micro_batches: sequences in the global batch, and what it is cut into.
            heads, layers, vocab, context, experts: sizes of the model.
        """
        sp = self.tp if self.sp else 1
        # The pipeline cuts the chain [embedding, blocks…, head]: two links more than the blocks.
        chain = None if layers is None else layers + 2
        problems = [
            *_misfits(self, self.size if ranks is None else ranks, batch or 0, micro_batches),
            *_too_few(heads, "attention heads", tp=self.tp, ulysses=self.exchange),
            *_too_few(chain, "links (embedding, layers, head)", pp=self.pp, chunks=self.chunks),
            *_too_few(vocab, "vocabulary entries", tp=self.tp),
            *_too_few(context, "positions", sp=sp),
            *_too_few(experts, "experts", ep=self.ep),
        ]
        _refuse(f"layout {self} does not fit", problems)


def _refuse(what: str, problems: list[str]) -> None:
    """One error that lists every problem, or none."""
    if problems:
        raise LayoutError(f"{what}: " + "; ".join(problems))


def _read(word: str) -> tuple[str, object]:
    """The field that one word of a layout sets, and its value."""
    if word in _WORDS:
        return _WORDS[word]
    if word.startswith("order="):
        return "order", tuple(word.removeprefix("order=").split("-"))
    name = word.rstrip("0123456789")
    number = word[len(name) :]
    if name in _NUMBERED and number:
        return name, int(number)
    known = [*_WORDS, *(f"{axis}{number or 2}" for axis in _NUMBERED)]
    hint = did_you_mean(word, known) or "; a layout is words such as dp2,tp2,sp"
    raise LayoutError(f"unknown word {word!r} in a layout{hint}")


def _malformed(layout: Layout) -> Iterator[str]:
    """What is wrong with the fields one by one, whatever model and ranks they meet."""
    for name in (*AXES, "ep", "chunks", "ulysses"):
        value = getattr(layout, name)
        if type(value) is not int or value < 1:
            yield f"{name} is {value!r}, but must be a whole number of at least 1"
    allowed = {"zero": (1, 2, 3), "schedule": SCHEDULES, "cp_kind": CP_KINDS}
    allowed |= dict.fromkeys(("sp", "owner", "keep"), (False, True))
    for name, values in allowed.items():
        value = getattr(layout, name)
        if value not in (None, *values):
            yield f"{name} is {value!r}, but must be one of {', '.join(map(str, values))}"
    if layout.ulysses != 1 and layout.cp_kind in ("ulysses", "gather"):
        yield f"ulysses{layout.ulysses} is for a ring or zigzag; leave it or {layout.cp_kind} out"
    elif layout.ulysses > 1 and layout.cp % layout.ulysses:
        yield f"ulysses{layout.ulysses} does not divide cp{layout.cp}; use one that does"
    if layout.keep and layout.zero != 3:
        yield "keep is about what zero3 gathers; add zero3, or leave keep out"
    if layout.owner and layout.zero == 3:
        yield "owner is for zero1 and zero2: under zero3 every rank keeps a piece; leave owner out"
    if sorted(layout.order) != sorted(AXES):
        yield f"order is {'-'.join(layout.order)}, but must name each of {'-'.join(AXES)} once"


def _misfits(layout: Layout, ranks: int, batch: int, micro_batches: int) -> Iterator[str]:
    """What is wrong with the number of ranks, and with what is cut over the data ranks."""
    product = " × ".join(f"{axis}{getattr(layout, axis)}" for axis in AXES)
    if ranks != layout.size:
        yield (
            f"it needs {layout.size} rank(s) ({product}), but there are {ranks}; "
            f"start {layout.size}, or change an axis so that the product is {ranks}"
        )
    parts = micro_batches * layout.data_ranks
    if batch % parts:
        below = batch // parts * parts
        yield (
            f"batch {batch} does not divide evenly into {parts} parts ({micro_batches} "
            f"micro-batch(es) × {layout.data_ranks} data rank(s)); use "
            + (
                f"a batch of {below} or {below + parts}"
                if below
                else _fewer(batch, micro_batches, parts)
            )
        )
    if (holders := layout.data_ranks * layout.cp) % layout.ep:
        yield (
            f"ep{layout.ep} does not divide the {holders} rank(s) of dp × shard × cp that experts "
            f"are cut over; use an ep that divides {holders}"
        )


def _fewer(batch: int, micro_batches: int, parts: int) -> str:
    """What helps a batch of fewer sequences than parts; a batch may be too large to be meant."""
    fit = gcd(batch, micro_batches)
    fix = "" if fit == micro_batches else f" and {fit} micro-batch(es)"
    larger = f"a batch of {parts}, or " if parts < 2**31 else ""
    return f"{larger}at most {batch // fit} data rank(s){fix}"


def _too_few(have: int | None, things: str, **parts: int) -> Iterator[str]:
    needed = prod(parts.values())
    if have is not None and have < needed:
        cut = " × ".join(f"{name} {count}" for name, count in parts.items() if count > 1)
        yield (
            f"{have} {things} cannot be cut into {needed} parts ({cut}), because some would be "
            f"empty; cut into at most {have}, or give the model at least {needed}"
        )
