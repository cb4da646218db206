"""Arrays on a GPU: when they may be touched, and how they get past an MPI that cannot read them.

A kernel that computes an array may still be running when Python goes on. So before anybody else
reads the array its stream is waited for; and what is received is complete before it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array, namespace


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


def room_for(x: Array, cuda_aware: bool) -> Array:
    """A GPU array, or pinned host memory like it, for MPI to write to; then `settle` it."""
    if cuda_aware:
        synchronise(x)  # whoever still reads what x held before
        return x
    return _pinned(x)


def settle(room: Array, x: Array) -> None:
    """Bring what MPI wrote to room into x."""
    x.set(room)
    synchronise(x)  # the pinned room may be taken for something else after this


def _pinned(x: Array) -> Any:
    """Pinned host memory of the shape and dtype of x: the GPU can copy to and from it by itself."""
    import cupyx

    return cupyx.empty_pinned(x.shape, x.dtype)
