"""The way of a micro-batch through the ranks of a pipeline.

The chain [embedding, blocks…, head] is cut into *virtual stages*. Each lies on one rank, as one of
its *chunks*, counted from 0 in the order of the chain. The forward visits the virtual stages in
their order, the backward in the opposite one.

    straight      0 1 2 3                one chunk on each rank
    interleaved   0 1 2 3 0 1 2 3        the last rank hands on to the first
    V             0 1 2 3 3 2 1 0        the turn and both ends of the chain are within a rank
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Route:
    """Which rank each virtual stage lies on.

    Attributes:
        name: straight, interleaved or V.
        ranks: the rank of each virtual stage, in the order of the chain. Every rank from 0 on must
            appear, each equally often.
    """

    name: str
    ranks: tuple[int, ...]

    @classmethod
    def straight(cls, stages: int) -> Route:
        """One chunk on each rank."""
        return cls("straight", tuple(range(stages)))

    @classmethod
    def interleaved(cls, stages: int, chunks: int) -> Route:
        """Over all ranks `chunks` times (Narayanan et al. 2021, section 2.2)."""
        return cls("interleaved", tuple(range(stages)) * chunks)

    @classmethod
    def v(cls, stages: int) -> Route:
        """Over all ranks and back (Qi et al. 2024, section 6): two chunks on each."""
        return cls("V", (*range(stages), *reversed(range(stages))))

    @cached_property
    def stages(self) -> int:
        """The number of ranks."""
        return max(self.ranks) + 1

    @cached_property
    def virtual_stages(self) -> int:
        """The number of pieces that the chain is cut into."""
        return len(self.ranks)

    @cached_property
    def chunks(self) -> int:
        """The number of virtual stages on each rank."""
        return self.virtual_stages // self.stages

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """For each rank its virtual stages: of_rank[rank][chunk]."""
        found: list[list[int]] = [[] for _ in range(self.stages)]
        for stage, rank in enumerate(self.ranks):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """For each virtual stage, which of its rank's chunks it is."""
        return tuple(self.of_rank[rank].index(stage) for stage, rank in enumerate(self.ranks))
