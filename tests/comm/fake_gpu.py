"""A stand-in for CuPy whose kernels run late: an operation is only put on its thread's stream.

This module is the namespace of its arrays. Nothing has happened to their memory until the stream
is synchronised. So whoever hands an array to another rank, or to MPI, without waiting for the
stream, hands over garbage; and whoever treats it as a NumPy array gets an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

_threads = threading.local()


def _queue() -> list[Callable[[], object]]:
    if not hasattr(_threads, "queue"):
        _threads.queue = []
    queue: list[Callable[[], object]] = _threads.queue
    return queue


class Stream:
    """A thread's kernels, in order."""

    def synchronize(self) -> None:
        queue = _queue()
        while queue:
            queue.pop(0)()


class DeviceArray:
    """Memory on the fake device; views share it."""

    __array_ufunc__ = None

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to NumPy")

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "shape", "size", "ndim", "nbytes", "flags"):
            return getattr(self.memory, name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.memory)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> DeviceArray:
        key = key.memory if isinstance(key, DeviceArray) else key
        if isinstance(key, np.ndarray):
            return _late(self.memory[key].shape, self.dtype, lambda out: self.memory[key])
        return DeviceArray(self.memory[key if isinstance(key, tuple) else (key, ...)])

    def __setitem__(self, key: Any, value: Any) -> None:
        key = key.memory if isinstance(key, DeviceArray) else key
        value = value.memory if isinstance(value, DeviceArray) else value
        _queue().append(lambda: self.memory.__setitem__(key, value))

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.memory.reshape(*shape))

    def ravel(self) -> DeviceArray:
        return DeviceArray(self.memory.reshape(-1))

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.memory.view(dtype))

    def copy(self) -> DeviceArray:
        return _late(self.shape, self.dtype, lambda out: self.memory)

    def astype(self, dtype: Any, copy: bool = True) -> DeviceArray:
        if not copy and self.dtype == dtype:
            return self
        return _late(self.shape, dtype, lambda out: self.memory)

    def get(self, out: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        Stream().synchronize()
        if out is None:
            return self.memory.copy()
        out[...] = self.memory
        return out

    def set(self, host: np.ndarray[Any, Any]) -> None:
        _queue().append(lambda: np.copyto(self.memory, host))


def _late(shape: Any, dtype: Any, compute: Callable[[np.ndarray[Any, Any]], Any]) -> DeviceArray:
    out = np.full(shape, 77, dtype)  # what is seen if nobody waits
    _queue().append(lambda: np.copyto(out, compute(out), casting="unsafe"))
    return DeviceArray(out)


def _ufunc(function: Any) -> Callable[..., None]:
    def run(a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        _queue().append(lambda: function(a.memory, b.memory, out=out.memory))

    return run


add = _ufunc(np.add)
multiply = _ufunc(np.multiply)
maximum = _ufunc(np.maximum)
minimum = _ufunc(np.minimum)
cuda = SimpleNamespace(get_current_stream=Stream)


def asarray(x: Any) -> DeviceArray:
    return x if isinstance(x, DeviceArray) else DeviceArray(np.array(x))


def ascontiguousarray(x: DeviceArray) -> DeviceArray:
    return _late(x.shape, x.dtype, lambda out: x.memory)


def asnumpy(x: DeviceArray) -> np.ndarray[Any, Any]:
    return x.get()


def arange(n: int) -> np.ndarray[Any, Any]:
    return np.arange(n)


def concatenate(arrays: Any, axis: int = 0) -> DeviceArray:
    memories = [x.memory for x in arrays]
    like = np.concatenate(memories, axis)
    return _late(like.shape, like.dtype, lambda out: np.concatenate(memories, axis))


def copyto(out: DeviceArray, x: DeviceArray) -> None:
    _queue().append(lambda: np.copyto(out.memory, x.memory))


def empty(shape: Any, dtype: Any) -> DeviceArray:
    return DeviceArray(np.full(shape, 77, dtype))


def empty_like(x: DeviceArray) -> DeviceArray:
    return empty(x.shape, x.dtype)
