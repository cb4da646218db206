"""CuPy without a GPU: an array module that does what CuPy does and refuses what CuPy refuses.

Its arrays wrap NumPy's and are none: NumPy would take a subclass without a word, as it would take
what has __array__ or a buffer. So a NumPy array that strays among them, a keyword or a name that
CuPy lacks (see cupy_names.py), or an implicit way back to the host fails here as on a GPU. What a
GPU does otherwise (bits of a sum, bad indices, streams) is not shown here.

    import standin as xp
    xp.asarray(np.ones(3)) + 1
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cupy_names
import numpy as np

_NAMES = cupy_names.load()
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift", "matmul",
)  # fmt: skip
_UFUNC_KEYWORDS = ("out", "casting", "dtype")


class ndarray:  # noqa: N801 (CuPy's name)
    """An array "on the device". Attributes and methods are those that CuPy's arrays have."""

    __slots__ = ("__weakref__", "_host")
    __array_ufunc__ = None  # so that `numpy_array + this` asks us, and we refuse
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: np.ndarray[Any, Any]):
        self._host = host

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in _NAMES["methods"]:
            raise AttributeError(f"CuPy's arrays have no {name!r}")
        value = getattr(self._host, name)
        if callable(value):
            return _called(f"ndarray.{name}", value, _NAMES["methods"][name], self)
        return _device(value, self)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array; use array.to_host")

    def __getitem__(self, index: Any) -> Any:
        return _device(np.asarray(self._host[_host(index)]))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._host[_host(index)] = _host(value)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __float__(self) -> float:
        return float(self._host)

    def __repr__(self) -> str:
        return f"standin.{self._host!r}"


def _host(x: Any) -> Any:
    """Arguments as NumPy wants them; a NumPy array among them is refused, as CuPy does."""
    if isinstance(x, ndarray):
        return x._host
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}: a NumPy array among CuPy's")
    if isinstance(x, (tuple, list)):
        return type(x)([_host(item) for item in x])
    return x


def _device(x: Any, *arguments: Any) -> Any:
    """Results as CuPy gives them: arrays, of 0 axes too; one of the arguments comes as itself."""
    for known in arguments:
        if isinstance(known, ndarray) and known._host is x:
            return known
    if isinstance(x, (np.ndarray, np.generic)):
        return ndarray(np.asarray(x))
    if isinstance(x, (tuple, list)) and any(isinstance(item, np.ndarray) for item in x):
        return type(x)([_device(item) for item in x])
    return x


def _called(name: str, function: Callable[..., Any], keywords: Any, *more: Any) -> Any:
    """A NumPy function with CuPy's arguments, results and refusals."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for keyword in kwargs:
            if keyword not in keywords:
                raise TypeError(f"cupy.{name} has no keyword {keyword!r}")
        out = function(*_host(args), **{k: _host(v) for k, v in kwargs.items()})
        return _device(out, *more, *args, *kwargs.values())

    return call


class _Ufunc:
    def __init__(self, name: str):
        self._ufunc = getattr(np, name)
        self._call = _called(name, self._ufunc, _UFUNC_KEYWORDS)
        for method in _NAMES["ufuncs"][name]:
            setattr(self, method, _called(f"{name}.{method}", getattr(self._ufunc, method), ()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def asarray(a: Any, dtype: Any = None, order: Any = None, *, blocking: bool = False) -> ndarray:
    """a on the device: the one way in."""
    host = a._host if isinstance(a, ndarray) else np.array(a)
    return _device(np.asarray(host, dtype=dtype, order=order), a)  # type: ignore[no-any-return]


def asnumpy(a: Any) -> np.ndarray[Any, Any]:
    """A copy of a on the host: the one way back."""
    return np.array(_host(a))


class _Device:
    """A GPU by number; as in CUDA, each thread has a current one of its own."""

    current = threading.local()

    def __init__(self, number: int | None = None):
        self.id = getattr(self.current, "id", 0) if number is None else number

    def use(self) -> None:
        self.current.id = self.id


cuda = SimpleNamespace(
    get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    runtime=SimpleNamespace(getDeviceCount=lambda: 2),
    Device=_Device,
)


def __getattr__(name: str) -> Any:
    if name in _NAMES["ufuncs"]:
        return _Ufunc(name)
    if name in _NAMES["functions"]:
        return _called(name, getattr(np, name), _NAMES["functions"][name])
    if name in _NAMES["others"]:
        return getattr(np, name)
    raise AttributeError(f"CuPy has no {name!r}")


def _operators() -> None:
    """Give ndarray its operators: a + b, b + a, a += b and so on, by those of NumPy."""

    def binary(function: Any) -> Any:
        return lambda a, b: _device(function(a._host, _host(b)))

    def reflected(function: Any) -> Any:
        return lambda a, b: _device(function(_host(b), a._host))

    def in_place(function: Any) -> Any:
        return lambda a, b: _device(function(a._host, _host(b)), a)

    for name in _BINARY:
        word = name + "_" if name in ("and", "or") else name
        setattr(ndarray, f"__{name}__", binary(getattr(operator, word)))
        setattr(ndarray, f"__r{name}__", reflected(getattr(operator, word)))
        if name != "matmul":
            setattr(ndarray, f"__i{name}__", in_place(getattr(operator, "i" + name)))
    for name in ("lt", "le", "eq", "ne", "ge", "gt"):
        setattr(ndarray, f"__{name}__", binary(getattr(operator, name)))
    for name in ("neg", "pos", "abs", "invert"):
        function = getattr(operator, name)
        setattr(ndarray, f"__{name}__", lambda a, function=function: _device(function(a._host)))


_operators()
