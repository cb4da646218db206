"""NumPy or CuPy: an array's namespace and dtype, random numbers that depend on names, memory.

Nothing here is a setting: the namespace is asked of the array, never of a global, so that one
process can hold arrays of both kinds. Host and device meet only in `to_host` and `from_host`.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  (from then on NumPy knows "bfloat16" by name)
import numpy as np

# One name for an array of either kind. CuPy has no type hints, so it is Any.
Array: TypeAlias = Any

# What bfloat16 is made of in two roundings.
_WIDER = [np.dtype(name) for name in ("float64", "int32", "uint32", "int64", "uint64")]

FLOATS = ("float64", "float32")


def namespace(x: Array) -> Any:
    """The module that x belongs to: numpy or cupy (a Python or NumPy scalar counts as NumPy)."""
    if isinstance(x, (np.ndarray, np.generic, int, float)):
        return np
    return sys.modules[type(x).__module__]  # CuPy's arrays have no __array_namespace__ (14.2)


def to_host(x: Array) -> np.ndarray[Any, Any]:
    """x as a NumPy array; no copy is made of one that already is."""
    return np.asarray(x) if namespace(x) is np else namespace(x).asnumpy(x)


def from_host(x: Array, xp: Any) -> Array:
    """An array, as one of the namespace xp; one that is so already is handed back."""
    return x if namespace(x) is xp else xp.asarray(x)


def accumulator(dtype: Any) -> Any:
    """The dtype in which values of dtype are summed: float32 for floats of at most 32 bits, else
    float64 (in which integers stay exact up to 2**53)."""
    dtype = np.dtype(dtype)
    narrow = dtype.itemsize <= 4 and dtype.kind not in "iub"  # bfloat16's kind is V
    return np.dtype(np.float32 if narrow else np.float64)


def digest(*names: object) -> int:
    """A 128-bit number that depends on the names, their order and nothing else."""
    text = "\x1f".join(str(name) for name in names).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def stream(*names: object) -> np.random.Generator:
    """A random stream that depends on its names alone: stream(seed, "blocks.0.mlp.up.weight").

    Every layout, rank and resumed run that asks for the same names draws the same numbers
    (Philox: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    """
    return np.random.Generator(np.random.Philox(key=digest(*names)))


def cast(x: Array, dtype: Any) -> Array:
    """x in another dtype, rounded once; a copy.

    ml_dtypes makes bfloat16 of float64 by way of float32, which rounds twice: 1 + 2⁻⁸ + 2⁻⁴⁰
    becomes 1 + 2⁻⁸, a tie, and then 1. So the first rounding here is to odd (Boldo and Melquiond
    2008, "Emulation of FMA and correctly rounded sums", section 3): towards 0, with the last bit
    set if anything was cut off, which keeps the second from seeing a tie that is none.
    """
    dtype = np.dtype(dtype)
    if dtype.kind != "V" or namespace(x) is not np or x.dtype not in _WIDER:
        return x.astype(dtype)
    exact = np.atleast_1d(x.astype(np.float64))
    with np.errstate(over="ignore", under="ignore"):
        bits = exact.astype(np.float32).view(np.uint32)
    bits -= np.abs(bits.view(np.float32)) > np.abs(exact)
    bits |= (bits.view(np.float32) != exact) & ~np.isnan(exact)
    return bits.view(np.float32).reshape(x.shape).astype(dtype)


def check_integers(name: str, x: Array) -> Array:
    """x, refused if it is not made of integers: a fraction would be cut off in silence."""
    if x.size and x.dtype.kind not in "iu":  # an empty list is an array of floats
        raise ValueError(f"{name} must be integers, got {x.dtype}")
    return x


def _mix(h: Array) -> Array:
    """MurmurHash3's finalizer, in place: every bit of h comes to depend on every other.

    h is an array, of 0 axes too: NumPy warns when a scalar wraps.
    """
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> 16
    return h


def hash_grid(key: int, *axes: Array) -> Array:
    """Random uint32 for each point of the grid that the index arrays span: shape = their broadcast.

    The value at a point depends on (key, the point's indices) alone, so a rank that holds a part of
    the grid computes that part bitwise. Array arithmetic in uint32 wraps, and wraps alike on every
    device. Axes are folded in from the first to the last, so the cheap ones come first.
    """
    xp = namespace(axes[0])
    h = xp.asarray(key & 0xFFFFFFFF, dtype=np.uint32)
    for depth, axis in enumerate(axes, start=1):
        salt = np.uint32((depth * 0x9E3779B9 + (key >> 32)) & 0xFFFFFFFF)
        axis = check_integers("the indices of a grid", xp.asarray(axis))
        index = _mix(xp.asarray(axis.astype(np.uint32) ^ salt))
        h = _mix(xp.asarray(h ^ index))
    return h


def keep_memory() -> None:
    """Let glibc keep large freed arrays instead of giving them back to the system (Linux only).

    A training step frees and takes the same sizes again and again; faulting the pages in anew
    costs 10 to 17 % of a step. Rank threads must share the main arena for it: what is free at the
    end of any other arena goes back in units of 64 MB, whatever the thresholds are (up to 9000
    faults a step). The constants are M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX of malloc.h.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has no mallopt
        return
    for option, value in ((-1, 1 << 30), (-3, 1 << 30), (-8, 1)):
        mallopt(option, value)
