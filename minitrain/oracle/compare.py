"""The one definition of error, which `verify` and every test use.

In float64 a right result differs from the reference by rounding, some 1e-15 of a tensor's size, and
a wrong one by ten orders of magnitude more. So the bound can be far from both, and is never tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minitrain.array import Array, to_host

BOUND = 1e-12
# A gradient below this share of the model's largest one is zero by algebra and rounding noise in
# practice (the key part of a fused bias: a constant added to all scores of a row changes nothing).
NOISE = 1e-12

# From a name and a whole reference tensor to the part that a rank must hold; None if nothing.
Part = Callable[[str, Array], Array | None]


def whole(name: str, x: Array) -> Array:
    """The part of a rank that holds everything."""
    return x


@dataclass(frozen=True)
class Row:
    """One tensor held against the reference.

    Attributes:
        tensor: what it is: "sgd step 1 gradient blocks.0.mlp.up.weight".
        rank: the world rank that holds it.
        error: the largest |got - expected| ÷ scale of its elements.
        bound: what the error may be.
        index: where the largest error is; expected, got: the values there.
        pair: of a wrong one, all that the rank has and what it should have; None if shapes differ.
    """

    tensor: str
    rank: int
    error: float
    bound: float
    index: tuple[int, ...] = ()
    expected: float = 0.0
    got: float = 0.0
    pair: tuple[Array, Array] | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """What the tensor is called, without what was found out about it."""
        return self.tensor.partition(" (")[0]

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound

    def __str__(self) -> str:
        where = f"{self.tensor} on rank {self.rank} at {list(self.index)}: {self.got!r} instead of"
        return f"{where} {self.expected!r}, error {self.error:.1e} above {self.bound:.0e}"


def compare(tensor: str, got: Array, expected: Array, scale: float, *, rank: int = 0,
            bound: float = BOUND) -> Row:  # fmt: skip
    """Hold one tensor against its reference; a shape that differs is an infinite error.

    Args:
        scale: what an error is measured in; where it is 0, everything is 0 and must be so here.
    """
    mine, reference = np.asarray(to_host(got)), np.asarray(to_host(expected))
    if mine.shape != reference.shape:
        return Row(f"{tensor} (shape {mine.shape}, not {reference.shape})", rank, np.inf, bound)
    if mine.size == 0:
        return Row(tensor, rank, 0.0, bound)
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = np.abs(mine.astype(np.float64) - reference.astype(np.float64))
    # A NaN, or an infinity on one side, is as wrong as can be.
    difference = np.where(np.isfinite(difference), difference, np.inf)
    at = np.unravel_index(int(difference.argmax()), difference.shape)
    error = float(difference[at]) / scale if scale else (np.inf if difference[at] else 0.0)
    error = error if np.isfinite(error) else np.inf  # a reference that is not finite proves nothing
    pair = None if error <= bound else (mine, reference)
    return Row(tensor, rank, error, bound, tuple(map(int, at)), float(reference[at]),
               float(mine[at]), pair)  # fmt: skip


def compare_gradients(what: str, got: Mapping[str, Array], expected: Mapping[str, Array], *,
                      part: Part = whole, rank: int = 0,
                      bound: float = BOUND) -> Iterable[Row]:  # fmt: skip
    """Every gradient by name.

    An error is a share of the whole tensor's largest element, or of the model's where the tensor
    is zero by algebra.

    Args:
        part: which part of the reference the rank must hold.
    """
    largest = max((_size(x) for x in expected.values()), default=0.0)
    for name, reference in expected.items():
        size = _size(reference)
        scale = size if size > NOISE * largest else largest
        mine = part(name, reference)
        if mine is not None:
            yield compare(f"{what} {name}", _take(got, name), mine, scale, rank=rank, bound=bound)
    yield from _unexpected(what, got, expected, part, rank)


def compare_numbers(tensor: str, got: float, expected: float, *, rank: int = 0,
                    bound: float = BOUND) -> Row:  # fmt: skip
    """A loss or a norm: plain relative error."""
    return compare(tensor, np.float64(got), np.float64(expected), abs(expected), rank=rank,
                   bound=bound)  # fmt: skip


def compare_weights(what: str, got: Mapping[str, Array], expected: Mapping[str, Array], *,
                    stepped: float, noise: Mapping[str, Array], noise_bound: float,
                    part: Part = whole, rank: int = 0,
                    bound: float = BOUND) -> Iterable[Row]:  # fmt: skip
    """Every weight or moment by name, after some steps.

    Args:
        stepped: the sum of the learning rates, the size of what has changed.
        noise: by name, where the gradient was zero by algebra in every step. AdamW divides that
            rounding noise by its own size plus ε and so makes steps of it: such elements are
            judged apart, by noise_bound.
        part: which part of the reference the rank must hold.
    """
    for name, all_of_it in expected.items():
        # A frozen one has no gradient: nothing of it has been stepped.
        still = noise[name] if name in noise else np.zeros(all_of_it.shape, bool)
        reference, quiet = part(name, all_of_it), part(name, still)
        if reference is None or quiet is None:
            continue
        mine = np.asarray(to_host(_take(got, name)))
        scale = max(_size(all_of_it), stepped)
        if mine.shape == reference.shape and quiet.any():
            apart = np.where(quiet, mine, reference)
            yield compare(f"{what} {name} (gradient zero by algebra)", apart, reference, scale,
                          rank=rank, bound=noise_bound)  # fmt: skip
            mine = np.where(quiet, reference, mine)
        yield compare(f"{what} {name}", mine, reference, scale, rank=rank, bound=bound)
    yield from _unexpected(what, got, expected, part, rank)


def zero_by_algebra(gradients: Iterable[Mapping[str, Array]]) -> dict[str, Any]:
    """By name, the elements whose gradient was rounding noise in every one of some steps."""
    noise: dict[str, Any] = {}
    for step in gradients:
        largest = max((_size(x) for x in step.values()), default=0.0)
        for name, x in step.items():
            quiet = np.abs(to_host(x)) <= NOISE * largest
            noise[name] = noise.get(name, True) & quiet
    return noise


def _size(x: Array) -> float:
    """The largest absolute value, 0 of nothing."""
    return float(np.abs(to_host(x)).max(initial=0.0))


def _take(arrays: Mapping[str, Array], name: str) -> Array:
    """The array of a name; one that is missing has a shape that no tensor has."""
    return arrays[name] if name in arrays else np.empty((0, -0))


def _unexpected(what: str, got: Mapping[str, Array], expected: Mapping[str, Array], part: Part,
                rank: int) -> Iterable[Row]:  # fmt: skip
    """A row for each array that the rank has and must not have."""
    for name in got:
        if name not in expected or part(name, expected[name]) is None:
            yield Row(f"{what} {name} (not to be on this rank)", rank, np.inf, BOUND)
