"""Runs on the stages of a pipeline, what they compute, and pipelines that Hypothesis draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.optim import SGD, AdamW, Optimizer
from minitrain.oracle import Task
from minitrain.parallel import Mesh, parallelize
from minitrain.train.step import Stepper

SCHEDULES = (
    *("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"),
    *("zb-v", "v-half", "v-min", "dualpipe-v"),
    *("zb-auto", "zb-auto,chunks2"),
)
# ε is far above the rounding of tiny gradients, which AdamW would magnify.
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(momentum=0.9, decay=0.1),
    "adamw": AdamW(0.9, 0.99, 1e-2, decay=0.1),
}


class Case(NamedTuple):
    """What a run trains, on which layout, and how it computes."""

    task: Task
    layout: Layout
    dtype: str = "float64"
    recompute: str = "none"


class Found(NamedTuple):
    """What a rank has computed with each optimizer, to be compared bit by bit."""

    numbers: list[float]  # the loss and the norm of each step
    first: dict[str, bytes]  # the gradients of the first step
    last: dict[str, bytes]  # those of the last one, weights and moments after it


@st.composite
def pipelines(draw: st.DrawFn, schedule: str) -> Case:
    """pp 1 to 6, 1 to 12 micro-batches, stages of any size, some of which may be empty."""
    layout = Layout.parse(f"pp{draw(st.integers(1, 6))},{schedule}")
    fewest = 2 * layout.pp if schedule == "dualpipe-v" else 1
    virtual = layout.pp * layout.chunks
    task = Task(
        draw(models(layers := draw(st.integers(max(virtual - 2, 1), max(virtual + 1, 3))))),
        smoothing=draw(st.sampled_from([0.0, 0.2])),
        z_loss=draw(st.sampled_from([0.0, 0.1])),
        steps=3,
        batch=draw(st.integers(1, 6)),  # micro-batches of different sizes, or empty
        micro_batches=draw(st.integers(fewest, 12)),
        clip=draw(st.sampled_from([None, 0.1])),
        bucket=draw(st.sampled_from([300, 1 << 20])),
        seed=draw(st.integers(0, 9)),
        stages=draw(st.none() | cuts(layers, virtual)),
        optimizers=OPTIMIZERS,
    )
    return Case(task, layout, recompute=draw(st.sampled_from(["none", "full"])))


@st.composite
def models(draw: st.DrawFn, layers: int) -> Config:
    """A tiny GPT or Llama, tied or not."""
    sizes: dict[str, Any] = {
        "vocab": 9, "context": 5, "layers": layers, "heads": 2, "width": 8, "hidden": 7,
        "tied": draw(st.booleans()), "std": 0.3,
    }  # fmt: skip
    if draw(st.booleans()):
        return GPTConfig(**sizes, dropout=draw(st.sampled_from([0.0, 0.3])))
    return LlamaConfig(**sizes, kv_heads=1)


def cuts(layers: int, stages: int) -> st.SearchStrategy[tuple[int, ...]]:
    """So many numbers that add up to the layers."""
    ends = st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)
    return ends.map(lambda found: tuple(np.diff([0, *sorted(found), layers]).tolist()))


def computed(group: Group, case: Case) -> Found:
    """Train as one rank."""
    task, numbers, first, last = case.task, [], {}, {}
    for kind, optimizer in task.optimizers.items():
        model = parallelize(
            task.declare(),
            Mesh(group, case.layout),
            micro_batches=task.micro_batches,
            seed=task.seed,
            dtype=case.dtype,
            bucket=task.bucket,
            recompute=case.recompute,
            stages=task.stages,
        )
        stepper = Stepper(model, optimizer, task.schedule().rate, task.clip)
        for batch in task.batches():
            result = stepper.step(batch)
            numbers += [result.loss, result.grad_norm]
            last |= {f"{kind} gradient {n}": g.tobytes() for n, g in model.gradients().items()}
            first = first or dict(last)
        last |= {f"{kind} weight {n}": p.array.tobytes() for n, p in model.parameters.items()}
        for slot, flat in stepper.slots.items():
            last |= {
                f"{kind} {slot} {n}": x.tobytes() for n, x in model.stepped.views(flat).items()
            }
    return Found(numbers, first, last)


def on_ranks(case: Case) -> list[Found]:
    """What each rank computes, on sends that wait for their receive."""
    return run_ranks(case.layout.size, computed, case, blas=1, synchronous=True)


def on_one_rank(case: Case) -> Found:
    """The same without a pipeline."""
    alone = case._replace(layout=Layout(), task=replace(case.task, stages=None))
    return on_ranks(alone)[0]


def batch_of(config: Config, size: int, step: int = 0, length: int | None = None) -> Batch:
    """Random tokens and labels that all count."""
    rng = np.random.default_rng(step)
    tokens, labels = rng.integers(0, config.vocab, (2, size, length or config.context))
    return Batch(tokens, labels, np.arange(size), step, size)
