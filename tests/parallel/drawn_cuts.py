"""Models, batches and layouts that Hypothesis draws for tensor parallelism, and how they are held.

Sizes divide by the ranks or do not: heads, features, token ids, positions and samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig, Window, window
from minitrain.nn.config import Config
from minitrain.nn.families import declare
from minitrain.optim import SGD, AdamW, Optimizer
from minitrain.oracle import Task, compare
from minitrain.oracle.compare import Row
from minitrain.oracle.verify import verify_rank
from minitrain.parallel import Mesh, parallelize

# AdamW divides a gradient by its own size plus ε, and rounding is some 1e-16 of the largest one: a
# tiny element makes a step that differs by 1e-16/ε, which must be far below the bound.
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(momentum=0.9, decay=0.1),
    "adamw": AdamW(0.9, 0.99, 1e-2, decay=0.1),
}


class Case(NamedTuple):
    """What a run trains, and on which layout."""

    task: Task
    layout: Layout


@st.composite
def models(draw: st.DrawFn, ranks: int, positions: int) -> Config:
    """A GPT or a Llama that fits so many tp ranks, and sequences of so many positions."""
    # Llama's heads are groups of as many queries each.
    groups = draw(st.integers(1, 8))
    each = draw(st.integers(-(-ranks // groups), max(-(-ranks // groups), 8 // groups)))
    heads = groups * each
    sizes: dict[str, Any] = {
        "vocab": draw(st.integers(max(ranks, 2), 20)),
        "context": positions + draw(st.integers(0, 2)),
        "layers": draw(st.integers(1, 2)),
        "heads": heads,
        "hidden": draw(st.integers(3, 11)),  # some ranks may get no feature at all
        "tied": draw(st.booleans()),
        "std": 0.3,
    }
    # A norm of two or three features takes nearly all of them away: what is left is rounding.
    width = heads * 2 * max(draw(st.integers(1, 2)), 4 // heads)
    if draw(st.booleans()):
        return GPTConfig(**sizes, width=width, dropout=draw(st.sampled_from([0.0, 0.3])))
    return LlamaConfig(**sizes, kv_heads=groups, width=width)


@st.composite
def cases(draw: st.DrawFn, sp: bool) -> Case:
    """tp 1 to 8, with dp where that makes at most 8 ranks."""
    tp = draw(st.integers(1, 8))
    dp = draw(st.integers(1, 2 if tp <= 4 else 1))
    model = draw(models(tp, draw(st.integers(tp if sp else 1, 9))))
    task = Task(
        model,
        smoothing=draw(st.sampled_from([0.0, 0.2])),
        z_loss=draw(st.sampled_from([0.0, 0.1])),
        steps=3,
        batch=draw(st.integers(1, 5)),
        micro_batches=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from([None, 0.1, 100.0])),
        bucket=draw(st.sampled_from([300, 1 << 20])),
        seed=draw(st.integers(0, 9)),
        optimizers=OPTIMIZERS,
    )
    return Case(task, Layout(dp=dp, tp=tp, sp=sp))


def rows_of_training(case: Case) -> list[Row]:
    """Every tensor of every rank after each step, on sends that wait for their receive."""
    task, layout = case
    reference = task.reference()
    ranks = run_ranks(layout.size, verify_rank, layout, task, reference, blas=1, synchronous=True)
    return [row for rows in ranks for row in rows]


def wrong(rows: list[Row]) -> list[str]:
    """The rows that are not equal, readable."""
    return [str(row) for row in rows if not row.ok]


class Ends(NamedTuple):
    """The two ends of a model: logits, and the gradient at the embedding's output."""

    logits: Any
    grad_in: Any


def ends_of(model: Any, task: Task, tokens: Any, grad_out: Any) -> Ends:
    """What a model (or a rank's part of one) computes and hands back for a gradient of logits."""
    positions = np.arange(tokens.shape[1])
    with window(Window(task.seed, 0, np.arange(len(tokens)), positions)):
        embedding, *rest = model.chain()
        start = embedding(tokens, positions).detach()
        start.requires_grad = True
        x = start
        for link in rest:
            x = link(x, positions)
        x.backward(grad_out)
    return Ends(x.array, start.grad)


def rows_of_ends(case: Case) -> list[Row]:
    """Logits and input gradient of every rank, held against those of one device.

    The gradient of the logits is random, so that no error can cancel. Logits are cut over the
    vocabulary, and the gradient over positions under sp; elsewhere every rank has the whole.
    """
    task, layout = case
    rng = np.random.default_rng(task.seed)
    tokens = rng.integers(0, task.model.vocab, (max(task.batch, 2), task.model.context))
    grad_out = rng.normal(size=(*tokens.shape, task.model.vocab))
    plain = declare(task.model).initialize(task.seed, "float64")
    reference = ends_of(plain, task, tokens, grad_out)

    def part(x: Any, axis: int, index: int) -> Any:
        ends = np.cumsum(cut_sizes(x.shape[axis], layout.tp)).tolist()
        return np.split(x, ends[:-1], axis=axis)[index]

    def rank(group: Group) -> list[Row]:
        mesh = Mesh(group, layout)
        model = parallelize(declare(task.model), mesh, seed=task.seed, dtype="float64").module
        tp = mesh["tp"].rank
        mine = ends_of(model, task, tokens, part(grad_out, 2, tp))
        grad_in = part(reference.grad_in, 1, tp) if layout.sp else reference.grad_in
        scale = [float(np.abs(x).max()) for x in reference]
        assert min(scale) > 1e-3  # nothing is right by being zero
        return [
            compare("logits", mine.logits, part(reference.logits, 2, tp), scale[0], rank=tp),
            compare("input gradient", mine.grad_in, grad_in, scale[1], rank=tp),
        ]

    return [row for rows in run_ranks(layout.size, rank, synchronous=True) for row in rows]
