"""Expert parallelism on MPI processes; the rest is on threads."""

from __future__ import annotations

from checks_tensor import hold

from minitrain.comm import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig
from minitrain.nn.mixture import MixtureConfig

MODEL = GPTConfig(
    vocab=11, context=7, layers=1, heads=2, width=8, std=0.1,
    mixture=MixtureConfig(5, 2, hidden=5, capacity=1.0, balance=0.1, bias_rate=0.01),
)  # fmt: skip


def check_expert_parallel_equals_one_device(group: Group) -> None:
    """Five experts, of which the first ranks have one more; some ranks get no row of a token."""
    layouts = {2: "dp2,ep2", 3: "shard3,zero2,ep3", 4: "dp2,ep2,tp2,sp", 5: "dp5,ep5"}
    if group.size in layouts:
        hold(group, Layout.parse(layouts[group.size]), MODEL)
