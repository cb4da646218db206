"""How long a step takes on a cluster: compute, exposed communication, bubble, optimizer.

The constants are few, each with a physical meaning. PRODUCT, MEMORY, KERNEL (products.py) and
EXCHANGE are fitted to two published sets, Table 1 of SC21 (2104.04473) and Table 4 of Zero Bubble
(2401.10241), before any other set was computed; all others are vendors' or separately published
figures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from minitrain.planner.clusters import Cluster
from minitrain.planner.collectives import Ring, between, ring
from minitrain.planner.footprint import held_parameters
from minitrain.planner.layer_time import Passes, Training, attention, head, layer
from minitrain.planner.pipeline import bubble, simulated_bubble, stage_layers
from minitrain.planner.products import moved

EXCHANGE = 57e-6  # seconds: two stages meet and start to send; fitted

# Bytes of memory that the optimizer's step touches for each parameter that a rank steps (in fp16:
# gradient to float32 6, unscale 8, norm 4, AdamW reads 16 and writes 12, back to fp16 6), and for
# each that it holds (the gradient is set to zero).
STEPPED, ZEROED = 52, 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they go into; their sum is the step.

    Attributes:
        compute: of the slowest stage, all micro-batches.
        bubble: stages wait for the pipeline to fill and to drain.
        tensor, context, expert, pipeline, data: exposed communication by the axis that needs it.
        optimizer: the update.
    """

    compute: float
    bubble: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return float(sum(asdict(self).values()))

    @property
    def exposed(self) -> float:
        """Communication that nothing hides."""
        return self.tensor + self.context + self.expert + self.pipeline + self.data


def step_time(training: Training, cluster: Cluster, *, simulated: bool = False) -> StepTime:
    """The step of a training on a cluster.

    Args:
        simulated: the bubble is that of the schedule run in thought, not of its closed formula.
    """
    layout, m = training.layout, training.micro_batches
    blocks = stage_layers(training)
    one = _computed(training, cluster)
    top = head(training, cluster.device)
    busy = [one.times(count) for count in blocks]
    busy[-1] = busy[-1].plus(top)
    slowest = max(busy, key=sum)
    per_layer = [f(training, cluster) for f in (tensor_seconds, _context, _expert)]
    tensor, context, expert = (m * max(blocks) * seconds for seconds in per_layer)
    meet = _exchange(training, cluster) if layout.pp > 1 else 0.0
    messages = Passes(1.0, 1.0, 0.0).times((sum(per_layer) * max(blocks)) / 2 + meet)
    stages = [one.plus(messages) for one in busy]
    return StepTime(
        compute=m * slowest.total,
        bubble=(
            simulated_bubble(layout, m, stages)
            if simulated
            else bubble(layout.schedule or "", layout.chunks, stages)
        ),
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=m * 2 * layout.chunks * meet,
        data=_data(training, cluster, max(blocks) * one.total),
        optimizer=_optimizer(training, cluster),
    )


def tokens_per_second(training: Training, time: StepTime) -> float:
    """Of all ranks together."""
    return training.batch * training.length / time.seconds


def mfu(training: Training, time: StepTime, cluster: Cluster, *, causal: bool = False) -> float:
    """Model FLOPs over the peak: the share of the hardware that the model's arithmetic uses."""
    flops = training.model.model_flops(training.length, causal=causal)
    return _used(flops, training, time, cluster)


def hfu(training: Training, time: StepTime, cluster: Cluster) -> float:
    """Hardware FLOPs over the peak: recomputation counts as work."""
    flops = training.model.hardware_flops(training.length, recompute=training.recompute)
    return _used(flops, training, time, cluster)


def _used(flops: float, training: Training, time: StepTime, cluster: Cluster) -> float:
    peak = cluster.device.flops["half"] * training.layout.size
    return flops * tokens_per_second(training, time) / peak


def _computed(training: Training, cluster: Cluster) -> Passes:
    """A layer, with what recomputation repeats in its backward."""
    once = layer(training, cluster.device)
    again = {
        "none": 0.0,
        "selective": attention(training, cluster.device).forward,
        "full": once.forward,
    }[training.recompute]
    return once._replace(inputs=once.inputs + again)


def tensor_seconds(training: Training, cluster: Cluster) -> float:
    """A layer's all-reduces, two a pass; sequence parallelism sends as much in two halves."""
    layout = training.layout
    size = 2.0 * training.tokens * training.model.width
    count = 6 if training.recompute == "full" else 4
    seconds = count * ring(cluster, layout.tp, layout.tp).all_reduce(size)
    # Cut into as many pieces as ranks, all but one piece go while another is multiplied.
    return seconds / layout.tp if training.overlap_tensor else seconds


def _context(training: Training, cluster: Cluster) -> float:
    """Keys and values of the others, forward and backward, and their gradients back."""
    layout, model = training.layout, training.model
    heads = 2 * model.kv_heads * model.head_width / layout.tp
    size = 2.0 * training.micro_batch * training.length * heads
    count = 4 if training.recompute == "full" else 3
    return count * ring(cluster, layout.cp, max(1, cluster.node // layout.tp)).half(size)


def _expert(training: Training, cluster: Cluster) -> float:
    """Tokens to their experts and back, forward and backward."""
    model, layout = training.model, training.layout
    if not model.experts or layout.ep == 1:
        return 0.0
    group: Ring = ring(cluster, layout.ep, max(1, cluster.node // layout.tp))
    size = 2.0 * training.tokens * model.active * model.width / layout.tp
    count = 6 if training.recompute == "full" else 4
    seconds = count * (group.start + (layout.ep - 1) / layout.ep * size / group.bandwidth)
    hidden = layer(training, cluster.device).total if training.overlap else 0.0
    return max(0.0, seconds - hidden)


def _exchange(training: Training, cluster: Cluster) -> float:
    """One message between two stages; of tp ranks each sends its part, and they gather it."""
    layout = training.layout
    size = 2.0 * training.tokens * training.model.width
    inside = layout.size <= cluster.node
    # Stages follow each other on neighbouring devices, so of a node only these send to another.
    senders = min(cluster.node, layout.tp * layout.cp * layout.data_ranks)
    sharers = max(1.0, senders / cluster.ports)
    sent = between(cluster, size / layout.tp, same_node=inside, sharers=sharers)
    return EXCHANGE + sent + ring(cluster, layout.tp, layout.tp).half(size)


def _data(training: Training, cluster: Cluster, busy: float) -> float:
    """Gradients summed over the data ranks, once a step; ZeRO 3 gathers weights a micro-batch."""
    layout = training.layout
    held, ranks = held_parameters(training), layout.data_ranks * layout.cp
    group = ring(cluster, ranks, max(1, cluster.node // layout.tp))
    if layout.zero == 3 and layout.shard > 1:
        return _gathered(training, held, group, busy)
    size = training.gradient_bytes * held
    if layout.shard > 1:
        seconds = group.half(size) + group.half(2 * held)
    else:
        seconds = group.all_reduce(size)
    if not training.overlap:
        return seconds
    # The last micro-batch's backward, two thirds of it, hides all but the last layer's gradient.
    return max(seconds - busy * 2 / 3, seconds / training.model.layers)


def _gathered(training: Training, held: float, group: Ring, busy: float) -> float:
    """ZeRO 3: weights gathered in forward and backward, gradients scattered, each micro-batch.

    With overlap a layer's weights come as one message while another layer is computed; without, the
    computation waits for each tensor.
    """
    layers, m = training.model.layers, training.micro_batches
    messages = layers if training.overlap else layers * (12 if training.model.biased else 9)
    weights, gradients = 2 * held / messages, training.gradient_bytes * held / messages
    one = m * (2 * group.half(weights) + group.half(gradients))
    return max(messages * one - m * busy, one) if training.overlap else messages * one


def _optimizer(training: Training, cluster: Cluster) -> float:
    held = held_parameters(training)
    own = held / (training.layout.shard if training.layout.shard > 1 else 1)
    return moved(cluster.device, STEPPED * own + ZEROED * held)
