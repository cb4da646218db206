"""How an array becomes bytes and is read again: MPI lacks dtypes of ours, and nothing is pickled.

A message is an array's bytes, and with a header the header after them, in one or more parts. A
part of the full length is followed by another, maybe an empty one; a shorter part is the last. So
a receiver that does not know the size finds the end, whether or not there is a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from minitrain.array import Array, digest, from_host, namespace
from minitrain.comm.algorithms.direct import all_gather_pairwise
from minitrain.comm.algorithms.pieces import Pieces
from minitrain.comm.errors import MismatchError
from minitrain.comm.operation import Peers, Steps, call_site, mismatch
from minitrain.comm.transport import DTYPES, shape_of

_MAGIC = 0x6D696E69_74720000

_LENGTH = 512
"""Bytes in which a call and its place are told; a longer text is cut, so its digest goes first."""


def flat(x: Array) -> Array:
    """A contiguous array as one of one axis, a view."""
    return x if x.ndim == 1 else x.reshape(-1)


def as_bytes(x: Array) -> Any:
    """The memory of a contiguous array, as a view."""
    return flat(x).view(np.uint8)


def parts(data: Any, limit: int) -> Sequence[Any]:
    """data cut for MPI; a last part is shorter than the limit, if need be empty."""
    if data.size < limit:
        return (data,)
    return [data[start : start + limit] for start in range(0, data.size + 1, limit)]


def header_of(x: Array) -> Any:
    """What tells a receiver the shape and dtype of x, as bytes."""
    mark = _MAGIC | DTYPES.index(x.dtype) << 8 | x.ndim
    return np.array([*x.shape, mark], np.int64).view(np.uint8)


def decoded(data: Any, like: Array | None, source: int) -> Array:
    """The array that a message's bytes hold, which must look like `like` if that is given.
    The header is looked for first: a short array and its header may be as long as `like`.
    Raises ValueError if it does not, or if neither a header nor `like` tells its shape."""
    x = _by_header(data)
    if x is None:
        if like is not None and data.size == like.nbytes:
            return from_host(data.view(like.dtype).reshape(like.shape), namespace(like))
        expected = "`like` is missing" if like is None else f"{shape_of(like)} was expected"
        raise ValueError(f"rank {source} sent {data.size} bytes without a header, and {expected}")
    if like is None:
        return x
    if x.shape != like.shape or x.dtype != like.dtype:
        raise ValueError(f"expected {shape_of(like)} from rank {source}, which sent {shape_of(x)}")
    return from_host(x, namespace(like))


def _by_header(data: Any) -> Any:
    """The array that the header at the end of the bytes tells; None if they end with none."""
    mark = int.from_bytes(data[-8:].tobytes(), "little")
    number, ndim = divmod(mark ^ _MAGIC, 1 << 8)
    end = data.size - 8 * (1 + ndim)
    if number >= len(DTYPES) or end < 0:
        return None
    dtype, shape = DTYPES[number], data[end:-8].copy().view(np.int64).tolist()
    return data[:end].view(dtype).reshape(shape) if prod(shape) * dtype.itemsize == end else None


def checked(peers: Peers, steps: Steps) -> Steps:
    """steps, after all members have told each other the same call (--check-collectives; thread
    ranks see each other's calls, and always compare them: `ThreadTransport.begin`).
    Cost: (n-1)(α + 512β). Raises MismatchError on every rank that hears of a different call."""
    call, site = peers.call, call_site()
    told = replace(peers, op="check", algorithm="pairwise", purpose="control")
    mark = f"{digest(call):x}"
    texts = Pieces(np.empty(_LENGTH * peers.size, np.uint8), [_LENGTH] * peers.size)
    text = f"{mark}\n{call}\n{site}".encode()[:_LENGTH].ljust(_LENGTH)
    texts[peers.rank][...] = np.frombuffer(text, np.uint8)
    yield from all_gather_pairwise(told, texts)
    for rank in range(peers.size):
        other, theirs, *where = texts[rank].tobytes().decode(errors="replace").rstrip().split("\n")
        if other != mark:
            there = where[0] if where else "a place too long to tell"
            calls = (peers.rank, call, site), (rank, theirs, there)
            raise MismatchError(mismatch(peers.group, *calls))
    return (yield from steps)
