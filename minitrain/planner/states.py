"""Bytes that weights, gradients and optimizer states take for each parameter, by convention.

Published figures differ because they count different things; every figure here names what it
counts. ZeRO's paper has fp16 gradients, minitrain's are float32: both are given.
"""

from __future__ import annotations

from minitrain.errors import UserError

# What is kept for a parameter under AdamW in mixed precision, in bytes.
CONVENTIONS = {
    "float32 master, both moments": 12,  # the Baidu talk and the Titan paper: 2.1 TB for 175B
    "and fp16 weight, fp16 gradient": 16,  # ZeRO's paper
    "and fp16 weight, float32 gradient": 18,  # Megatron, BLOOM
    "and fp16 weight, fp16 and float32 gradient": 20,  # 2 TB for 100B
}

# By stage: bytes that every rank holds, and bytes that are cut over the ranks.
ZERO = {
    "paper": ((16, 0), (4, 12), (2, 14), (0, 16)),  # Rajbhandari et al. 2020, K = 12
    "mixed": ((16, 0), (6, 12), (2, 16), (0, 16)),  # minitrain, float32 gradients
    "float32": ((16, 0), (8, 8), (4, 12), (0, 16)),  # minitrain, nothing in fp16
}


def zero_bytes(parameters: float, ranks: int, stage: int, convention: str = "paper") -> float:
    """Bytes of states on each of so many ranks, at ZeRO stage 0 to 3."""
    if convention not in ZERO or stage not in range(4):
        raise UserError(
            f"no convention {convention!r} at stage {stage}; conventions are {', '.join(ZERO)}, "
            f"stages 0 to 3"
        )
    whole, cut = ZERO[convention][stage]
    return parameters * (whole + cut / ranks)


def zero_traffic(parameters: float, ranks: int, stage: int) -> float:
    """Elements that a rank sends in a step of one micro-batch: 2Ψ, from stage 3 on 3Ψ.

    The Baidu talk's broadcasts of parameters and of optimizer states are stage 3's 3Ψ too.
    """
    return (3 if stage == 3 else 2) * (ranks - 1) / ranks * parameters


def devices_for(parameters: float, bytes_each: float, memory: float) -> int:
    """The fewest devices that hold the states alone, without activations."""
    return int(-(-parameters * bytes_each // memory))
