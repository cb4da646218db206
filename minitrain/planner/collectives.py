"""How long a collective takes: α and β, fitted to measured all-reduces.

An all-reduce of S bytes over the n devices of a node takes α + 2(n-1)/n·S/β: α starts the kernel
and passes 2(n-1) hops, β is the bus bandwidth. The table has NCCL's times for 1 MiB to 1 GiB on 2,
4 and 8 A100 and 8 V100 (vTrain's repository, MIT licence); the fit is within 4 % (A100) and 7 %
(V100) of it on average. An all-gather or a reduce-scatter is one half of an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from minitrain.planner.clusters import Cluster
from minitrain.planner.models import table

# What is not in the table, each from a published figure:
NODE_SHARE = 0.76  # of a device's link in a node that rings reach: A100's β over 8, of 300 GB/s
PORT_SHARE = 0.75  # of a network port that collectives reach (0.7 to 0.8 in public measurements)
NET_HOP = 20e-6  # seconds of one hop of a ring between nodes (calculon's a100_80g.json)


@dataclass(frozen=True)
class Ring:
    """A ring over devices.

    Attributes:
        start: seconds to start a collective.
        hop: seconds of a hop, mean over the ring.
        bandwidth: bytes a second around the ring.
    """

    size: int
    start: float
    hop: float
    bandwidth: float

    def all_reduce(self, size: float) -> float:
        """Seconds for an all-reduce of so many bytes."""
        return self._passes(2, size)

    def half(self, size: float) -> float:
        """Seconds for an all-gather to, or a reduce-scatter of, so many bytes."""
        return self._passes(1, size)

    def _passes(self, count: int, size: float) -> float:
        if self.size == 1:
            return 0.0
        moved = (self.size - 1) / self.size * size
        return self.start + count * ((self.size - 1) * self.hop + moved / self.bandwidth)


@cache
def measured(gpu: str) -> tuple[float, float, dict[int, float]]:
    """Start and hop in seconds, and bus bandwidth by devices, that fit the table of a GPU best."""
    fits = {}
    for devices in sorted({n for n, _, _ in _rows(gpu)}):
        rows = [(size, time) for n, size, time in _rows(gpu) if n == devices]
        fits[devices] = _line([(2 * (devices - 1) / devices * size, time) for size, time in rows])
    alphas = [(2.0 * (n - 1), alpha) for n, (alpha, _) in fits.items()]
    start, hop = _line(alphas) if len(alphas) > 1 else _split(alphas[0])
    return start, hop, {n: 1 / slope for n, (_, slope) in fits.items()}


def ring(cluster: Cluster, size: int, neighbours: int) -> Ring:
    """A ring over `size` devices, of which `neighbours` stand in each node that it crosses.

    Between nodes a ring gets the ports of those of its devices that are in a node; the rest of the
    ports belong to other groups, which send at the same time.
    """
    neighbours = min(size, neighbours, cluster.node)
    start, hop, inside = _inside(cluster, neighbours)
    if size <= neighbours:
        return Ring(size, start, hop, inside)
    share = neighbours / cluster.node * cluster.node_bandwidth * PORT_SHARE
    mean = ((neighbours - 1) * hop + NET_HOP) / neighbours
    return Ring(size, start, mean, min(share, inside) if neighbours > 1 else share)


def _inside(cluster: Cluster, size: int) -> tuple[float, float, float]:
    """Start, hop and bandwidth of a ring inside a node."""
    if cluster.latency:
        return *cluster.latency, cluster.link
    if cluster.measured:
        start, hop, betas = measured(cluster.measured)
        fitting = min((n for n in betas if n >= size), default=max(betas))
        return start, hop, betas[fitting]
    start, hop, _ = measured("A100")
    return start, hop, NODE_SHARE * cluster.link


def between(cluster: Cluster, size: float, *, same_node: bool, sharers: float = 1) -> float:
    """Seconds to send so many bytes to one other device.

    Of a node's devices, `sharers` send over each port at the same time.
    """
    start, hop, _ = _inside(cluster, 2)
    if same_node:
        share = 1.0 if cluster.latency else NODE_SHARE
        return start + hop + size / (share * cluster.link)
    return start + NET_HOP + sharers * size / (cluster.port * PORT_SHARE)


def _rows(gpu: str) -> list[tuple[int, int, float]]:
    return [
        (int(row["gpus"]), int(row["bytes"]), float(row["microseconds"]) * 1e-6)
        for row in table("all_reduce.csv")
        if row["gpu"] == gpu
    ]


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of least squared relative error."""
    sums = [0.0] * 5
    for x, y in points:
        for i, term in enumerate((1, x, x * x, y, x * y)):
            sums[i] += term / y**2
    w, wx, wxx, wy, wxy = sums
    slope = (w * wxy - wx * wy) / (w * wxx - wx * wx)
    return (wy - slope * wx) / w, slope


def _split(point: tuple[float, float]) -> tuple[float, float]:
    """One measured size tells no start from hops: A100's start, the rest is hops."""
    hops, alpha = point
    start = min(measured("A100")[0], alpha / 2)
    return start, (alpha - start) / hops
