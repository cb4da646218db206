"""How long do the stages of a pipeline wait, beside what the simulator says?

On two cores two stages do real work. More stages would share cores, so those of four and eight only
take time: each forward and each half of a backward is a wait, which leaves its core to others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from conclusion import conclude

from minitrain.array import Array
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor
from minitrain.batch import Batch
from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, Module, Parameter
from minitrain.nn.families import declare
from minitrain.nn.module import constant
from minitrain.parallel import Mesh, parallelize
from minitrain.parallel.stages import schedule_of
from minitrain.schedules import Times
from minitrain.schedules.build import HAND_MADE
from minitrain.schedules.simulate import simulate
from minitrain.train import summary
from minitrain.train.timeline import Trace
from minitrain.train.trace import Recorder, gathered

TIMES = (0.012, 0.012, 0.012)
"""Seconds of a rank's forward, and of its backward for inputs and for weights."""

REAL = GPTConfig(vocab=64, context=128, layers=8, heads=4, width=256, tied=False)
STEPS, POINTS = 3, 0.05


class Wait(Function):
    """x, but its forward and each half of its backward take a time."""

    def forward(self, x: Array, weight: Array, *, times: tuple[float, ...]) -> Array:
        self.times = times
        time.sleep(times[0])
        return x + 0 * weight

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        time.sleep(self.times[1] * needs[0] + self.times[2] * needs[1])
        return grad_out, np.zeros(1, grad_out.dtype)


class Timed(Module):
    """A block that takes a time."""

    def __init__(self, times: tuple[float, ...]):
        self.times, self.weight = times, Parameter((1,), constant(0.0))

    def forward(self, x: Any, *_: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else Tensor(np.zeros(1, np.float32), requires_grad=True)
        return Wait.apply(x, self.weight, times=self.times)


class Ends(Module):
    """An embedding, a norm, a head or a loss that does nothing."""

    def forward(self, x: Any, *_: Any, **more: Any) -> Any:
        return x.sum() if more else x


class TimedModel(Module):
    """As many timed blocks as virtual stages, which share the times of a rank."""

    def __init__(self, layout: Layout):
        count, times = layout.pp * layout.chunks, tuple(each / layout.chunks for each in TIMES)
        self.config = GPTConfig(vocab=2, context=1, layers=count, heads=1, width=2, tied=False)
        self.embedding, self.norm, self.head, self.loss = Ends(), Ends(), Ends(), Ends()
        self.blocks: list[Any] = [Timed(times) for _ in range(count)]
        self.name_tree()

    def link(self, number: int) -> Any:
        return [self.embedding, *self.blocks, self.head][number]


def measure(layout: Layout, micro_batches: int, made: Callable[[], Any], batch: Batch) -> Trace:
    """Of some steps the fastest."""
    stages = (1,) * (layout.pp * layout.chunks) if made is not real else None

    def rank(group: Group) -> dict[str, Any] | None:
        mesh = Mesh(group, layout)
        model = parallelize(made(), mesh, micro_batches=micro_batches, stages=stages)
        recorder = Recorder(group, model)
        for step in range(STEPS):
            group.barrier()
            with recorder.step(step):
                model.forward_backward(batch)
        return gathered(recorder, layout)

    trace = Trace.of(run_ranks(layout.size, rank, blas=1)[0] or {})
    return min(map(trace.of_step, range(STEPS)), key=summary.step_seconds)


def real() -> Any:
    """A GPT that keeps a core busy."""
    return declare(REAL)


def batch_of(length: int, size: int) -> Batch:
    """Tokens and labels, all 0."""
    ids = np.zeros((size, length), np.int64)
    return Batch(ids, ids, np.arange(size), 0, size)


def timed_case(name: str, stages: int, micro_batches: int) -> tuple[float, float]:
    """Measured and simulated bubble of stages that only take time."""
    layout = Layout(pp=stages, schedule=name)
    found = measure(layout, micro_batches, lambda: TimedModel(layout), batch_of(1, micro_batches))
    schedule = schedule_of(layout, micro_batches)
    simulated = simulate(schedule, Times.uniform(schedule.route, *TIMES)).bubble
    return summary.bubble(found), simulated


def real_case(name: str, micro_batches: int) -> tuple[float, float]:
    """Of two stages that work, simulated with the times of their F, B, I and W."""
    layout = Layout(pp=2, schedule=name)
    found = measure(layout, micro_batches, real, batch_of(REAL.context, micro_batches))
    return summary.bubble(found), summary.ideal_bubble(found)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON value on the last line.")
def main(as_json: bool) -> None:
    """Measure bubbles, and hold them against the simulator's; status 1 above five points."""
    cases: list[tuple[str, Callable[[], tuple[float, float]]]] = [
        (f"pp2,{name}, {m} micro-batches, real work", lambda name=name, m=m: real_case(name, m))
        for name, m in (("1f1b", 4), ("1f1b", 8), ("zb-h1", 8))
    ]  # type: ignore[misc]
    cases += [
        (f"pp{p},{name}, {2 * p} micro-batches", lambda name=name, p=p: timed_case(name, p, 2 * p))
        for p in (4, 8)
        for name in HAND_MADE
    ]  # type: ignore[misc]
    rows, far = [], []
    for case, run in cases:
        measured, simulated = run()
        click.echo(f"{case:<45}{measured:>7.1%} measured{simulated:>7.1%} simulated", err=as_json)
        far += [case] if abs(measured - simulated) > POINTS else []
        ratio = (1 - simulated) / (1 - measured)
        rows.append({"case": case, "ours": measured, "peer": simulated, "ratio": ratio})
    conclude("bubble", rows, as_json)
    for case in far:
        click.echo(f"more than {POINTS:.0%} apart: {case}", err=True)
    raise SystemExit(1 if far else 0)


if __name__ == "__main__":
    main()
