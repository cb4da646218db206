"""What a mixture of experts is made of: rows that go to experts, and come back to their tokens.

A token has k choices. Its row is copied to each of them (`spread`), rows of one expert lie side
by side and are multiplied by its matrix (`grouped_linear`), and come back as a sum that its gates
weigh (`combine`). A choice that was dropped has the row -1: it adds nothing, and its gate gets
gradient 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minitrain.array import Array, accumulator, from_host, namespace
from minitrain.autograd.blocks import as_matrix, gradient_product, row_dots
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.ops import rounded, wide
from minitrain.autograd.tensor import Tensor


def _slots(rows: Any, xp: Any) -> Iterator[tuple[int, Array, Array]]:
    """For each of the k slots of a host array (N, k): its number, the tokens whose choice there was
    kept, and their rows."""
    for slot in range(rows.shape[1]):
        tokens = np.flatnonzero(rows[:, slot] >= 0)
        yield slot, from_host(tokens, xp), from_host(rows[tokens, slot], xp)


class Spread(Function):
    """A row for each kept choice; backward: the sum over a token's choices, slot by slot."""

    def forward(self, x: Array, *, tokens: Any, rows: Any) -> Array:
        self.rows, self.shape = rows, x.shape
        return x[from_host(tokens, namespace(x))]

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp = namespace(grad_out)
        grad = xp.zeros(self.shape, accumulator(grad_out.dtype))
        for _, tokens, rows in _slots(self.rows, xp):
            grad[tokens] += grad_out[rows]
        return (grad,)


class Combine(Function):
    """Σ over a token's kept choices of gate · row, in the order of the slots."""

    def forward(self, x: Array, gates: Array, *, rows: Any) -> Array:
        xp = namespace(x)
        self.x, self.gates, self.rows = x, gates, rows
        out = xp.zeros((len(gates), x.shape[1]), accumulator(x.dtype))
        for slot, tokens, at in _slots(rows, xp):
            out[tokens] += wide(x[at]) * wide(gates[tokens, slot])[:, None]
        return rounded(out, x)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, wider = namespace(grad_out), accumulator(grad_out.dtype)
        # Every row is of one choice; zeros, and not what memory holds, where it is of none.
        grad_x, grad_gates = xp.zeros(self.x.shape, wider), xp.zeros(self.gates.shape, wider)
        for slot, tokens, at in _slots(self.rows, xp):
            arriving = wide(grad_out[tokens])
            grad_x[at] = arriving * wide(self.gates[tokens, slot])[:, None]
            grad_gates[tokens, slot] = row_dots(wide(self.x[at]), arriving)[:, 0]
        return grad_x, grad_gates


class GroupedLinear(Function):
    """x·W of each group of rows with a matrix of its own."""

    def forward(self, x: Array, weight: Array, *, counts: Sequence[int]) -> Array:
        self.x, self.weight, self.counts = x, self.sources[1], counts
        outer = weight.shape[2:]
        out = namespace(x).empty((len(x), math.prod(outer)), x.dtype)
        for expert, span in self._groups():
            out[span] = rounded(wide(x[span]) @ wide(as_matrix(weight[expert], len(outer))), x)
        return out.reshape(len(x), *outer)

    def _groups(self) -> Iterator[tuple[int, slice]]:
        """The groups that have rows."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        xp, grad = namespace(grad_out), as_matrix(grad_out, grad_out.ndim - 1)
        wider, outer = accumulator(grad.dtype), grad_out.ndim - 1
        grad_x = grad_weight = None
        if needs[0]:
            weight, grad_x = self.weight.array, xp.empty(self.x.shape, wider)
            for expert, span in self._groups():
                matrix = as_matrix(weight[expert], outer)
                grad_x[span] = gradient_product(grad[span], matrix.T, grad=0)
        if needs[1]:
            shape = (len(self.counts), self.x.shape[1], grad.shape[1])
            grad_weight = xp.zeros(shape, wider)  # an expert without rows learns nothing
            for expert, span in self._groups():
                grad_weight[expert] = gradient_product(self.x[span].T, grad[span], grad=1)
            grad_weight = grad_weight.reshape(*shape[:2], *grad_out.shape[1:])
        return grad_x, grad_weight


class Choose(Function):
    """Some elements of each row, none of them twice."""

    def forward(self, x: Array, *, index: Array) -> Array:
        self.shape, self.index = x.shape, index
        return namespace(x).take_along_axis(x, index, axis=1)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        grad = namespace(grad_out).zeros(self.shape, grad_out.dtype)
        grad[namespace(grad_out).arange(len(grad))[:, None], self.index] = grad_out
        return (grad,)


def spread(x: Tensor, tokens: Any, rows: Any) -> Tensor:
    """A row for each choice that was kept.

    Shapes: x (N, C); host arrays tokens (R,), the token of each row, and rows (N, k), the row of
        each choice or -1 -> (R, C).
    """
    return Spread.apply(x, tokens=tokens, rows=rows)


def combine(x: Tensor, gates: Tensor, rows: Any) -> Tensor:
    """Each token's sum of what comes back to it, weighed by its gates.

    Shapes: x (R, C), gates (N, k), host array rows (N, k), the row of each choice or -1 -> (N, C).
    """
    return Combine.apply(x, gates, rows=rows)


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """x·W[e] for the rows of each group e, which lie side by side; counts says how many each has.

    Shapes: x (R, C), weight (E, C, ...), counts (E,), of sum R -> (R, ...).
    """
    if len(counts) != weight.shape[0] or sum(counts) != x.shape[0]:
        raise ValueError(
            f"grouped_linear: {len(counts)} groups of {sum(counts)} rows in all, but "
            f"{weight.shape[0]} matrices and {x.shape[0]} rows"
        )
    return GroupedLinear.apply(x, weight, counts=list(counts))


def choose(x: Tensor, index: Any) -> Tensor:
    """Elements of each row by their columns, of which a row names none twice.

    Shapes: x (N, E), index (N, k) integers -> (N, k).
    """
    return Choose.apply(x, index=from_host(index, namespace(x.array)))
