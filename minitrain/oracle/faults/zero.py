"""Faults of sharded data parallelism, which show on two or more shard ranks.

Each function takes what stands at its seam and returns what is planted there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from minitrain.array import Array, namespace
from minitrain.autograd.function import Grads, Needs
from minitrain.nn.module import Parameter
from minitrain.optim.optimizer import square_sum
from minitrain.parallel.gather import Gather, Gatherer
from minitrain.parallel.norm import Norm
from minitrain.parallel.reduce import Bucket
from minitrain.parallel.zero import Shard


def stale_gather(kept: Any) -> Any:
    """What was gathered is kept beyond the step: lingbot-vla PR 50."""

    def planted(gatherer: Gatherer, parameter: Parameter, gather: Any, mine: Array) -> Array:
        fresh = kept(gatherer, parameter, gather, mine)
        first: dict[str, Array] = vars(gatherer).setdefault("first", {})
        return first.setdefault(parameter.name, fresh)

    return planted


def gradient_sliced(vjp: Any) -> Any:
    """A gathered weight hands its own piece of the gradient back, unsummed: Automodel PR 1260."""

    def planted(gather: Gather, grad_out: Array, needs: Needs) -> Grads:
        sizes, rank = gather.sizes, gather.group.rank
        start = sum(sizes[:rank])
        return (grad_out.reshape(-1)[start : start + sizes[rank]],)

    return planted


def pieces_by_name(rank_by_rank: Any) -> Any:
    """A bucket is cut as one vector, while pieces are cut from each parameter: DeepSpeed #966."""

    def planted(bucket: Bucket) -> Array:
        parts = [bucket.reducer.lives.parameters[name].grad for name in bucket.names]
        flat = [grad.reshape(-1) for grad in parts if grad is not None]
        return namespace(flat[0]).concatenate(flat)

    return planted


def last_backward_only(put: Any) -> Any:
    """Under stage 2 each micro-batch's sum replaces the ones before it: open-instruct PR 1498."""

    def planted(shard: Shard, names: list[str], total: Array, *, add: bool = False) -> None:
        put(shard, names, total)

    return planted


def replicas_not_summed(finish: Any) -> Any:
    """Replicas of a shard train by themselves: verl #7493."""
    return lambda bucket: setattr(bucket, "came", False)


def norm_of_one_shard(value: Any) -> Any:
    """Each rank clips by the norm of what it steps: AReaL #312, pytorch #170862."""

    def planted(norm: Norm) -> float:
        return math.sqrt(sum(square_sum(norm.stepped.grad(name)) for name in norm.stepped.spans))

    return planted


def norm_over_padding(value: Any) -> Any:
    """Pieces are padded to one size, and what lies there enters the norm: DeepSpeed #966."""

    def planted(norm: Norm) -> float:
        size = norm.mesh["shard"].size
        padding = sum(-math.prod(entry.shape) % size for entry in norm.table.values())
        return math.hypot(value(norm), math.sqrt(padding))

    return planted


def replicas_in_the_norm(value: Any) -> Any:
    """The squares of a shard are summed over its replicas too: VeOmni #184."""

    def planted(norm: Norm) -> float:
        return float(value(norm) * math.sqrt(norm.mesh["dp"].size))

    return planted


def verdict_of_one_rank(first: Any) -> Any:
    """Each rank looks for an overflow in its own piece only: pytorch PR 115710."""

    def planted(norm: Norm) -> str | None:
        mine = [name for name in norm.names if name in norm.stepped.spans]
        bad = [name for name in mine if not math.isfinite(square_sum(norm.stepped.grad(name)))]
        return bad[-1] if bad else None

    return planted


def decay_lost(segments: Any) -> Any:
    """Flattened pieces have forgotten which of them decay: pytorch #71347."""

    def planted(shard: Shard) -> Iterator[tuple[Array, Array, slice, bool]]:
        for weights, gradient, span, _ in segments(shard):
            yield weights, gradient, span, False

    return planted


def owner_not_broadcast(publish: Any) -> Any:
    """What an owner stepped reaches no other rank: pytorch #63213."""

    def planted(shard: Shard, buckets: Iterable[Bucket]) -> None:
        for name in shard.spans if shard.weights is not None else ():
            whole = shard.lives.weights[shard.lives.spans[name]]
            whole[shard.cuts[name]] = shard._weight(name)

    return planted
