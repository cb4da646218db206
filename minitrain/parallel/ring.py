"""Ring attention: queries stay, keys and values go round, and each rank sees every block once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from minitrain.array import Array, namespace
from minitrain.autograd.blocks import check_seal, seal
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tile import Rule
from minitrain.autograd.tiles import block_backward, block_forward, merge, row_delta
from minitrain.comm.group import Group
from minitrain.parallel.regions import PURPOSE

KEYS, GRADIENTS = 0, 1  # tags: keys and values go round in one stream, their gradients in another


class RingAttention(Function):
    """Attention to the keys of all ranks of a ring. Inputs: q and kv; or qkv, packed along axis 2.

    The outputs for two blocks of keys are joined by their log-sum-exps, in at least float32
    (`tiles.merge`), and rounded once, at the end. The backward needs the log-sum-exp over all keys
    and Σ P·dP of the whole output: then each block's terms are a sum. For that the output stays
    as it was before it was rounded.
    """

    def forward(self, *packed: Array, rule: Rule, ring: Group, pieces: Sequence[Array]) -> Array:
        self.packed, self.rule, self.ring, self.pieces = packed, rule, ring, pieces
        self.sealed = seal(rule.q_positions)
        q, kv = unpack(packed)
        for source, block in blocks(kv, ring, pieces):
            found = block_forward(q, block[:, :, 0], block[:, :, 1], self._rule(source))
            if source == ring.rank:
                self.out, self.lse = found
            else:
                self.out, self.lse = merge(self.out, self.lse, *found)
        return self.out.astype(q.dtype, copy=False)

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        """The gradients of a block follow it, one rank later, and end where it came from: c - 1
        hops, because the own share never leaves."""
        check_seal("attention's positions", self.sealed, self.rule.q_positions)
        xp, dtype, ring = namespace(grad_out), self.lse.dtype, self.ring
        grads = tuple([xp.zeros(x.shape, dtype) for x in self.packed])
        (q, kv), (grad_q, own) = unpack(self.packed), unpack(grads)
        delta, leaving, after, before = row_delta(self.out, grad_out), [], *neighbours(ring)
        for source, block in blocks(kv, ring, self.pieces):
            at_home, coming = source == ring.rank, None
            grad = own if at_home else xp.zeros(block.shape, dtype)
            if source not in (ring.rank, before):  # others have worked on this block
                coming = ring.irecv(before, like=grad, tag=GRADIENTS)
            block_backward(
                grad_out, q, block[:, :, 0], block[:, :, 1], self._rule(source),
                lse=self.lse, delta=delta, grads=(grad_q, grad[:, :, 0], grad[:, :, 1]),
            )  # fmt: skip
            if coming is not None:
                grad += coming.wait()
            if not at_home:
                leaving.append(_send(ring, grad, after, GRADIENTS))
        if ring.size > 1:
            own += ring.recv(before, like=own, tag=GRADIENTS)
        for operation in leaving:
            operation.wait()
        return grads

    def _rule(self, source: int) -> Rule:
        """How the own queries weigh a rank's keys."""
        return replace(self.rule, k_positions=self.pieces[source])


def unpack(packed: tuple[Array, ...]) -> tuple[Array, Array]:
    """q (B, T, H, D) and kv (B, T, 2, K, D), as views."""
    return (packed[0], packed[1]) if len(packed) == 2 else (packed[0][:, :, 0], packed[0][:, :, 1:])


def neighbours(ring: Group) -> tuple[int, int]:
    """Who gets what this rank passes on, and who passes on to it."""
    return (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size


def blocks(kv: Array, ring: Group, pieces: Sequence[Array]) -> Iterator[tuple[int, Array]]:
    """Each rank's keys and values (B, T, 2, K, D) in turn, and whose they are; the own ones first.

    While a block is computed with, it is on its way to the next rank, and another one comes.
    """
    xp, (after, before) = namespace(kv), neighbours(ring)
    for hop in range(1, ring.size):
        length = len(pieces[(ring.rank - hop) % ring.size])
        shape = (kv.shape[0], length, *kv.shape[2:])
        coming = ring.irecv(before, like=xp.broadcast_to(xp.empty((), kv.dtype), shape), tag=KEYS)
        leaving = _send(ring, kv, after, KEYS)
        yield (ring.rank - hop + 1) % ring.size, kv
        kv = coming.wait()
        leaving.wait()
    yield (ring.rank + 1) % ring.size, kv


def _send(ring: Group, x: Array, dest: int, tag: int) -> Any:
    return ring.isend(x, dest, tag=tag, purpose=PURPOSE, header=False)
