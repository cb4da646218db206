"""Bytes on the fullest rank of a large run, by kind: what decides whether a layout fits.

Weights and gradients are in 16 bits (gradients as `gradient_bytes` says), AdamW's master and two
moments in float32; activations are those of Korthikanti et al. 2022, section 4, of as many
micro-batches as the schedule holds at once. What our own ranks hold, to the byte, is in memory.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from minitrain.planner.architecture import activation_bytes
from minitrain.planner.layer_time import Training
from minitrain.planner.pipeline import in_flight, stage_layers

USABLE = 0.9  # of a device's memory; the rest is the libraries' own and lies between allocations


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank.

    Attributes:
        optimizer: float32 masters and both moments.
        activations: that wait for their backward, and those of a layer that is computed again.
        logits: in float32, and the input of the head; where the head has a stage of its own, the
            first stage is fuller, and holds none.
        buffers: messages between stages, and weights that ZeRO 3 has gathered: of the layer that is
            computed and of the next one.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(asdict(self).values()))


def footprint(training: Training) -> Footprint:
    """What the fullest rank of a training holds."""
    layout, zero = training.layout, training.layout.zero or 0
    whole, own = held_parameters(training), _own_parameters(training)
    # ZeRO cuts experts over the ranks that ep leaves: over both together, as all else over shard.
    weights, gradients, states = (
        whole / layout.shard if zero >= stage and layout.shard > 1 else own for stage in (3, 2, 1)
    )
    return Footprint(
        weights=2 * weights,
        gradients=training.gradient_bytes * gradients,
        optimizer=12 * states,
        activations=_activations(training),
        logits=_logits(training) if layout.pp == 1 else 0.0,
        buffers=_messages(training) + (_gathered(training) if zero == 3 else 0.0),
    )


def held_parameters(training: Training) -> float:
    """Parameters of the fullest stage on a rank before ZeRO cuts them."""
    model, layout = training.model, training.layout
    table = model.vocab * model.width
    block = (model.parameters - (1 if model.tied else 2) * table) / model.layers
    tables = table if layout.pp > 1 or model.tied else 2 * table
    return (max(stage_layers(training)) * block + tables) / layout.tp


def _own_parameters(training: Training) -> float:
    """The same without the experts that other ranks along ep hold."""
    model, layout = training.model, training.layout
    mixed = 1 - model.dense_layers / model.layers
    layers = mixed * max(stage_layers(training)) if model.experts else 0.0
    experts = layers * model.experts * model.mlp_weights(model.hidden) / layout.tp
    return held_parameters(training) - experts * (1 - 1 / layout.ep)


def _activations(training: Training) -> float:
    """Of the layers of the fullest rank, for all micro-batches in flight, and of the embedding."""
    layout, model = training.layout, training.model
    kept = "selective" if training.flash and training.recompute == "none" else training.recompute
    own = replace(model, context=training.length // layout.cp)
    layer = activation_bytes(own, training.micro_batch, layout.tp, sp=layout.sp, recompute=kept)
    waiting = model.layers / layout.pp * in_flight(layout, training.micro_batches)
    use = activation_bytes(own, training.micro_batch, layout.tp, sp=layout.sp)
    again = use if training.recompute == "full" and not training.flash else 0.0
    return layer * waiting + again


def _logits(training: Training) -> float:
    return 4.0 * training.tokens * training.model.vocab / training.layout.tp


def _messages(training: Training) -> float:
    """One that comes and one that goes, in each direction."""
    layout = training.layout
    if layout.pp == 1:
        return 0.0
    return 4 * 2.0 * training.tokens * training.model.width / (layout.tp if layout.sp else 1)


def _gathered(training: Training) -> float:
    """In 16 bits: the layer that is computed, and the one whose weights are on their way."""
    return 2 * 2 * held_parameters(training) / max(stage_layers(training))
