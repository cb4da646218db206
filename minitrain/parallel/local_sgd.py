"""Local SGD: ranks train by themselves, and come to one model every H steps.

Sharded:     the batch: each rank computes, and steps by, its share
Replicated:  weights, the same every H steps; the inner optimizer's state is each rank's own
Forward:     nothing
Backward:    nothing; every H steps an all-reduce of the weights: 2(d-1)/d · Ψ elements per rank
Equals serial because: it does not, unless H is 1 and the optimizer is SGD without momentum: the
             mean of weights that each went a step of their own is a step by the mean gradient.
Paper:       Stich 2018, "Local SGD converges fast and communicates little"; Douillard et al. 2023,
             "DiLoCo", algorithm 1 (an outer optimizer: Nesterov, rate 0.7, momentum 0.9)

A share's loss is divided by a d-th of the tokens of the whole batch. So it counts as it does in the
sum over ranks, however uneven the shares are, and with H = 1 the mean is synchronous training's.
"""

from __future__ import annotations

from minitrain.array import Array, namespace
from minitrain.comm.group import Group


class Outer:
    """The outer optimizer, which takes the ranks' weights for one step's work.

    Args:
        weights: flat, of this rank; the same on all ranks.
        velocity: of the outer momentum, the same on all ranks; changed in place.
        rate: 1 without momentum makes weights their mean.
    """

    def __init__(self, group: Group, weights: Array, velocity: Array, rate: float, momentum: float):
        self.group, self.weights, self.velocity = group, weights, velocity
        self.rate, self.momentum = rate, momentum
        self.start = weights.copy()

    def meet(self) -> None:
        """All ranks come to the same weights."""
        mean = self.group.all_reduce(self.weights, purpose="parameter") / self.group.size
        change = (self.start - mean).astype(self.velocity.dtype, copy=False)
        self.velocity *= self.momentum
        self.velocity += change
        xp = namespace(self.weights)
        self.weights[...] = self.start - self.rate * (change + self.momentum * self.velocity)
        self.start = xp.array(self.weights)
