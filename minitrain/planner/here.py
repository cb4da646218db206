"""This machine as a cluster: what `minitrain doctor --measure` found, kept in the user's cache."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from minitrain.errors import UserError
from minitrain.planner.clusters import Cluster, Device

WIDER = 2  # our numbers have four bytes, where the formulas of time count two


@dataclass(frozen=True)
class Measurements:
    """What was measured on this machine, with thread ranks of one BLAS thread each.

    Attributes:
        cores: that ranks can have.
        memory: bytes.
        flops: a second, of the best float32 product on one core.
        bandwidth: bytes a second that one core reads and writes.
        start, hop: seconds of a collective: before its first message, and for each message.
        link: bytes a second around a ring of two ranks.
    """

    cores: int
    memory: float
    flops: float
    bandwidth: float
    start: float
    hop: float
    link: float

    def cluster(self) -> Cluster:
        """A node of as many devices as there are cores, each with its part of the memory."""
        device = Device(
            "core", {"half": self.flops, "float32": self.flops}, self.memory / self.cores,
            self.bandwidth / WIDER, 0, 1.0, "minitrain doctor --measure",
        )  # fmt: skip
        link = self.link / WIDER
        return Cluster(
            "here", device, self.cores, link, 1, link, None, device.source,
            latency=(self.start, self.hop),
        )  # fmt: skip


def path() -> Path:
    """Where they are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "minitrain" / "here.json"


def save(found: Measurements) -> None:
    """Keep them for `load`.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        path().write_text(json.dumps(asdict(found)), "utf-8")
    except OSError as error:
        raise UserError(
            f"{path()} cannot be written ({error.strerror}); name another folder for caches in "
            "XDG_CACHE_HOME"
        ) from None


def load() -> Measurements:
    """What was measured last.

    Raises:
        UserError: nothing was, or the file is not what `save` writes.
    """
    try:
        return Measurements(**json.loads(path().read_text("utf-8")))
    except FileNotFoundError:
        raise UserError(
            "this machine has not been measured; run `minitrain doctor --measure` first"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path()} cannot be used ({error}); run `minitrain doctor --measure` again"
        ) from None
