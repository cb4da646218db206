"""Context parallelism on MPI processes; the rest is on threads."""

from __future__ import annotations

from checks_tensor import hold

from minitrain.comm import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig

GPT = GPTConfig(vocab=11, context=7, layers=1, heads=5, width=10, dropout=0.2)
LLAMA = LlamaConfig(vocab=11, context=7, layers=1, heads=6, kv_heads=2, width=24, hidden=7)


def check_context_parallel_equals_one_device(group: Group) -> None:
    for kind in ("zigzag", "ring", "ulysses", "gather"):
        for model in (GPT, LLAMA):
            hold(group, Layout(cp=group.size, cp_kind=kind), model)
    if group.size == 4:
        hold(group, Layout(cp=4, ulysses=2), LLAMA)
