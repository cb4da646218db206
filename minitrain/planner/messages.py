"""Bytes that all ranks of our own runs send in a step: by mesh axis and purpose, to the byte.

Payload only, as the ledger has it. Over all n ranks of a group

    all-reduce of V bytes                     2(n-1)·V; up to SMALL bytes by doubling, see there
    reduce-scatter to, all-gather of V bytes  (n-1)·V each

whatever n divides. So nothing here depends on which algorithm is chosen, nor on the buckets' size.
`zero.py`, `tensor.py`, `sequence.py`, `pipeline.py` and `data.py` in parallel/ say what is sent and
why; here it is added up, from the same table of placements and the same plans of reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

from minitrain.layout import AXES, Layout
from minitrain.nn.config import Config
from minitrain.parallel.plan import Plan, kinds_of, plan_of
from minitrain.parallel.stages import chunks_of, route_of
from minitrain.parallel.table import DATA_AXES, Placements, placements
from minitrain.planner.memory import BYTES, check_covered, check_dense, elements

SMALL = 1024  # bytes up to which an all-reduce goes by doubling: comm.algorithms.choose.SMALL
NUMBER = 8  # bytes of a scalar that ranks agree on
ALIKE, COUNTS, LOSS = 3, 5, 1  # numbers of the check of a batch, of its tokens, of its loss

Sent = dict[tuple[str, str], int]
"""Mesh axis and purpose → bytes."""

Sums = Iterator[tuple[str, str, int]]


class Spot(NamedTuple):
    """A rank's place on the axes of a mesh."""

    coordinates: Mapping[str, int]
    sizes: Mapping[str, int]


def sent(
    config: Config,
    layout: Layout,
    *,
    batch: int,
    length: int,
    micro_batches: int = 1,
    dtype: str = "float32",
    recompute: str = "none",
    stages: Sequence[int] | None = None,
    frozen: Collection[str] = (),
    smoothing: float = 0.0,
) -> Sent:
    """What all ranks send in a step, the norm of the gradient and the update included.

    Args:
        batch, length: sequences of the step, and tokens of each.
        recompute, dtype, stages, frozen: as for `parallelize`. Activations are counted as if all
            was trained.
        smoothing: of labels; above 0 the loss needs one more number a token.

    Raises:
        LayoutError: axes that no run has confirmed yet.
    """
    check_covered(layout, "cp", "ep")
    check_dense(config)
    table = placements(config, layout, stages=stages, frozen=frozen)
    tokens = batch // (micro_batches * layout.data_ranks) * length
    step = _Step(
        config, layout, table, stages=stages, micro_batches=micro_batches, tokens=tokens,
        item=BYTES[dtype],
    )  # fmt: skip
    sums = [*step.scalars(smoothing > 0), *step.activations(recompute), *step.stages_of()]
    if dtype == "float16":  # a verdict on overflow
        sums.append(("world", "scalar", all_reduce(layout.size, NUMBER)))
    for rank in range(layout.size):
        sums += step.gradients(layout.coordinates(rank))
        if layout.zero == 3:
            sums += step.gathered(layout.coordinates(rank), recompute)
    return total(sums)


def total(sums: Iterable[tuple[str, str, int]]) -> Sent:
    """Bytes by axis and purpose; what is not sent is not there."""
    found: Counter[tuple[str, str]] = Counter()
    for axis, purpose, nbytes in sums:
        found[axis, purpose] += nbytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def all_reduce(ranks: int, nbytes: int, *, halves: bool = False) -> int:
    """Bytes of all ranks together.

    Doubling: a power of two of the ranks swap all that they have, log₂ times; each of the others
    hands its own over before, and gets the sum after. Not for halves, whose sums are wider.
    """
    if nbytes > SMALL or halves:
        return 2 * (ranks - 1) * nbytes
    power = 1 << (ranks.bit_length() - 1)
    return (power * (power.bit_length() - 1) + 2 * (ranks - power)) * nbytes


class _Step:
    """A step, with what its formulas share.

    Attributes:
        tokens: of a micro-batch on a data rank.
        item, wide: bytes of an activation, and of a gradient.
    """

    def __init__(self, config: Config, layout: Layout, table: Placements, *,
                 stages: Sequence[int] | None, micro_batches: int, tokens: int,
                 item: int):  # fmt: skip
        self.config, self.layout, self.table = config, layout, table
        self.micro_batches, self.tokens = micro_batches, tokens
        self.item, self.wide = item, max(4, item)
        self.sizes = {axis: getattr(layout, axis) for axis in AXES}
        self.stream = tokens * config.width * item  # b·s·h
        self.chunks = chunks_of(config, layout, stages)

    def scalars(self, smoothing: bool) -> Sums:
        """Numbers that ranks agree on: of the batch, its loss and its norm; of a token's loss."""
        for axes, numbers in ((("pp", "cp", "tp"), ALIKE), (DATA_AXES, COUNTS),
                              (("dp", "pp", "shard", "cp"), LOSS)):  # fmt: skip
            yield self._in_groups(axes, numbers)
        cut = {
            place.mesh_axis
            for entry in self.table.values()
            for place in entry.stepped.places
            if len(set(place.holds)) > 1
        }
        for axis in cut:
            yield self._in_groups((axis,), len(self.table))
        token, tp = self.tokens * self.wide, self.layout.tp
        numbers = all_reduce(tp, token) + all_reduce(tp, (2 + smoothing) * token)
        yield "tp", "scalar", self.layout.data_ranks * self.micro_batches * numbers

    def _in_groups(self, axes: tuple[str, ...], numbers: int) -> tuple[str, str, int]:
        """An all-reduce of some numbers in each group along some axes."""
        size = prod(self.sizes[axis] for axis in axes)
        nbytes = self.layout.size // size * all_reduce(size, numbers * NUMBER)
        return label({axis: self.sizes[axis] for axis in axes}), "scalar", nbytes

    def activations(self, recompute: str) -> Sums:
        """Four all-reduces of b·s·h a layer, one for the embedding and one for the head; two more
        a layer that is computed again. Under sp each is two halves."""
        tp, layers = self.layout.tp, self.config.layers
        count = 4 * layers + 2 + (2 * layers if recompute == "full" else 0)
        halves = self.layout.sp or self.item == 2
        each = all_reduce(tp, self.stream, halves=halves)
        yield "tp", "activation", self.layout.data_ranks * self.micro_batches * count * each

    def stages_of(self) -> Sums:
        """b·s·h over each boundary between stages of two ranks, and as much back."""
        crossings = sum(a != b for a, b in pairwise(route_of(self.layout).ranks))
        copies = self.layout.data_ranks * (1 if self.layout.sp else self.layout.tp)
        yield "pp", "activation", 2 * crossings * self.micro_batches * copies * self.stream

    def gradients(self, at: Mapping[str, int]) -> Sums:
        """The groups that this rank is the first of: gradients, and, after ZeRO's step, weights."""
        for plan, names in self._messages(at):
            entries = [self.table[name] for name in names]
            living = sum(elements(entry.shape, entry.placement, at) for entry in entries)
            stepped = sum(elements(entry.shape, entry.state, at) for entry in entries)
            axis, sharers = plan.scatter or ("", ())
            if sharers and at[axis] == sharers[0]:
                others = len(sharers) - 1
                passes = self.micro_batches * len(plan.chunks) if self.layout.zero == 2 else 1
                yield axis, "gradient", passes * others * living * self.wide
                yield axis, "parameter", others * living * self.item
            for peers in plan.sums:
                if all(at[axis] == same[0] for axis, same in peers):
                    ranks = {axis: len(same) for axis, same in peers}
                    nbytes = all_reduce(prod(ranks.values()), stepped * self.wide)
                    yield label(ranks), "gradient", nbytes

    def _messages(self, at: Mapping[str, int]) -> Iterator[tuple[Plan, list[str]]]:
        """Parameters of this rank that are reduced alike and lie side by side (flat.py)."""
        here = Spot(at, self.sizes)
        plans = {
            name: plan_of(self.table[name], here, frozenset(chunks))
            for name, chunks in self._users(at).items()
        }
        kinds = kinds_of(plans)
        order = sorted(plans, key=lambda name: (not self._decays(name), kinds[name]))
        trained = [name for name in order if plans[name]]
        for plan, alike in groupby(trained, plans.__getitem__):
            assert plan is not None
            yield plan, list(alike)

    def _decays(self, name: str) -> bool:
        return len(self.table[name].shape) > 1 and not name.endswith("bias")

    def _users(self, at: Mapping[str, int]) -> dict[str, set[int]]:
        """The chunks of a rank that use each of its parameters."""
        of_link = {
            link: number for number, chunk in enumerate(self.chunks[at["pp"]]) for link in chunk
        }
        found: dict[str, set[int]] = {}
        for module in self.config.modules():
            if module.link in of_link:
                for part in module.shapes:
                    found.setdefault(module.name(part), set()).add(of_link[module.link])
        return found

    def gathered(self, at: Mapping[str, int], recompute: str) -> Sums:
        """ZeRO 3, along shard: weights before each use and where the backward reads them, and
        their gradients after each; the first rank counts for all."""
        if at["shard"]:
            return
        here = {link for chunk in self.chunks[at["pp"]] for link in chunk}
        others, kept = self.sizes["shard"] - 1, set[str]()
        for module in (module for module in self.config.modules() if module.link in here):
            again = recompute == "full" and module.path.startswith("blocks.")
            for name in map(module.name, module.shapes):
                entry = self.table[name]
                size = others * elements(entry.shape, entry.unsharded, at)
                # A table's backward reads nothing, nor does a bias's; a block's replay reads all.
                reads = again or not (module.link == 0 or name.endswith("bias"))
                times = (1 + reads) * self.micro_batches
                if self.layout.keep:
                    times = int(name not in kept)
                    kept.add(name)
                yield "shard", "parameter", times * size * self.item
                if entry.state is not None:
                    yield "shard", "gradient", self.micro_batches * size * self.wide


def label(ranks: Mapping[str, int]) -> str:
    """What the ledger calls a group: the axes along which it has more than one rank."""
    above = [axis for axis in AXES if ranks.get(axis, 1) > 1]
    return "+".join(above or list(ranks)[:1])
