"""A plan: what a layout costs a model on a cluster, in bytes, messages, seconds, days and money."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.planner.architecture import Architecture
from minitrain.planner.budget import Budget, days_of_tokens
from minitrain.planner.clusters import Cluster
from minitrain.planner.clusters import cluster as cluster_of
from minitrain.planner.footprint import USABLE, Footprint, footprint
from minitrain.planner.layer_time import Training
from minitrain.planner.models import preset, shape_of
from minitrain.planner.step_time import StepTime, hfu, mfu, step_time, tokens_per_second
from minitrain.planner.traffic import Traffic, communication

DEFAULTS: dict[str, Any] = {"recompute": "none", "flash": 2, "overlap": True}
"""How a training of today is done, where nothing else is said; those that Training has are of the
published runs, which are older."""


@dataclass(frozen=True)
class Plan:
    """A training on a cluster, and all that follows from it.

    Attributes:
        name: of the model.
        memory: bytes of the fullest rank, by kind.
        time: of a step, its bubble that of the schedule run in thought.
        tokens: of the whole training; None: no days are computed.
        price: of a device for an hour; None: no cost is computed.
    """

    name: str
    training: Training
    cluster: Cluster
    memory: Footprint
    time: StepTime
    tokens: float | None
    price: float | None

    @property
    def limit(self) -> float:
        """Bytes of a device that a layout may fill."""
        return USABLE * self.cluster.device.memory

    @property
    def fits(self) -> bool:
        """Whether the fullest rank holds no more than that."""
        return self.memory.total <= self.limit

    @property
    def traffic(self) -> list[Traffic]:
        """What each strategy sends."""
        return communication(self.training, self.cluster, self.time.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return tokens_per_second(self.training, self.time)

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak."""
        return mfu(self.training, self.time, self.cluster)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs over the peak: recomputation counts as work."""
        return hfu(self.training, self.time, self.cluster)

    @property
    def days(self) -> float | None:
        """Days for the tokens of the training."""
        return None if self.tokens is None else days_of_tokens(self.tokens, self.tokens_per_second)

    @property
    def cost(self) -> float | None:
        """Of all devices for these days."""
        if self.days is None or self.price is None:
            return None
        return self.days * 24 * self.training.layout.size * self.price

    def pf_days(self, convention: str) -> float | None:
        """PF-days for the tokens of the training, by a convention of `Budget`."""
        if self.tokens is None:
            return None
        return Budget.of(self.training.model.active_parameters, self.tokens, convention).pf_days

    def values(self) -> dict[str, Any]:
        """The whole plan as plain data."""
        training, cluster = self.training, self.cluster
        return {
            "model": self.name,
            "parameters": training.model.parameters,
            "active_parameters": training.model.active_parameters,
            "cluster": cluster.name,
            "gpus": training.layout.size,
            "layout": str(training.layout),
            "batch": training.batch,
            "micro_batch": training.micro_batch,
            "micro_batches": training.micro_batches,
            "length": training.length,
            "recompute": training.recompute,
            "memory": {**asdict(self.memory), "total": self.memory.total, "limit": self.limit},
            "fits": self.fits,
            "traffic": [asdict(row) for row in self.traffic],
            "step": {**asdict(self.time), "seconds": self.time.seconds},
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tokens": self.tokens,
            "days": self.days,
            "pf_days": {"model": self.pf_days("model"), "hardware": self.pf_days("hardware")},
            "cost": self.cost,
        }


def plan(
    model: str | Architecture,
    cluster: str | Cluster,
    layout: str | Layout,
    *,
    batch: int,
    micro_batches: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    **how: Any,
) -> Plan:
    """What a layout of a model on a cluster costs.

    Args:
        model, cluster: presets by name, or one's own.
        batch: sequences of a step.
        micro_batches: parts of the batch, one after the other; None: parts of a sequence each.
        tokens: of the whole training, for its days.
        price: of a device for an hour.
        how: fields of Training: length (the model's context where it is left out), recompute,
            flash, overlap, overlap_tensor, gradient_bytes, precision.

    Raises:
        UserError: a name that is not known; LayoutError: a layout that the model or the batch does
            not fit.
    """
    name, shape = model_of(model)
    cluster = cluster_of(cluster) if isinstance(cluster, str) else cluster
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    length = how.pop("length", None) or shape.context
    parts = max(1, batch // layout.data_ranks) if micro_batches is None else micro_batches
    check(shape, layout, batch=batch, micro_batches=parts, length=length)
    size = batch // (layout.data_ranks * parts)
    training = Training(shape, layout, batch, size, length, **DEFAULTS | how)
    return plan_of(name, training, cluster, tokens=tokens, price=price)


def plan_of(
    name: str,
    training: Training,
    cluster: Cluster,
    *,
    tokens: float | None = None,
    price: float | None = None,
) -> Plan:
    """The plan of a training that has been checked."""
    time = step_time(training, cluster, simulated=True)
    return Plan(name, training, cluster, footprint(training), time, tokens, price)


def model_of(model: str | Architecture) -> tuple[str, Architecture]:
    """A model's name and shape, from a preset's name or one's own shape."""
    if isinstance(model, str):
        return preset(model).name, shape_of(model)
    return "a model of one's own", model


def check(
    model: Architecture, layout: Layout, *, batch: int, micro_batches: int, length: int
) -> None:
    """Refuse a layout that cannot run; LayoutError names every rule that it breaks.

    Raises:
        UserError: a model of two stacks or without words, which no layout is known to cut.
    """
    if model.decoder_layers or not model.vocab:
        raise UserError("only stacks of one kind of layer over words can be planned; take a GPT")
    layout.check(
        batch=batch,
        micro_batches=micro_batches,
        heads=model.heads,
        layers=model.layers,
        vocab=model.vocab,
        context=length,
        experts=model.experts or None,
    )
