"""What each strategy sends: the communication table of a layout.

Bytes are payload per card and optimizer step, in fp16, with rings: an all-reduce of S bytes over n
sends 2(n-1)/n·S.
"""

from __future__ import annotations

from dataclasses import dataclass

from minitrain.planner.clusters import Cluster
from minitrain.planner.layer_time import Training

SHARE = 0.1  # of the step that a strategy may take before its links are too slow


@dataclass(frozen=True)
class Traffic:
    """A strategy's row of the table.

    Attributes:
        size: bytes that a card sends in a step.
        message: bytes of one message or collective.
        cards: how many communicate, and where they stand.
        seconds: at the links that the cluster has there.
        asks: what it asks of the cluster.
    """

    strategy: str
    operation: str
    size: float
    message: float
    cards: str
    seconds: float
    asks: str


def communication(training: Training, cluster: Cluster, step: float) -> list[Traffic]:
    """The rows of the axes that a layout uses, for a step of so many seconds."""
    layout = training.layout
    return [
        row(training, cluster, step)
        for size, row in (
            (layout.tp, _tensor),
            (layout.shard, _sharding),
            (layout.pp, _pipeline),
            (layout.dp, _data),
        )
        if size > 1
    ]


def tensor_bytes(training: Training) -> float:
    """Four all-reduces of bsh a layer and micro-batch, six with full recomputation."""
    layers = training.model.layers / training.layout.pp
    return training.micro_batches * layers * _layer_bytes(training)


def pipeline_bytes(training: Training) -> float:
    """One message forward and one backward a micro-batch, on a stage in the middle."""
    return 2 * training.layout.chunks * training.micro_batches * message_bytes(training)


def message_bytes(training: Training) -> float:
    """The residual stream between two stages, on each tensor-parallel rank."""
    return 2.0 * training.tokens * training.model.width


def data_bytes(training: Training, item: int = 2) -> float:
    """Gradients of `item` bytes, all-reduced once a step over dp; of a sharded one, the piece."""
    layout = training.layout
    return 2 * (layout.dp - 1) / layout.dp * _own(training) / layout.shard * item


def _own(training: Training) -> float:
    return training.model.parameters / (training.layout.tp * training.layout.pp)


def _layer_bytes(training: Training) -> float:
    tp = training.layout.tp
    count = 6 if training.recompute == "full" else 4
    return count * 2 * (tp - 1) / tp * message_bytes(training)


def _tensor(training: Training, cluster: Cluster, step: float) -> Traffic:
    size = tensor_bytes(training)
    return Traffic(
        "tensor", "reduce-scatter, all-gather" if training.layout.sp else "all-reduce",
        size, message_bytes(training),
        f"{training.layout.tp} of one node", size / cluster.link, _asks(size, step, "in a node"),
    )  # fmt: skip


def _sharding(training: Training, cluster: Cluster, step: float) -> Traffic:
    layout = training.layout
    passes = 3 * training.micro_batches if layout.zero == 3 else 2
    own = 2 * _own(training)
    size = passes * (layout.shard - 1) / layout.shard * own
    inside = layout.shard * layout.tp <= cluster.node
    rate = cluster.link if inside else _port(cluster)
    where = "one node" if inside else "several nodes"
    operation = "broadcast or all-gather, reduce-scatter"
    return Traffic(
        "sharding", operation, size, own, f"{layout.shard} of {where}", size / rate,
        _asks(size, step, "in a node" if inside else "between nodes"),
    )  # fmt: skip


def _pipeline(training: Training, cluster: Cluster, step: float) -> Traffic:
    size = pipeline_bytes(training)
    cards = f"same place in {training.layout.pp} nodes or parts of nodes"
    return Traffic(
        "pipeline", "point to point", size, message_bytes(training), cards,
        size / _port(cluster), _asks(size, step, "between neighbouring nodes"),
    )  # fmt: skip


def _data(training: Training, cluster: Cluster, step: float) -> Traffic:
    size = data_bytes(training, training.gradient_bytes)
    return Traffic(
        "data", "all-reduce", size, training.gradient_bytes * _own(training),
        f"{training.layout.dp}, one of each group", size / _port(cluster),
        _asks(size, step, "between all groups, once a step"),
    )  # fmt: skip


def _port(cluster: Cluster) -> float:
    """Network bytes a second for each card of a node."""
    return cluster.node_bandwidth / cluster.node


def _asks(size: float, step: float, where: str) -> str:
    return f"{size / (SHARE * step) / 1e9:.3g} GB/s a card {where}, to take a tenth of the step"
