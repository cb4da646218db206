"""What a rank of a pipeline is told to do, one small integer an instruction.

An instruction is (kind, micro-batch, chunk). A schedule has a list of them for each rank; sends
and receives follow from it and the route. As tuples, 512 ranks × 4096 micro-batches took 0.8 GB.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from minitrain.errors import UserError
from minitrain.schedules.route import Route

# Zero Bubble's names: F; B is its "backward for inputs" and W its "backward for weights". Here B is
# the whole backward, as in 1F1B, and I the part for inputs.
FORWARD, BACKWARD, BACKWARD_INPUTS, BACKWARD_WEIGHTS = range(4)
LETTERS = "FBIW"

KIND_MASK = 0b111
CHUNK_SHIFT = 3
CHUNK_MASK = 0xFFF
MICRO_BATCH_SHIFT = 15


def pack(kind: int, micro_batch: int, chunk: int = 0) -> int:
    """The instruction as one integer."""
    return micro_batch << MICRO_BATCH_SHIFT | chunk << CHUNK_SHIFT | kind


def unpack(code: int) -> tuple[int, int, int]:
    """(kind, micro-batch, chunk) of an instruction."""
    return code & KIND_MASK, code >> MICRO_BATCH_SHIFT, code >> CHUNK_SHIFT & CHUNK_MASK


def text(code: int) -> str:
    """As people write it: F0, B3, and with the chunk where it is not the first one, I2.1, W2.1."""
    kind, micro_batch, chunk = unpack(code)
    return f"{LETTERS[kind]}{micro_batch}" + (f".{chunk}" if chunk else "")


def read(word: str) -> int:
    """The instruction that `text` gave.

    Raises:
        UserError: the word is not an instruction.
    """
    found = re.fullmatch(rf"([{LETTERS}])(\d+)(?:\.(\d+))?", word)
    if found is None:
        raise UserError(f"{word!r} is not an instruction; write F0, B3, I2.1 or W2.1")
    return pack(LETTERS.index(found[1]), int(found[2]), int(found[3] or 0))


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order.

    Attributes:
        name: such as 1f1b.
        micro_batches: how many there are.
        route: which rank each virtual stage lies on.
        ranks: for each rank its instructions.
    """

    name: str
    micro_batches: int
    route: Route
    ranks: tuple[array[int], ...]

    @classmethod
    def of(
        cls, name: str, micro_batches: int, route: Route, ranks: Iterable[Iterable[int]]
    ) -> Schedule:
        """A schedule of instructions that are in any kind of list."""
        return cls(name, micro_batches, route, tuple(array("q", codes) for codes in ranks))

    @classmethod
    def read(cls, name: str, micro_batches: int, route: Route, lines: Iterable[str]) -> Schedule:
        """The schedule whose ranks `text` wrote, so that a found one can be kept and run again.

        Raises:
            UserError: a word that is not an instruction. Whether it can be run, `check` says.
        """
        return cls.of(name, micro_batches, route, [map(read, line.split()) for line in lines])

    @property
    def stages(self) -> int:
        """The number of ranks."""
        return self.route.stages

    @property
    def chunks(self) -> int:
        """The number of virtual stages on each rank."""
        return self.route.chunks

    def instructions(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(kind, micro-batch, chunk) of all that a rank does, in order."""
        return map(unpack, self.ranks[rank])

    def text(self, rank: int) -> str:
        """A rank's instructions in words: `F0 F1 B0 B1`."""
        return " ".join(map(text, self.ranks[rank]))


def words_of(schedule: Schedule) -> str:
    """What all ranks do in one text, which `Schedule.read` takes in parts: F0 B0 / F0 B0."""
    return " / ".join(map(schedule.text, range(schedule.stages)))


def one_stage(micro_batches: int) -> Schedule:
    """No pipeline: each micro-batch forward and backward in turn, F0 B0 F1 B1 …"""
    codes = [pack(kind, m) for m in range(micro_batches) for kind in (FORWARD, BACKWARD)]
    return Schedule.of("1f1b", micro_batches, Route.straight(1), [codes])
