"""A spy on NumPy's memory: the size of every array that one thread makes, to the byte.

NumPy lets its allocator be replaced (NEP 49), for one context and so for one thread, which is a
rank here. The spy's allocator notes the size and then does what the one before did. To free memory
it is not asked, so arrays may outlive it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, PYFUNCTYPE, c_char, c_char_p, c_size_t, c_ubyte, c_void_p, py_object
from typing import Any

import numpy as np

_MALLOC = PYFUNCTYPE(c_void_p, c_void_p, c_size_t)
_CALLOC = PYFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t)
_REALLOC = PYFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t)


class _Handler(ctypes.Structure):
    """PyDataMem_Handler of numpy/ndarraytypes.h."""

    _fields_ = (
        ("name", c_char * 127), ("version", c_ubyte), ("context", c_void_p), ("malloc", _MALLOC),
        ("calloc", _CALLOC), ("realloc", _REALLOC), ("free", c_void_p),
    )  # fmt: skip


def _c_functions() -> tuple[Any, Any]:
    """PyDataMem_SetHandler and PyDataMem_GetHandler, numbers 304 and 305 of NumPy's C interface."""
    table = ctypes.cast(_pointer(np._core._multiarray_umath._ARRAY_API, None), POINTER(c_void_p))
    set_handler = PYFUNCTYPE(py_object, py_object)(table[304])
    return set_handler, PYFUNCTYPE(py_object)(table[305])


def _pointer(capsule: Any, name: bytes | None) -> Any:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [py_object, c_char_p]
    return get(capsule, name)


def _capsule(handler: _Handler) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
    return new(ctypes.addressof(handler), b"mem_handler", None)


def _spy_on(before: _Handler, sizes: list[int]) -> _Handler:
    """A handler that notes sizes and calls the one before."""

    def malloc(context: Any, size: int) -> Any:
        sizes.append(size)
        return before.malloc(context, size)

    def calloc(context: Any, count: int, size: int) -> Any:
        sizes.append(count * size)
        return before.calloc(context, count, size)

    def realloc(context: Any, at: Any, size: int) -> Any:
        sizes.append(size)
        return before.realloc(context, at, size)

    functions = _MALLOC(malloc), _CALLOC(calloc), _REALLOC(realloc)
    return _Handler(b"spy", 1, before.context, *functions, before.free)


@contextmanager
def watched() -> Iterator[list[int]]:
    """The bytes of each array that this thread makes in here."""
    sizes: list[int] = []
    set_handler, get_handler = _c_functions()
    before = get_handler()
    handler = _spy_on(_Handler.from_address(_pointer(before, b"mem_handler")), sizes)
    # Arrays made in here refer to it for as long as they live, so it lives for ever.
    ctypes.pythonapi.Py_IncRef(py_object(handler))
    set_handler(_capsule(handler))
    try:
        yield sizes
    finally:
        set_handler(before)
