"""Arrays on a GPU: when they may be touched, and how they get past an MPI that cannot read them.

A kernel that computes an array may still be running when Python goes on. So before anybody else
reads the array its stream is waited for; and what is received is complete before it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array, namespace
from minitrain.comm.reduction import Combine


def synchronise(x: Array) -> None:
    """Wait until x is computed (at once for NumPy)."""
    xp = namespace(x)
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def readable(x: Array, cuda_aware: bool) -> Array:
    """A GPU array, or a copy of it in pinned host memory, for MPI to read."""
    if cuda_aware:
        synchronise(x)
        return x
    return x.get(out=_pinned(x))  # waits for the stream


def _pinned(x: Array) -> Any:
    """Pinned host memory of the shape and dtype of x: the GPU can copy to and from it by itself."""
    import cupyx

    return cupyx.empty_pinned(x.shape, x.dtype)


class ReceiveBuffer:
    """Where MPI lays down a message of known size, until all of it is there.

    room: out itself, or memory beside it to combine from; pinned host memory for a GPU's array.
    """

    def __init__(self, out: Array, combine: Combine | None, *, cuda_aware: bool = False) -> None:
        self.out, self._combine = out, combine
        self._array = out if combine is None else namespace(out).empty_like(out)
        self.room = self._array
        if not isinstance(out, np.ndarray) and not cuda_aware:
            self.room = _pinned(out)
        elif cuda_aware:
            synchronise(out)  # whoever still reads what it held before

    def settle(self) -> None:
        """The message is there: fill out with it."""
        if self.room is not self._array:
            self._array.set(self.room)
            synchronise(self._array)  # the room may be taken for something else after this
        if self._combine is not None:
            self._combine(self._array, self.out)
