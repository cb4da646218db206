"""Hold a layout against the single-device run: losses, gradients, norms, weights, moments."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import to_host
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
from minitrain.oracle.diagnosis import Diagnosis, Evidence, Subject, diagnose, probes
from minitrain.oracle.faults import planted
from minitrain.oracle.outputs import Recorder, compare_outputs
from minitrain.oracle.reference import Trace
from minitrain.oracle.task import NANO, Task, micro_batches_of
from minitrain.parallel import Mesh, ParallelModel, parallelize
from minitrain.parallel.stages import chunks_of
from minitrain.parallel.table import check_layout
from minitrain.train.step import Stepper


class Report(NamedTuple):
    """What a verification found.

    Attributes:
        layout: what was held against the reference.
        rows: every comparison, in the order of execution, rank by rank.
        diagnosis: what is wrong with the first wrong tensor; None if all are right.
        place: where its worst element is in the whole parameter; None if it is of none.
        gap: the smallest top-k gap that the reference met; see Trace.
    """

    layout: str
    rows: list[Row]
    diagnosis: Diagnosis | None = None
    place: tuple[int, ...] | None = None
    gap: float = math.inf

    @property
    def ok(self) -> bool:
        """Whether every tensor is within its bound."""
        return all(row.ok for row in self.rows)

    @property
    def first(self) -> Row | None:
        """The first tensor that is wrong; None if all are right."""
        return next((row for row in self.rows if not row.ok), None)

    def wrong(self) -> dict[str, dict[str, int]]:
        """How many tensors are wrong, by what they are and by rank."""
        rows = [row for row in self.rows if not row.ok]
        subjects = [Subject.read(row.name) for row in rows]
        kinds = Counter(subject.kind if subject else "placement" for subject in subjects)
        return {"by_kind": kinds, "by_rank": Counter(str(row.rank) for row in rows)}

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
    return concluded(in_order(rows, reference), layout, work, reference)


def concluded(
    rows: list[Row], layout: Layout, task: Task, reference: Mapping[str, Trace]
) -> Report:
    """The report on the rows of all ranks."""
    evidence = Evidence(rows, layout, task, reference)
    first = next((row for row in rows if not row.ok), None)
    place = evidence.whole_index(first) if first else None
    gap = min(trace.gap for trace in reference.values())
    return Report(str(layout), rows, diagnose(evidence), place, gap)


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
        trace = _train(stepper, task)
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


def _train(stepper: Stepper, task: Task) -> Trace:
    trace, model = Trace(), stepper.model
    chunks = chunks_of(task.model, model.mesh.layout, task.stages)[model.mesh.coordinates["pp"]]
    recorder = Recorder(model, chunks)
    trace.start = model.lives.views(to_host(model.lives.weights).copy())
    for batch in task.batches():
        result = stepper.step(batch)
        trace.outputs.append(recorder.take())
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.gradients.append({k: to_host(g).copy() for k, g in model.gradients().items()})
        trace.weights.append(model.lives.views(to_host(model.lives.weights).copy()))
    trace.slots = {kind: model.stepped.views(to_host(slot)) for kind, slot in stepper.slots.items()}
    return trace


def _compare(name: str, got: Trace, expected: Trace, *, noise_bound: float,
             parts: tuple[Part, Part], rank: int) -> Iterator[Row]:  # fmt: skip
    lives, is_stepped = parts
    noise = zero_by_algebra(expected.gradients)
    against = partial(
        compare_weights, stepped=expected.stepped, noise=noise, noise_bound=noise_bound, rank=rank
    )
    yield from compare_gradients(
        f"{name} start weight", got.start, expected.start, part=lives, rank=rank
    )
    for i, gradients in enumerate(expected.gradients):
        step = f"{name} step {i + 1}"
        gradients = dict(reversed(gradients.items()))  # the backward comes to the last one first
        yield from compare_outputs(step, got.outputs[i], expected.outputs[i], rank)
        yield compare_numbers(f"{step} loss", got.losses[i], expected.losses[i], rank=rank)
        yield from compare_gradients(
            f"{step} gradient", got.gradients[i], gradients, part=is_stepped, rank=rank
        )
        yield compare_numbers(f"{step} norm", got.norms[i], expected.norms[i], rank=rank)
        weights = against(f"{step} weight", got.weights[i], expected.weights[i], part=lives)
        # Only what is wrong, but of the last step: right weights come from what is listed already.
        yield from (row for row in weights if not row.ok or i == len(expected.gradients) - 1)
    for kind, x in expected.slots.items():
        yield from against(f"{name} {kind}", got.slots[kind], x, part=is_stepped)


def in_order(ranks: list[list[Row]], reference: Mapping[str, Trace]) -> list[Row]:
    """The rows of all ranks, tensor by tensor in the order of execution, then by rank; first what
    the reference does not have."""
    names = [f"{name} {what}" for name, trace in reference.items() for what, _ in trace.named()]
    places = {name: place for place, name in enumerate(names)}
    rows = [row for rank in ranks for row in rank]
    return sorted(rows, key=lambda row: (places.get(row.name, -1), row.rank))


def gather_rows(group: Group, rows: list[Row], reference: Mapping[str, Trace]) -> list[Row]:
    """The rows of all ranks in the order of execution, on every rank: all come to one verdict.

    Of the wrong tensors, only those that a diagnosis looks at bring their elements.
    """
    texts = gathered(group, [replace(row, pair=None).__dict__ for row in rows])
    found = in_order(
        [[Row(**{**row, "index": tuple(row["index"])}) for row in each] for each in texts],
        reference,
    )
    wanted = probes(found)
    mine = {row.name: row.pair for row in rows if row.pair and row.name in wanted}
    pairs = gathered(group, {name: [x.tolist() for x in pair] for name, pair in mine.items()})

    def with_pair(row: Row) -> Row:
        pair = pairs[row.rank].get(row.name)
        return replace(row, pair=(np.array(pair[0]), np.array(pair[1]))) if pair else row

    return [row if row.ok else with_pair(row) for row in found]


def gathered(group: Group, mine: Any) -> list[Any]:
    """Something of each rank that JSON can say, on every rank."""
    text = json.dumps(mine) + "\n"
    texts = group.all_gather(np.frombuffer(text.encode(), np.uint8), purpose="control")
    return [json.loads(line) for line in bytes(texts).splitlines()]
