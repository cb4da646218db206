"""What a training costs: FLOPs of a token budget, days, PF-days, GPU-hours, money.

Two conventions are in use, and published figures mix them. GPT-3's 3640 PF-days are 6ND, model
FLOPs; Yuan 1.0's 4095 PF-days are 8ND, hardware FLOPs with full recomputation. A budget therefore
always says which it counts, and rates it is divided by must be counted the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from minitrain.errors import UserError
from minitrain.planner.architecture import eight_n_d, six_n_d

DAY = 86400.0
YEAR = 365.0 * DAY
_PREFIXES = (("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


@dataclass(frozen=True)
class Budget:
    """FLOPs of a training.

    Attributes:
        convention: "model" (6ND) or "hardware" (8ND, with full recomputation).
    """

    flops: float
    convention: str

    @classmethod
    def of(cls, parameters: float, tokens: float, convention: str = "model") -> Budget:
        """Of so many parameters (active ones, in a mixture) and tokens."""
        rules = {"model": six_n_d, "hardware": eight_n_d}
        if convention not in rules:
            raise UserError(f"no convention is called {convention!r}; use {' or '.join(rules)}")
        return cls(rules[convention](parameters, tokens), convention)

    @property
    def pf_days(self) -> float:
        """Days at one petaFLOP a second."""
        return self.flops / (1e15 * DAY)

    def days(self, devices: int, rate: float) -> float:
        """On so many devices at so many FLOPs a second each, counted by the same convention."""
        return self.flops / (devices * rate) / DAY

    def gpu_hours(self, rate: float) -> float:
        """Of all devices together."""
        return self.flops / rate / 3600

    def rate(self, devices: int, days: float) -> float:
        """FLOPs a second of each device that so many days need: the sustained rate."""
        return self.flops / (devices * days * DAY)

    def cost(self, rate: float, price: float) -> float:
        """At a price for an hour of a device."""
        return self.gpu_hours(rate) * price

    def __str__(self) -> str:
        return f"{amount(self.flops)}FLOPs ({self.convention}), {pf_days(self.pf_days)}"


def days_of_tokens(tokens: float, tokens_per_second: float) -> float:
    """Days to see so many tokens."""
    return tokens / tokens_per_second / DAY


def amount(value: float) -> str:
    """A number with a prefix: 3.14e23 is "314 Z"."""
    for prefix, size in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def pf_days(days: float) -> str:
    """PF-days, or from a thousand on EF-days: 3640 is "3.64 EF-days"."""
    return f"{days / 1000:.4g} EF-days" if days >= 1000 else f"{days:.4g} PF-days"


def scaling_efficiency(throughput: float, alone: float, devices: int) -> float:
    """Throughput of all over the throughput of one alone × devices."""
    return throughput / (alone * devices)
