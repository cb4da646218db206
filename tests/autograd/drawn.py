"""What the engine's tests draw: arrays of any shape and strides, and operations at such arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
from engine_examples import beside
from hypothesis import strategies as st

from minitrain import functional as F
from minitrain.autograd.tensor import Tensor

# No axes (one number), no elements, and sizes that tell the axes apart.
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@dataclass(frozen=True)
class Case:
    """An operation at some inputs: `run` of tensors and `numpy` of arrays mean the same."""

    run: Callable[..., Tensor]
    numpy: Callable[..., Any]
    inputs: tuple[Any, ...]


def gaps(x: Any) -> Any:
    """x with an unused element after each of its own."""
    wide = np.full([2 * n for n in x.shape], np.nan)[(..., *[slice(None, None, 2)] * x.ndim)]
    wide[...] = x
    return wide


def backwards(x: Any) -> Any:
    """x with strides below 0."""
    turn = (..., *[slice(None, None, -1)] * x.ndim)
    return x[turn].copy()[turn]


def repeated(x: Any) -> Any:
    """x's first row as all its rows, in the memory of one: read-only, with a stride of 0."""
    return np.broadcast_to(x[:1], x.shape) if x.size else x


LAYOUTS = (np.array, lambda x: np.array(x, order="F"), gaps, backwards)


@st.composite
def floats(draw: Any, shape: tuple[int, ...], positive: bool = False, repeats: bool = True,
           salt: int = 0) -> Any:  # fmt: skip
    """Values of about unit size; no two are equal, also not with another salt, except where
    `repeats` lets strides of 0 make them so."""
    x = np.random.default_rng((draw(st.integers(0, 999)), salt)).standard_normal(shape)
    layouts = (*LAYOUTS, repeated) if repeats and x.ndim else LAYOUTS
    return draw(st.sampled_from(layouts))(abs(x) + 0.5 if positive else x)


@st.composite
def unary(draw: Any, run: Any, numpy: Any, positive: bool = False) -> Case:
    return Case(run, numpy, (draw(floats(draw(SHAPES), positive)),))


@st.composite
def binary(draw: Any, run: Any, numpy: Any, positive: bool = False) -> Case:
    full = hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3)
    empty = hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=2)
    a, b = draw(full | empty).input_shapes
    return Case(run, numpy, (draw(floats(a)), draw(floats(b, positive, salt=1))))


@st.composite
def powers(draw: Any) -> Case:
    n = draw(st.sampled_from([-1, 0, 0.5, 1, 2, 3.5]))
    return draw(unary(lambda x: F.power(x, n), lambda x: x**n, positive=True))


@st.composite
def where(draw: Any) -> Case:
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=3, min_side=0, max_side=3))
    a, b, c = shapes.input_shapes
    condition = draw(floats(c)) > 0
    return Case(
        lambda a, b: F.where(beside(a, condition), a, b),
        lambda a, b: np.where(condition, a, b),
        (draw(floats(a)), draw(floats(b))),
    )


@st.composite
def reductions(draw: Any, run: Any, numpy: Any, empty: bool = False) -> Case:
    """Over no axis, all, one or several, counted from either end; of no elements where allowed."""
    shape = draw(SHAPES if empty else hnp.array_shapes(min_dims=0, max_dims=4, max_side=4))
    axis = draw(st.none() | hnp.valid_tuple_axes(len(shape)))
    if isinstance(axis, tuple) and len(axis) == 1:
        axis = draw(st.sampled_from([axis, axis[0]]))
    keepdims = draw(st.booleans())
    return Case(
        lambda x: run(x, axis=axis, keepdims=keepdims),
        lambda x: numpy(x, axis=axis, keepdims=keepdims),
        (draw(floats(shape, repeats=False)),),
    )


@st.composite
def matmuls(draw: Any) -> Case:
    shapes = draw(hnp.mutually_broadcastable_shapes(
        signature=np.matmul.signature, min_side=draw(st.sampled_from([0, 1])), max_side=3
    ))  # fmt: skip
    a, b = shapes.input_shapes
    return Case(F.matmul, np.matmul, (draw(floats(a)), draw(floats(b))))


@st.composite
def reshapes(draw: Any) -> Case:
    x = draw(floats(draw(SHAPES)))
    to = draw(st.sampled_from([(x.size,), x.shape[::-1], (1, *x.shape), (*x.shape, 1)]))
    return Case(lambda x: F.reshape(x, to), lambda x: x.reshape(to), (x,))


@st.composite
def transposes(draw: Any) -> Case:
    x = draw(floats(draw(SHAPES)))
    axes = [i - x.ndim * draw(st.booleans()) for i in draw(st.permutations(range(x.ndim)))]
    return Case(lambda x: F.transpose(x, axes), lambda x: x.transpose(axes), (x,))


@st.composite
def takes(draw: Any) -> Case:
    """Slices, new axes, integers, index arrays with repeats, masks, and mixtures."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    rows = st.lists(st.integers(-shape[0], shape[0] - 1), max_size=6)
    index = draw(
        hnp.basic_indices(shape, allow_newaxis=True)
        | hnp.integer_array_indices(shape)
        | hnp.arrays(bool, shape)
        | rows.map(lambda r: np.array(r, int))
        | rows.map(lambda r: (np.array(r, int), Ellipsis, slice(None, None, -1)))
        .filter(lambda _: len(shape) > 1)
    )  # fmt: skip
    return Case(lambda x: F.take(x, beside(x, index)), lambda x: x[index], (draw(floats(shape)),))


@st.composite
def concatenations(draw: Any) -> Case:
    shape = list(draw(hnp.array_shapes(max_dims=3, max_side=3, min_side=0)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    inputs = []
    for size in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
        shape[axis] = size
        inputs.append(draw(floats(tuple(shape))))
    return Case(
        lambda *x: F.concatenate(x, axis), lambda *x: np.concatenate(x, axis), tuple(inputs)
    )


@st.composite
def splits(draw: Any) -> Case:
    """One piece of several, into as many as NumPy would cut."""
    shape = draw(hnp.array_shapes(max_dims=3, max_side=5, min_side=0))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    pieces = draw(st.integers(1, 4))
    i = draw(st.integers(0, pieces - 1))
    return Case(
        lambda x: F.split(x, pieces, axis)[i],
        lambda x: np.array_split(x, pieces, axis)[i],
        (draw(floats(shape)),),
    )


BASIC: dict[str, st.SearchStrategy[Case]] = {
    "add": binary(F.add, np.add),
    "subtract": binary(F.subtract, np.subtract),
    "multiply": binary(F.multiply, np.multiply),
    "divide": binary(F.divide, np.divide, positive=True),
    "maximum": binary(F.maximum, np.maximum),
    "where": where(),
    "power": powers(),
    "exp": unary(F.exp, np.exp),
    "log": unary(F.log, np.log, positive=True),
    "sqrt": unary(F.sqrt, np.sqrt, positive=True),
    "tanh": unary(F.tanh, np.tanh),
    "cast": unary(lambda x: F.cast(x, np.float64), np.asarray),
    "sum": reductions(F.sum, np.sum, empty=True),
    "mean": reductions(F.mean, np.mean),
    "max": reductions(F.max, np.max),
    "norm": reductions(F.norm, lambda x, **k: np.sqrt(np.sum(x * x, **k))),
    "matmul": matmuls(),
    "reshape": reshapes(),
    "transpose": transposes(),
    "take": takes(),
    "concatenate": concatenations(),
    "split": splits(),
}
