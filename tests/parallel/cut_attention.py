"""Attention alone, on ranks that have some positions of its sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import AttentionCore, Module, Window, window
from minitrain.parallel import Mesh
from minitrain.parallel.context import cut_context


class Holder(Module):
    """A model that has nothing but a core of attention."""

    def __init__(self) -> None:
        self.core = AttentionCore(0.0)


def attention(q: Any, k: Any, v: Any, grad_out: Any, layout: str = "cp1", base: float = 0) -> Any:
    """The output, and the gradients of q, k and v, put together from the parts of a layout's ranks.

    base: of rotary positions; 0 for none.

    Shapes: q, grad_out (B, T, H, D), k and v (B, T, K, D).
    """
    where, kv = Layout.parse(layout), np.stack([k, v], axis=2)

    def rank(group: Group) -> Any:
        mesh, model = Mesh(group, where), Holder()
        if where.cp > 1:
            cut_context(model, mesh)
        at = mesh.positions(q.shape[1])
        mine, keys = (Tensor(x[:, at], requires_grad=True) for x in (q, kv))
        with window(Window(0, 0, np.arange(len(q)), at, length=q.shape[1])):
            turned = [F.rotary(mine, at, base), F.rotary(keys, at, base, part=0)] if base else []
            out = model.core(*turned or (mine, keys), positions=at)
        out.backward(grad_out[:, at])
        return at, (out.array, mine.grad, keys.grad)

    whole = [np.full(x.shape, np.nan) for x in (q, q, kv)]
    for at, parts in run_ranks(where.size, rank, synchronous=True):
        for array, part in zip(whole, parts, strict=True):
            array[:, at] = part
    out, grad_q, grad_kv = whole
    return out, grad_q, grad_kv[:, :, 0], grad_kv[:, :, 1]
