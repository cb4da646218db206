"""The one rule by which anything is cut into pieces: np.array_split's. Standard library only.

Pieces are consecutive; the first `length % parts` of them get one more, and pieces may be empty.
So sizes need not divide, and nothing is ever padded.
"""

from __future__ import annotations

from minitrain.errors import UserError


def cut_size(length: int, index: int, parts: int) -> int:
    """How long piece `index` is of 0 … length - 1 cut into `parts`."""
    return length // parts + (index < length % parts)


def cut_sizes(length: int, parts: int) -> list[int]:
    """The lengths of all pieces: cut_sizes(10, 4) is [3, 3, 2, 2]."""
    return [cut_size(length, index, parts) for index in range(parts)]


def cut_span(length: int, index: int, parts: int) -> slice:
    """Where piece `index` lies.

    Raises:
        UserError: there is no such piece.
    """
    if not 0 <= index < parts:
        raise UserError(f"there is no piece {index} of {parts}: pieces count from 0")
    start = index * (length // parts) + min(index, length % parts)
    return slice(start, start + cut_size(length, index, parts))
