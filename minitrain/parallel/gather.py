"""ZeRO's stage 3: parameters live in pieces, and each unit gathers its own while it runs.

The next unit's are on their way meanwhile: in a forward those of the unit that follows in the
chunk, in a backward those of the one before it. So at most two units are there as a whole. What a
pass gathers of a unit is known once one has been through it: all of it in a forward, in a backward
what that reads. That is a function of the graph, the same in every pass and on every rank; so the
bytes are those of gathers that are waited for, and all ranks start them in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from minitrain.array import Array, accumulator, namespace
from minitrain.autograd.engine import running
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor, no_grad
from minitrain.comm.group import Group
from minitrain.comm.operation import Operation
from minitrain.nn.module import Parameter
from minitrain.parallel.mesh import Mesh

Expect = Callable[[Parameter, Operation, int], None]


class Gather(Function):
    """A piece of a parameter → the parameter, as far as this rank has it (stage 3).

    Forward: all-gather. Backward: reduce-scatter, which goes on while the backward does; what comes
    of it is added to the gradient then. Both can be put off with the weight's gradient.
    """

    passes_weight = True
    collective = True  # a parameter that this rank did not use has peers that did

    def forward(self, piece: Array, *, whole: Callable[[Array], Array], group: Group,
                sizes: list[int], expect: Callable[[Operation, int], None]) -> Array:  # fmt: skip
        self.group, self.sizes, self.xp, self.expect = group, sizes, namespace(piece), expect
        return whole(piece)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        wide = accumulator(self.out_dtype)
        if grad_out is None:
            flat = self.xp.zeros(sum(self.sizes), wide)
        else:
            flat = self.xp.ascontiguousarray(grad_out).reshape(-1).astype(wide, copy=False)
        self.expect(
            self.group.start.reduce_scatter(flat, sizes=self.sizes, purpose="gradient"),
            flat.nbytes,
        )
        return (None,)


class Gatherer:
    """Makes the whole of parameters that live in pieces.

    Args:
        mesh: whose shard ranks share a parameter, all of them or those that have the same experts.
        keep: what was gathered is kept until the weights change, so each parameter is gathered
            once a step. All ranks write weights at the same time, so they agree.
        expect: takes what comes of a parameter's gradient; see `Reducer.expect`.

    Attributes:
        kept: by name, the version gathered, and the whole.
        coming: what is on its way: the version that was sent for, and the operation.
        entered: the unit that computes, and whether it is its backward.
    """

    def __init__(self, mesh: Mesh, *, keep: bool, expect: Expect):
        self.mesh, self.keep, self.expect = mesh, keep, expect
        self.kept: dict[str, tuple[int, Array]] = {}
        self.coming: dict[Parameter, tuple[int, Operation]] = {}
        self.entered: tuple[GatheredUnit, bool] | None = None

    def __call__(self, parameter: Parameter, piece: Tensor) -> Tensor:
        """The parameter, from this rank's piece of it (cast, or as it is)."""
        group, sizes, shape = self._cut(parameter)

        def gather(mine: Array) -> Array:
            self.send_for(parameter, mine)
            _, operation = self.coming.pop(parameter)
            whole: Array = operation.wait().reshape(shape)
            return whole

        make = partial(self._kept, parameter, gather) if self.keep else gather
        expect = partial(self.expect, parameter)
        return Gather.apply(piece, whole=make, group=group, sizes=sizes, expect=expect)

    def send_for(self, parameter: Parameter, mine: Array) -> None:
        """Start to gather a parameter, unless it is there or on its way as it is now."""
        there, _ = self.kept.get(parameter.name, (-1, mine))
        version, _ = self.coming.get(parameter, (there, None))
        if version != parameter.version:
            self.coming[parameter] = parameter.version, self._start(parameter, mine)

    def _start(self, parameter: Parameter, mine: Array) -> Operation:
        group, sizes, _ = self._cut(parameter)
        operation: Operation = group.start.all_gather(mine, sizes=sizes, purpose="parameter")
        return operation

    def _kept(self, parameter: Parameter, gather: Callable[[Array], Array], mine: Array) -> Array:
        version, whole = self.kept.get(parameter.name, (-1, mine))
        if version != parameter.version:
            whole = gather(mine)
            self.kept[parameter.name] = parameter.version, whole
        return whole

    def _cut(self, parameter: Parameter) -> tuple[Group, list[Any], tuple[int, ...]]:
        """The ranks that share a parameter, each one's size of a piece, the shape of the whole."""
        placement, shape, at = parameter.placement, parameter.declared, self.mesh.coordinates
        peers = placement.unsharded().peers("shard", at, self.mesh.sizes["shard"])
        pieces = [placement.piece(shape, {**at, "shard": peer}) for peer in peers]
        whole = tuple(span.stop - span.start for span in pieces[0].spans)
        return self.mesh.along({"shard": peers}), [each.size for each in pieces], whole


class GatheredUnit:
    """The parameters of one unit, as it computes with them.

    Args:
        cast: makes of this rank's piece of a parameter what is gathered; None: it is that.

    Attributes:
        next: the unit that computes after this one, in a forward (False) and in a backward (True).
        gathered: likewise, what has been gathered of this one, in order.
    """

    def __init__(self, gatherer: Gatherer, cast: Callable[[Parameter], Tensor] | None):
        self.gatherer, self.cast = gatherer, cast or _as_it_is
        self.next: dict[bool, GatheredUnit] = {}
        self.gathered: dict[bool, dict[Parameter, None]] = {False: {}, True: {}}

    def __call__(self, parameter: Parameter) -> Tensor:
        """The whole parameter. With the first of a pass all others are sent for, and the next
        unit's after them."""
        now = self, running() is not None
        if self.gatherer.entered != now:
            self.gatherer.entered = now
            self.send_for(backward=now[1])
            if now[1] in self.next:
                self.next[now[1]].send_for(backward=now[1])
        self.gathered[now[1]][parameter] = None
        return self.gatherer(parameter, self.cast(parameter))

    def send_for(self, *, backward: bool) -> None:
        """Start all gathers that a pass is known to need."""
        with no_grad():
            for parameter in self.gathered[backward]:
                self.gatherer.send_for(parameter, self.cast(parameter).array)


def follow(units: list[GatheredUnit]) -> None:
    """Units of a chunk run one after another, and backwards in the backward."""
    for one, other in pairwise(units):
        one.next[False], other.next[True] = other, one


def _as_it_is(parameter: Parameter) -> Tensor:
    return parameter
