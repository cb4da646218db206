"""Faults of context parallelism, which show on two or more cp ranks.

Those of heads show where positions are exchanged for them. Each function takes what stands at its
seam and returns what is planted there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.autograd.function import Grads, Needs
from minitrain.autograd.tile import Rule
from minitrain.batch import IGNORE, Batch
from minitrain.comm.group import Group
from minitrain.nn import AttentionCore
from minitrain.parallel.data import Part, Shares
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.plan import Plan
from minitrain.parallel.reduce import Bucket
from minitrain.parallel.ring import GRADIENTS, RingAttention
from minitrain.parallel.table import Entry


def cp_not_reduced(plan_of: Any) -> Any:
    """Gradients are summed over dp alone: picotron, where dp is 1."""

    def planted(entry: Entry, mesh: Mesh, chunks: frozenset[int]) -> Plan:
        plan: Plan = plan_of(entry, mesh, chunks)
        sums = [{axis: at for axis, at in sum_ if axis != "cp"} for sum_ in plan.sums]
        return plan._replace(sums=tuple(tuple(sum_.items()) for sum_ in sums if sum_))

    return planted


def cp_averaged(finish: Any) -> Any:
    """A mean over cp where a sum is needed: gradients c times too small: Megatron-LM #673."""

    def planted(bucket: Bucket) -> None:
        finish(bucket)
        for name in bucket.own:
            bucket.reducer.stepped.grad(name)[...] /= bucket.reducer.mesh.layout.cp

    return planted


def cp_counted_often(total: Any) -> Any:
    """Tokens are counted once for every cp rank of a sequence: prime-rl #2562."""
    return lambda shares, *rest: total(shares, *rest) * len(shares.peers.ranks)


def cp_positions_restart(of: Any) -> Any:
    """Every rank's part of a sequence begins at position 0: Megatron-LM #560."""

    def planted(shares: Shares, *batch: Any) -> list[Part]:
        parts: list[Part] = of(shares, *batch)
        return [replace(part, positions=np.arange(part.tokens.shape[1])) for part in parts]

    return planted


def labels_after_the_cut(of: Any) -> Any:
    """Labels are made of a rank's own tokens, so its last one has none."""

    def planted(shares: Shares, batch: Batch, *rest: Any) -> list[Part]:
        def shifted(part: Part) -> Part:
            labels = np.full_like(part.labels, IGNORE)
            labels[:, :-1] = part.tokens[:, 1:]
            return replace(part, labels=labels)

        return [shifted(part) for part in of(shares, batch, *rest)]

    return planted


def diagonal_mask_only(rule: Any) -> Any:
    """Only a rank's own block is masked, so early queries see later keys: ring-flash-attention
    #15."""

    def planted(ring: RingAttention, source: int) -> Rule:
        found: Rule = rule(ring, source)
        return replace(found, causal=source == ring.ring.rank)

    return planted


def merged_as_equals(merge: Any) -> Any:
    """Outputs of two blocks are joined as if both had the same log-sum-exp."""

    def planted(out: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
        merged, total = merge(out, lse, other, other_lse)
        seen = np.isfinite(lse) & np.isfinite(other_lse)
        return np.where(seen, (out + other) / 2, merged), total

    return planted


def kv_gradients_not_sent(send: Any) -> Any:
    """Gradients of keys and values that others had do not come home: Megatron-LM #1464."""

    def planted(ring: Group, x: Array, dest: int, tag: int) -> Any:
        return send(ring, np.zeros_like(x) if tag == GRADIENTS else x, dest, tag)

    return planted


def delta_of_own_block(vjp: Any) -> Any:
    """The backward of a block looks at that block's part of the output, not at the whole one."""

    def planted(ring: RingAttention, grad_out: Array, needs: Needs) -> Grads:
        ring.out = ring.out / ring.ring.size
        found: Grads = vjp(ring, grad_out, needs)
        return found

    return planted


def cp_local_heads(weight_dropout: Any) -> Any:
    """Dropout masks of attention by the head's number on the rank."""
    return lambda core, heads, first=0: _from_zero(weight_dropout, core, heads)


def _from_zero(weight_dropout: Any, core: AttentionCore, heads: int) -> Any:
    return weight_dropout(core, heads)


def kv_heads_by_rank(exchanged: Any) -> Any:
    """Shared key/value heads are dealt out in turn, whoever has their queries: verl #1226."""

    def planted(*heads: int, ranks: int) -> Any:
        queries, keys, shared = exchanged(*heads, ranks=ranks)
        return queries, keys, tuple(rank % heads[-1] for rank in range(ranks)) if shared else ()

    return planted
