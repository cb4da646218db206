"""The search for the best layout: all that are worth a look, those that fit, the fastest of them.

Layouts are compared by the schedules' closed formulas; the best of each kind (t-way tensor and
p-way pipeline parallelism) is then computed again with its schedule run in thought, and set beside
the best of all: by which term it loses, or by which kind of bytes it does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from minitrain.errors import UserError
from minitrain.layout import Layout, LayoutError
from minitrain.planner.architecture import Architecture
from minitrain.planner.clusters import Cluster
from minitrain.planner.clusters import cluster as cluster_of
from minitrain.planner.footprint import USABLE, Footprint, footprint
from minitrain.planner.layer_time import Training
from minitrain.planner.plans import DEFAULTS, Plan, check, model_of, plan_of
from minitrain.planner.step_time import step_time
from minitrain.planner.tuning import MICRO_BATCHES

RECOMPUTE = ("none", "full")
SCHEDULES = ("1f1b", "zb-h1", "interleaved")
MOST_CHUNKS = 8  # a stage is cut into, by the interleaved schedule

Kind = tuple[int, int]  # t and p


@dataclass(frozen=True)
class Unfit:
    """A kind of layout of which none fits.

    Attributes:
        training, memory: the one that needs the least, and what it needs.
        limit: bytes that it may have.
    """

    training: Training
    memory: Footprint
    limit: float

    @property
    def reason(self) -> str:
        """What it needs, and of which kind most."""
        kinds = asdict(self.memory)
        most = max(kinds, key=kinds.__getitem__)
        return (
            f"needs {self.memory.total / 1e9:.4g} GB of {self.limit / 1e9:.4g}, "
            f"{kinds[most] / 1e9:.4g} of them {most}"
        )


@dataclass(frozen=True)
class Search:
    """What a search has found.

    Attributes:
        plans: the best of each kind of layout, the best of all first; only those that fit.
        unfit: the kinds of which none fits.
        legal: how many layouts, micro-batches and ways of recomputation were looked at.
        fitting: how many of them fit.
    """

    plans: list[Plan]
    unfit: list[Unfit]
    legal: int
    fitting: int

    def loss(self, plan: Plan) -> dict[str, float]:
        """By term, the seconds that a plan's step takes more than the best one's."""
        best = asdict(self.plans[0].time)
        return {term: seconds - best[term] for term, seconds in asdict(plan.time).items()}

    def reason(self, plan: Plan) -> str:
        """By which term a plan loses most."""
        loss = self.loss(plan)
        term = max(loss, key=loss.__getitem__)
        return f"{term} +{loss[term]:.3g} s" if loss[term] > 0 else "the best"

    def values(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "legal": self.legal,
            "fitting": self.fitting,
            "plans": [plan.values() | {"loss": self.loss(plan)} for plan in self.plans],
            "unfit": [
                {"layout": str(one.training.layout), "reason": one.reason} for one in self.unfit
            ],
        }


def search(
    model: str | Architecture,
    cluster: str | Cluster,
    gpus: int,
    *,
    batch: int,
    memory: float | None = None,
    tokens: float | None = None,
    price: float | None = None,
    **how: Any,
) -> Search:
    """The best layouts of a model on so many devices of a cluster, and why the others lose.

    Along dp, shard, pp and tp. What is looked at: tensor parallelism in a node; ZeRO 1 over all
    data ranks or those of a node, ZeRO 3 without a pipeline; micro-batches that divide the batch.

    Args:
        batch: sequences of a step.
        memory: bytes of a device; None: what the cluster's have.
        how: as for `plan`; recompute is chosen where it is left out.

    Raises:
        UserError: no layout divides the batch and the devices, or none fits.
    """
    name, shape = model_of(model)
    cluster = cluster_of(cluster) if isinstance(cluster, str) else cluster
    if memory is not None:
        cluster = replace(cluster, device=replace(cluster.device, memory=memory))
    looked = _Looked(cluster)
    for one in _trainings(shape, cluster, gpus, batch, how):
        looked.at(one)
    looked.check(f"{gpus} devices and a batch of {batch}")
    plans = [
        plan_of(name, one, cluster, tokens=tokens, price=price) for _, one in looked.best.values()
    ]
    plans.sort(key=lambda plan: plan.time.seconds)
    unfit = [one for kind, one in looked.least.items() if kind not in looked.best]
    return Search(plans, unfit, looked.legal, looked.fitting)


class _Looked:
    """What has been looked at: by kind the fastest that fits, and the smallest that does not."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.limit = cluster, USABLE * cluster.device.memory
        self.best: dict[Kind, tuple[float, Training]] = {}
        self.least: dict[Kind, Unfit] = {}
        self.legal = self.fitting = 0

    def at(self, one: Training) -> None:
        """Look at one more."""
        self.legal += 1
        kind, held = (one.layout.tp, one.layout.pp), footprint(one)
        if held.total > self.limit:
            if kind not in self.least or held.total < self.least[kind].memory.total:
                self.least[kind] = Unfit(one, held, self.limit)
            return
        self.fitting += 1
        seconds = step_time(one, self.cluster).seconds
        if kind not in self.best or seconds < self.best[kind][0]:
            self.best[kind] = seconds, one

    def check(self, what: str) -> None:
        """Refuse to go on with nothing."""
        if not self.legal:
            raise UserError(
                f"no layout cuts {what} evenly; take a batch that the number of devices divides"
            )
        if not self.fitting:
            nearest = min(self.least.values(), key=lambda one: one.memory.total)
            raise UserError(
                f"none of {self.legal} layouts of {what} fits: the smallest, "
                f"{nearest.training.layout}, {nearest.reason}; take more devices"
            )


def _trainings(
    model: Architecture, cluster: Cluster, gpus: int, batch: int, how: dict[str, Any]
) -> Iterator[Training]:
    ways = [how["recompute"]] if "recompute" in how else RECOMPUTE
    how = DEFAULTS | how
    length = how.pop("length", None) or model.context
    for layout in _layouts(model, cluster, gpus):
        own = batch // layout.data_ranks
        for size in (size for size in MICRO_BATCHES if own and own % size == 0):
            if layout.schedule in ("zb-h1", "interleaved") and own // size < layout.pp:
                continue  # their formulas do not hold with fewer micro-batches than stages
            try:
                check(model, layout, batch=batch, micro_batches=own // size, length=length)
            except LayoutError:
                continue
            for recompute in ways:
                yield Training(model, layout, batch, size, length, **how | {"recompute": recompute})


def _layouts(model: Architecture, cluster: Cluster, gpus: int) -> Iterator[Layout]:
    for tp in _divisors(gpus, cluster.node):
        if model.heads % tp or model.kv_heads % min(tp, model.kv_heads):
            continue
        for pp in _divisors(gpus // tp, model.layers):
            for data in _data(gpus // (tp * pp), cluster.node // tp, pp):
                for schedule in _schedules(model.layers, pp):
                    yield Layout(tp=tp, sp=tp > 1, pp=pp, **data, **schedule)


def _data(ranks: int, neighbours: int, pp: int) -> Iterator[dict[str, Any]]:
    """How the data ranks share optimizer states, `neighbours` of them in a node."""
    yield {"dp": ranks}
    if ranks == 1:
        return
    yield {"shard": ranks, "zero": 1}
    if 1 < neighbours < ranks and ranks % neighbours == 0:
        yield {"dp": ranks // neighbours, "shard": neighbours, "zero": 1}
    if pp == 1:  # else each stage would gather its weights again for each micro-batch
        yield {"shard": ranks, "zero": 3}


def _schedules(layers: int, pp: int) -> Iterator[dict[str, Any]]:
    if pp == 1:
        yield {}
        return
    for schedule in SCHEDULES[:2]:
        yield {"schedule": schedule}
    if layers % pp == 0:
        for chunks in _divisors(layers // pp, MOST_CHUNKS)[1:]:
            yield {"schedule": SCHEDULES[2], "chunks": chunks}


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
