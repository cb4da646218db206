"""How long the passes of one layer, and of the head, take on one device.

Products by products.py; of what only moves memory, each read and write of a fused kernel is
counted, in elements of the residual stream (sbh, cut or not over tp) and of attention's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minitrain.errors import UserError
from minitrain.layout import Layout
from minitrain.planner.architecture import Architecture
from minitrain.planner.clusters import Device
from minitrain.planner.products import batched, moved, product

# Share of the peak that attention in one kernel reaches, by the kernels' generation; the half that
# a causal mask skips is not counted as work. Dao 2023 (2307.08691): the first 25 to 40 % on A100,
# the second 50 to 73 % on A100, 335 TFLOPs on H100 and twice the first; Shah et al. 2024
# (2407.08608): the third up to 75 % on H100, cuDNN's as much.
FLASH = {
    1: {"A100": 0.325, "H100": 0.17},
    2: {"A100": 0.6, "H100": 0.34},
    3: {"A100": 0.6, "H100": 0.6},
}


@dataclass(frozen=True)
class Training:
    """What is trained, and how: all that time depends on but the cluster.

    Attributes:
        batch: sequences of a step; a micro-batch has `micro_batch` of them on each data rank.
        length: tokens of a sequence.
        recompute: "none", "selective" or "full".
        flash: the generation of a kernel that keeps attention's weights out of the memory; 0 is
            attention by plain products.
        overlap: gradients are reduced, weights gathered and tokens sent to experts while layers are
            computed.
        overlap_tensor: tensor parallelism's collectives go on during the products beside them.
        gradient_bytes: of a gradient that is sent.
        precision: of the linears, "half" or "float8".
    """

    model: Architecture
    layout: Layout
    batch: int
    micro_batch: int
    length: int
    recompute: str = "full"
    flash: int = 0
    overlap: bool = False
    overlap_tensor: bool = False
    gradient_bytes: int = 2
    precision: str = "half"

    @property
    def micro_batches(self) -> int:
        """Of a step, on each data rank."""
        ranks = self.layout.data_ranks
        count = round(self.batch / (ranks * self.micro_batch))
        if count < 1:
            raise UserError(
                f"a batch of {self.batch} is less than a micro-batch of {self.micro_batch} on each "
                f"of {ranks} data ranks; use a batch of at least {ranks * self.micro_batch}"
            )
        return count

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank, after the sequence is cut."""
        return self.micro_batch * self.length // self.layout.cp


class Passes(NamedTuple):
    """Seconds of a forward, of the gradients of inputs, and of those of weights."""

    forward: float
    inputs: float
    weights: float

    @property
    def total(self) -> float:
        """All three."""
        return sum(self)

    def times(self, count: float) -> Passes:
        """Those of so many layers."""
        return Passes(*(count * seconds for seconds in self))

    def plus(self, other: Passes) -> Passes:
        """These and others, one after the other."""
        return Passes(*(a + b for a, b in zip(self, other, strict=True)))


def layer(training: Training, device: Device) -> Passes:
    """One layer and micro-batch, recomputation not counted."""
    linears = [_linear(training, device, n, k) for n, k in _sizes(training)]
    forward, inputs, weights = (sum(part) for part in zip(*linears, strict=True))
    scores = attention(training, device)
    stream = _stream(training, device)
    return Passes(
        forward + scores.forward + stream.forward,
        inputs + scores.inputs + stream.inputs,
        weights + scores.weights + stream.weights,
    )


def _sizes(training: Training) -> list[tuple[int, int]]:
    """Outputs and inputs of a layer's linears on one rank."""
    model, tp = training.model, training.layout.tp
    heads, h = model.heads * model.head_width, model.width
    hidden = model.hidden * (model.active + model.shared if model.experts else 1)
    return [
        ((heads + 2 * model.kv_heads * model.head_width) // tp, h),
        (h, heads // tp),
        (hidden * (2 if model.gated else 1) // tp, h),
        (h, hidden // tp),
    ]


def _linear(training: Training, device: Device, n: int, k: int) -> Passes:
    m, dtype = training.tokens, training.precision
    # To float8, and transposed for the backward: two bytes are read and two written.
    narrow = 4 if dtype == "float8" else 0
    return Passes(
        product(device, m, n, k, dtype) + moved(device, narrow * k * (m + n)),
        product(device, m, k, n, dtype) + moved(device, narrow * m * n),
        product(device, k, n, m, dtype),
    )


def attention(training: Training, device: Device) -> Passes:
    """Attention between its linears."""
    model, s = training.model, training.length
    d, own = model.head_width, s // training.layout.cp
    heads = training.micro_batch * model.heads / training.layout.tp
    if training.flash:
        older = device.name.startswith(("A100", "V100"))
        share = FLASH[training.flash]["A100" if older else "H100"]
        once = 2 * heads * s * own * d / (share * device.flops["half"])
        return Passes(once, 2.5 * once, 0.0)  # five products where the forward has two
    weights = 2 * heads * s * own  # bytes
    scores = batched(device, heads, own, s, d)
    # The forward of softmax reads and writes, dropout too, with a mask of a byte; the backward of
    # softmax reads two and writes one.
    forward = 2 * scores + moved(device, 4.5 * weights, 2)
    return Passes(forward, 4 * scores + moved(device, 5.5 * weights, 2), 0.0)


def _stream(training: Training, device: Device) -> Passes:
    """Norms, dropouts, residual sums, GELU, and the copies between attention's axes."""
    model, tp = training.model, training.layout.tp
    row = 2.0 * training.tokens * model.width
    whole = row / (tp if training.layout.sp else 1)
    # Forward: two norms 4, two sums with dropout 7; heads apart and together 8, GELU 2 · F/h.
    wide = model.hidden / model.width * (3 if model.gated else 2)
    forward = 11 * whole + (8 + wide) * row / tp
    # Backward: norms 6, sums with dropout 11; heads 8, GELU three to two; biases are read again.
    inputs = 17 * whole + (8 + 1.5 * wide) * row / tp
    biases = (whole + (3 + model.hidden / model.width) * row / tp) if model.biased else 0.0
    return Passes(moved(device, forward, 10), moved(device, inputs, 12), moved(device, biases, 4))


def head(training: Training, device: Device) -> Passes:
    """The head, and the loss over its logits in float32."""
    model, tp = training.model, training.layout.tp
    part = model.vocab // tp
    logits = training.tokens * part
    products = _linear(training, device, part, model.width)
    # Cast 6, largest 4, shifted 8, exponential 8, its sum 4, divided 8; backward: scaled 8, cast 6.
    return Passes(
        products.forward + moved(device, 38 * logits, 8),
        products.inputs + moved(device, 14 * logits, 3),
        products.weights,
    )
