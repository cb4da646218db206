"""Hold a layout against the single-device run: losses, gradients, norms, weights, moments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import to_host
from minitrain.batch import Batch
from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.nn.config import Config
from minitrain.oracle.compare import (
    BOUND,
    Part,
    Row,
    compare_gradients,
    compare_numbers,
    compare_weights,
    zero_by_algebra,
)
from minitrain.oracle.coverage import uncovered
from minitrain.oracle.faults import planted
from minitrain.oracle.reference import Trace
from minitrain.oracle.task import NANO, Task, micro_batches_of
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.parallel.table import check_layout
from minitrain.train.step import Stepper


class Report(NamedTuple):
    """What a verification found.

    Attributes:
        layout: what was held against the reference.
        rows: every comparison, in the order in which a run computes the tensors, rank by rank.
    """

    layout: str
    rows: list[Row]

    @property
    def ok(self) -> bool:
        """Whether every tensor is within its bound."""
        return all(row.ok for row in self.rows)

    @property
    def first(self) -> Row | None:
        """The first tensor that is wrong; None if all are right."""
        return next((row for row in self.rows if not row.ok), None)

    @property
    def worst(self) -> Row:
        """The tensor whose error is the largest, in units of its bound."""
        return max(self.rows, key=lambda row: row.error / row.bound)


def verify(
    model_config: Config = NANO,
    layout: Layout | str = "dp2",
    *,
    fault: str | None = None,
    **task: Any,
) -> Report:
    """Train with a layout on thread ranks and hold every tensor of every rank against one device.

    Args:
        fault: the name of a known fault to plant (oracle.faults), to see it found.
        task: fields of Task, such as steps=20; micro_batches are 4 with a pipeline, else 2.

    Raises:
        LayoutError: a layout that does not fit. DeadlockError: ranks that wait for ever.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    work = Task(model=model_config, **{"micro_batches": micro_batches_of(layout), **task})
    check_layout(layout, model_config, micro_batches=work.micro_batches, stages=work.stages)
    reference = work.reference()
    with planted(fault):
        rows = run_ranks(
            layout.size, verify_rank, layout, work, reference, blas=1, synchronous=True
        )
    return Report(str(layout), in_order(rows))


def verify_rank(
    group: Group, layout: Layout, task: Task, reference: dict[str, Trace], xp: Any = np
) -> list[Row]:
    """Train as one rank, on xp (numpy or cupy), and hold what it has against the reference."""
    rows: list[Row] = []
    for name, optimizer in task.optimizers.items():
        stepper = Stepper(
            parallelize(
                task.declare(),
                Mesh(group, layout),
                micro_batches=task.micro_batches,
                seed=task.seed,
                dtype="float64",
                xp=xp,
                bucket=task.bucket,
                stages=task.stages,
                recompute=task.recompute,
                frozen=task.frozen,
                strategies=task.strategies,
            ),
            optimizer,
            task.schedule().rate,
            task.clip,
        )
        rows += uncovered(name, stepper.model.table, layout)
        trace = _train(stepper, task.batches())
        rows += _compare(
            name,
            trace,
            reference[name],
            # 1e-12 of the gradient over ε, in units of the learning rate: a step made from noise.
            noise_bound=BOUND / getattr(optimizer, "epsilon", 1.0),
            parts=_parts_of(stepper.model),
            rank=group.rank,
        )
    return rows


def _parts_of(model: ParallelModel) -> tuple[Part, Part]:
    """Which part of a whole weight this rank must hold, and which of its gradient and of what the
    optimizer keeps for it: the table says."""
    at = model.mesh.coordinates

    def lives(name: str, x: Any) -> Any:
        return model.table[name].placement.cut(x, at)

    def is_stepped(name: str, x: Any) -> Any:
        return model.table[name].stepped.cut(x, at)

    return lives, is_stepped


def _train(stepper: Stepper, batches: list[Batch]) -> Trace:
    trace, model = Trace(), stepper.model
    for batch in batches:
        result = stepper.step(batch)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.gradients.append({k: to_host(g).copy() for k, g in model.gradients().items()})
    trace.weights = model.lives.views(to_host(model.lives.weights))
    trace.slots = {kind: model.stepped.views(to_host(slot)) for kind, slot in stepper.slots.items()}
    return trace


def _compare(name: str, got: Trace, expected: Trace, *, noise_bound: float,
             parts: tuple[Part, Part], rank: int) -> Iterator[Row]:  # fmt: skip
    lives, is_stepped = parts
    for i, gradients in enumerate(expected.gradients):
        step = f"{name} step {i + 1}"
        gradients = dict(reversed(gradients.items()))  # the backward comes to the last one first
        yield compare_numbers(f"{step} loss", got.losses[i], expected.losses[i], rank=rank)
        yield from compare_gradients(
            f"{step} gradient", got.gradients[i], gradients, part=is_stepped, rank=rank
        )
        yield compare_numbers(f"{step} norm", got.norms[i], expected.norms[i], rank=rank)
    noise = zero_by_algebra(expected.gradients)
    kinds = [("weight", got.weights, expected.weights, lives)]
    kinds += [(kind, got.slots[kind], x, is_stepped) for kind, x in expected.slots.items()]
    for kind, mine, reference, part in kinds:
        yield from compare_weights(
            f"{name} {kind}",
            mine,
            reference,
            stepped=expected.stepped,
            noise=noise,
            noise_bound=noise_bound,
            part=part,
            rank=rank,
        )


def in_order(ranks: list[list[Row]]) -> list[Row]:
    """The rows of all ranks, tensor by tensor in the order of the run, then by rank.

    Each rank has its rows in that order, but none of a tensor that it holds nothing of.
    """
    names: list[str] = []
    known: set[str] = set()
    for rows in ranks:
        place = 0
        for name in dict.fromkeys(row.name for row in rows):
            if name in known:
                place = names.index(name) + 1
            else:
                names.insert(place, name)
                known.add(name)
                place += 1
    places = {name: place for place, name in enumerate(names)}
    rows = [row for rank in ranks for row in rank]
    return sorted(rows, key=lambda row: (places[row.name], row.rank))


def gather_rows(group: Group, rows: list[Row]) -> list[Row]:
    """The rows of all ranks in the order of the run, on every rank: all come to one verdict."""
    text = json.dumps([row.__dict__ for row in rows]) + "\n"
    texts = group.all_gather(np.frombuffer(text.encode(), np.uint8), purpose="control")
    found = [json.loads(line) for line in bytes(texts).splitlines()]
    return in_order([[Row(**{**row, "index": tuple(row["index"])}) for row in r] for r in found])
