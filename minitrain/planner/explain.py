"""Where the figures of a plan come from: each formula, with its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

from minitrain.planner.architecture import activation_bytes
from minitrain.planner.budget import amount, pf_days
from minitrain.planner.footprint import held_parameters
from minitrain.planner.pipeline import in_flight, stage_layers
from minitrain.planner.plans import Plan
from minitrain.planner.traffic import message_bytes


class Line(NamedTuple):
    """A figure: its name, the formula, the formula's numbers, and what comes out."""

    figure: str
    formula: str
    numbers: str
    value: str


def explain(plan: Plan) -> list[Line]:
    """All of a plan's figures, in the order in which they build on each other."""
    return [*_model(plan), *_memory(plan), *_traffic(plan), *_step(plan), *_whole(plan)]


def _model(plan: Plan) -> Iterator[Line]:
    training = plan.training
    model, s = training.model, training.length
    linear, attention, head = model.forward_flops(s).parts
    parts = f"{amount(linear)}+ {amount(attention)}+ {amount(head)}"
    yield Line(
        "model FLOPs a token", "3 × (linears + attention + head)", f"3 × ({parts})",
        f"{amount(model.model_flops(s))}FLOPs",
    )  # fmt: skip
    hardware = model.hardware_flops(s, recompute=training.recompute)
    yield Line(
        "hardware FLOPs a token", "model FLOPs + forwards computed again",
        f"recompute {training.recompute}", f"{amount(hardware)}FLOPs",
    )  # fmt: skip


def _memory(plan: Plan) -> Iterator[Line]:
    training, memory = plan.training, plan.memory
    layout, held = training.layout, held_parameters(plan.training)
    layers = max(stage_layers(training))
    yield Line(
        "parameters a rank", "(layers of the fullest stage × a layer's + table) ÷ tp",
        f"{layers} layers, tp {layout.tp}", amount(held).strip(),
    )  # fmt: skip
    zero = layout.zero or 0
    for name, size, stage, nbytes in (
        ("weights", 2, 3, memory.weights),
        ("gradients", training.gradient_bytes, 2, memory.gradients),
        ("optimizer", 12, 1, memory.optimizer),
    ):
        ranks = layout.shard if zero >= stage else 1
        yield Line(
            name, "bytes × parameters ÷ ranks that share them",
            f"{size} × {amount(held).strip()} ÷ {ranks}", f"{amount(nbytes)}B",
        )  # fmt: skip
    layer = activation_bytes(
        training.model, training.micro_batch, layout.tp, sp=layout.sp, recompute=training.recompute
    )
    yield Line(
        "activations", "layers ÷ pp × micro-batches in flight × a layer's (Korthikanti, table 2)",
        f"{training.model.layers} ÷ {layout.pp} × "
        f"{in_flight(layout, training.micro_batches):.3g} × {amount(layer)}B",
        f"{amount(memory.activations)}B",
    )  # fmt: skip
    parts = " + ".join(f"{name} {amount(nbytes)}B" for name, nbytes in asdict(memory).items())
    yield Line("memory", "the sum of its kinds", parts, f"{amount(memory.total)}B")


def _traffic(plan: Plan) -> Iterator[Line]:
    training = plan.training
    layout, m = training.layout, training.micro_batches
    layers, own = training.model.layers, training.model.parameters / (layout.tp * layout.pp)
    count = 6 if training.recompute == "full" else 4
    bsh, grads = f"{amount(message_bytes(training))}B", f"{training.gradient_bytes} × {amount(own)}"
    stream = f"{count} × {m} × {layers} ÷ {layout.pp} × 2·{layout.tp - 1}/{layout.tp} × {bsh}"
    times = f"3 × {m}" if layout.zero == 3 else "2"
    formulas = {
        "tensor": ("all-reduces × micro-batches × layers ÷ pp × 2(t-1)/t × 2·b·s·h", stream),
        "sharding": (
            "2, with ZeRO 3 3 × micro-batches, × (n-1)/n × 2Ψ",
            f"{times} × {layout.shard - 1}/{layout.shard} × 2 × {amount(own)}",
        ),
        "pipeline": ("2 × chunks × micro-batches × 2·b·s·h", f"2 × {layout.chunks} × {m} × {bsh}"),
        "data": (
            "2(d-1)/d × bytes of a gradient × Ψ ÷ shard",
            f"2·{layout.dp - 1}/{layout.dp} × {grads} ÷ {layout.shard}",
        ),
    }
    for row in plan.traffic:
        yield Line(f"{row.strategy} sends", *formulas[row.strategy], f"{amount(row.size)}B")


def _step(plan: Plan) -> Iterator[Line]:
    training, time = plan.training, plan.time
    layout = training.layout
    yield Line(
        "compute", "micro-batches × the slowest stage's passes (products.py, layer_time.py)",
        f"{training.micro_batches} × {time.compute / training.micro_batches:.4g} s",
        f"{time.compute:.4g} s",
    )  # fmt: skip
    yield Line(
        "bubble", "the schedule's cost - the slowest stage's work",
        f"{layout.schedule or 'one stage'}, pp {layout.pp}, {training.micro_batches} micro-batches",
        f"{time.bubble:.4g} s",
    )  # fmt: skip
    parts = ("tensor", "context", "expert", "pipeline", "data")
    shown = " + ".join(f"{part} {getattr(time, part):.3g}" for part in parts)
    yield Line("exposed", "communication that nothing hides", shown, f"{time.exposed:.4g} s")
    yield Line(
        "step", "compute + bubble + exposed + optimizer",
        f"{time.compute:.4g} + {time.bubble:.3g} + {time.exposed:.3g} + {time.optimizer:.3g}",
        f"{time.seconds:.4g} s",
    )  # fmt: skip


def _whole(plan: Plan) -> Iterator[Line]:
    training, rate = plan.training, plan.tokens_per_second
    peak = plan.cluster.device.flops["half"] * training.layout.size
    yield Line(
        "tokens a second", "batch × length ÷ step",
        f"{training.batch} × {training.length} ÷ {plan.time.seconds:.4g}", f"{rate:.5g}",
    )  # fmt: skip
    for name, share in (("MFU", plan.mfu), ("HFU", plan.hfu)):
        kind = "model" if name == "MFU" else "hardware"
        yield Line(
            name, f"{kind} FLOPs a token × tokens a second ÷ peak of all",
            f"{amount(share * peak)}FLOPs/s ÷ {amount(peak)}FLOPs/s", f"{share:.1%}",
        )  # fmt: skip
    if plan.tokens is None or plan.days is None:
        return
    yield Line(
        "days", "tokens ÷ tokens a second ÷ 86400", f"{plan.tokens:.4g} ÷ {rate:.5g} ÷ 86400",
        f"{plan.days:.4g}",
    )  # fmt: skip
    for kind, factor in (("model", 6), ("hardware", 8)):
        yield Line(
            f"PF-days ({kind})", f"{factor}ND ÷ 1e15 ÷ 86400",
            f"{factor} × {training.model.active_parameters:.4g} × {plan.tokens:.4g}",
            pf_days(plan.pf_days(kind) or 0.0),
        )  # fmt: skip
    if plan.cost is not None:
        yield Line(
            "cost", "days × 24 × devices × price",
            f"{plan.days:.4g} × 24 × {training.layout.size} × {plan.price:g}", f"{plan.cost:,.0f}",
        )  # fmt: skip
