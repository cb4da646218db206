"""Faults of mixtures of experts, which show on two or more data ranks, or tp ranks where said.

Each function takes what stands at its seam and returns what is planted there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.autograd.function import Grads, Needs
from minitrain.autograd.tensor import Tensor
from minitrain.nn.gate import Everyone, Gate, Ints, Verdict
from minitrain.nn.module import current
from minitrain.nn.router import Router
from minitrain.parallel.expert import CutExperts, Dispatch, GlobalGate, places_of
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.norm import Norm
from minitrain.parallel.plan import Plan
from minitrain.parallel.reduce import Bucket
from minitrain.parallel.table import DATA_AXES, Entry


def gate_of_a_rank(everyone: Any) -> Any:
    """Each rank counts its own tokens: load, capacity and drops are those of a layout: GShard's
    local groups; the balance loss is not the global one's: Megatron-LM #5047, PR 3768."""
    return Gate.everyone


def order_of_ranks(everyone: Any) -> Any:
    """Choices are taken rank by rank, which under sp is not the order of the tokens."""

    def planted(gate: GlobalGate, choices: Ints, batch: int) -> Everyone:
        found: Everyone = everyone(gate, choices, batch)
        view = current()
        assert view is not None
        mine = places_of(view.samples, gate.own(view.positions))
        places = gate.group.all_gather(mine, purpose="control")
        by_rank = np.argsort(np.argsort(places))  # where each of them is in the right order
        own = np.argsort(by_rank)[found.own]
        return found._replace(choices=found.choices[by_rank], own=own,
                              sequences=found.sequences[by_rank])  # fmt: skip

    return planted


def term_lost(attach: Any) -> Any:
    """What attaching returns is not used, so no term has a gradient: NeMo-Automodel #1408."""
    return lambda y, term: y


def term_of_a_rank(each: Any) -> Any:
    """Terms are means over a rank's own tokens: they grow with the layout: Megatron-LM PR 5996."""
    return lambda router, tokens: 1 / max(1, tokens)


def gates_not_entered(forward: Any) -> Any:
    """Gates pass the entry region by: a router learns from its own rank's features alone."""

    def planted(experts: CutExperts, x: Tensor, gates: Tensor, routing: Any) -> Tensor:
        return experts.leave(experts.experts(experts.enter(x), gates, routing))

    return planted


def rows_not_returned(vjp: Any) -> Any:
    """A token's gradient has only what its own rank's experts made of it: Automodel PR 1260."""

    def planted(dispatch: Dispatch, grad_out: Array, needs: Needs) -> Grads:
        (grad,) = vjp(dispatch, grad_out, needs)
        way, own = dispatch.way, np.zeros((len(grad), 1), bool)
        own[way.blocks[way.group.rank]] = True
        return (np.where(own, grad, 0),)

    return planted


def experts_on_the_dense_group(plan_of: Any) -> Any:
    """Gradients of experts are summed over all data ranks, whatever experts these have: Megatron-LM
    #1628."""

    def planted(entry: Entry, mesh: Mesh, chunks: frozenset[int]) -> Plan | None:
        plan: Plan | None = plan_of(entry, mesh, chunks)
        if plan is None or not _has_experts(entry):
            return plan
        data = tuple((a, tuple(range(n))) for a, n in mesh.sizes.items() if a in DATA_AXES)
        return plan._replace(sums=(data, *plan.sums[1:]))

    return planted


def experts_averaged(finish: Any) -> Any:
    """Averaged over the ranks that share an expert, as if only their tokens had come: the gradient
    is as many times too large as ep has ranks: pytorch #160285, DeepSpeed #5618."""

    def planted(bucket: Bucket) -> None:
        finish(bucket)
        for name in bucket.own:
            if _has_experts(bucket.reducer.table[name]):
                bucket.reducer.stepped.grad(name)[...] *= bucket.reducer.mesh.layout.ep

    return planted


def router_not_summed(finish: Any) -> Any:
    """Under sp a router is stepped by its rank's own positions: Megatron-LM #599, #619."""

    def planted(bucket: Bucket) -> None:
        stepped = bucket.reducer.stepped
        own = {name: stepped.grad(name).copy() for name in bucket.own if ".router." in name}
        finish(bucket)
        for name, grad in own.items():
            stepped.grad(name)[...] = grad

    return planted


def norm_of_own_experts(counts: Any) -> Any:
    """Experts of other ranks do not enter the norm: Megatron-LM PR 5916."""

    def planted(norm: Norm, entry: Entry) -> bool:
        first = all(
            place.holds[norm.mesh.coordinates[place.mesh_axis]] == 0
            for place in entry.placement.places
            if place.mesh_axis in DATA_AXES
        )
        return first and counts(norm, entry)

    return planted


def bias_by_own_load(count: Any) -> Any:
    """Each rank moves the experts' bias by the load of its own tokens."""

    def planted(router: Router, preferred: Ints, verdict: Verdict) -> None:
        count(router, preferred, verdict._replace(load=verdict.routing.counts))

    return planted


def _has_experts(entry: Entry) -> bool:
    return any(place.axis == 0 and place.mesh_axis in DATA_AXES for place in entry.placement.places)
