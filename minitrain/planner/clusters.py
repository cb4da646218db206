"""Clusters: what a device computes and holds, and the links in a node and between nodes.

Rates are dense, without sparsity, and one way. Vendors' figures; where they came from memory alone
the source says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from minitrain.errors import UserError

GB = 1e9
T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        flops: peak FLOPs a second by dtype; "half" is bf16, or fp16 where there is no bf16.
        memory: bytes.
        bandwidth: of that memory, bytes a second.
        multiprocessors: that a product's tiles are dealt to; 0 where tiles say nothing.
        best: share of the peak that the best measured product reaches.
    """

    name: str
    flops: dict[str, float]
    memory: float
    bandwidth: float
    multiprocessors: int
    best: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """Nodes of devices.

    Attributes:
        node: devices of a node.
        link: bytes a second a device sends to the others of its node.
        ports: network ports of a node, and bytes a second of each.
        measured: the GPU of the table of measured all-reduces; None estimates by `link`.
        latency: seconds of a collective before its first message and of each message, and then
            `link` is what rings reach; None: as the GPU's, or an A100's.
    """

    name: str
    device: Device
    node: int
    link: float
    ports: int
    port: float
    measured: str | None
    source: str
    latency: tuple[float, float] | None = None

    @property
    def node_bandwidth(self) -> float:
        """Bytes a second that a node sends to others."""
        return self.ports * self.port

    def with_network(self, ports: int, port: float, source: str) -> Cluster:
        """The same nodes behind another network."""
        return replace(self, ports=ports, port=port, source=source)


_VENDOR = "vendor's data sheet"
# Best measured products: stas00's ml-engineering (A100 271, H100 794.5 TFLOPs); others as A100.
V100 = Device("V100", {"half": 125e12, "float32": 15.7e12}, 32 * GB, 0.9e12, 80, 0.87, _VENDOR)
A100_40 = Device(
    "A100-40", {"half": 312e12, "float32": 19.5e12}, 40 * GB, 1.555e12, 108, 0.869, _VENDOR
)
A100_80 = replace(A100_40, name="A100-80", memory=80 * GB, bandwidth=2.039e12)
H100 = Device(
    "H100", {"half": 989.5e12, "float8": 1979e12, "float32": 67e12}, 80 * GB, 3.35e12, 132, 0.803,
    _VENDOR,
)  # fmt: skip
H800 = replace(H100, name="H800", source="an H100 with slower links; from memory, unverified")
H200 = replace(H100, name="H200", memory=141 * GB, bandwidth=4.8e12)
TPU_V4 = Device(
    "TPU v4", {"half": 275e12}, 32 * GB, 1.2e12, 0, 0.87,
    "2204.02311 (275 TFLOPs gives its 45.7 %); memory from memory, unverified",
)  # fmt: skip

HDR, NDR, OPA = 25 * GB, 50 * GB, 12.5 * GB

CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster("V100", V100, 16, 150 * GB, 8, 12.5 * GB, "V100", "DGX-2: 8 × EDR 100 Gb/s"),
        Cluster("A100-40", A100_40, 8, 300 * GB, 8, HDR, "A100", "DGX A100: 8 × HDR 200 Gb/s"),
        Cluster("A100-80", A100_80, 8, 300 * GB, 8, HDR, "A100", "Selene (2104.04473): 8 × HDR"),
        Cluster("H100", H100, 8, 450 * GB, 8, NDR, None, "DGX H100: 8 × NDR 400 Gb/s"),
        Cluster("H800", H800, 8, 200 * GB, 8, NDR, None, "2412.19437: NVLink 160 GB/s usable"),
        Cluster("H200", H200, 8, 450 * GB, 8, NDR, None, "as DGX H100"),
        Cluster("TPU v4", TPU_V4, 4, 150 * GB, 4, 50 * GB, None, "from memory, unverified"),
    )
}

NETWORKS = {
    "4 × OPA 100": (4, OPA, "Jean Zay: 4 × OmniPath 100 Gb/s"),
    "8 × HDR 200": (8, HDR, "8 × HDR 200 Gb/s"),
    "2 × HDR 200": (2, HDR, "2 × 200 Gb/s (the Inspur article on Yuan 1.0)"),
    "RoCE 4 × 200": (4, HDR, "2401.10241: RoCE; ports and rate not printed, 4 × 200 Gb/s assumed"),
}


def cluster(name: str, network: str = "") -> Cluster:
    """The cluster of this name, behind another network than its own if one is named.

    "here" is this machine, as it was measured.
    """
    if name == "here":
        from minitrain.planner.here import load  # it makes a Cluster, and knows this module

        return load().cluster()
    found = named(name, CLUSTERS, "cluster")
    return found.with_network(*named(network, NETWORKS, "network")) if network else found


def named(name: str, known: Mapping[str, T], kind: str) -> T:
    """What has this name, whatever its case and the signs between letters and digits.

    Raises:
        UserError: nothing has; what is near, or else all that there is.
    """
    plain = {_plain(each): each for each in known}
    if _plain(name) in plain:
        return known[plain[_plain(name)]]
    near = difflib.get_close_matches(_plain(name), plain, n=1)
    hint = f"; did you mean {plain[near[0]]}?" if near else f"; there are {', '.join(known)}"
    raise UserError(f"no {kind} is called {name!r}{hint}")


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
