"""How long a device takes for a product of matrices, and for what only moves memory."""

from __future__ import annotations

from math import ceil, gcd

from minitrain.planner.clusters import Device

# Fitted to the sets sc21_t1 and zerobubble_t4 alone, together with step_time's EXCHANGE.
PRODUCT = 0.827  # of the best measured product's rate: what those of a training reach
MEMORY = 0.76  # of the memory's bandwidth: what kernels that only move memory reach
KERNEL = 6.9e-6  # seconds between two kernels

TILE = (256, 128)  # of the output, that one multiprocessor computes at a time
SPLITS = (1, 2, 3, 4)  # of a long sum, so that the last wave is fuller
LONG = 1024  # terms that each part of a sum has at least
LOAD = 8  # half-precision numbers that one aligned load moves (16 bytes)


def product(device: Device, m: int, n: int, k: int, dtype: str = "half") -> float:
    """Seconds for (m, k) times (k, n), the start of its kernel included.

    The output is cut into tiles that are dealt to the multiprocessors in waves; a last wave that is
    not full, and a tile that is not, take as long as full ones. A long sum can be split for more
    tiles.
    """
    rate = PRODUCT * device.best * device.flops.get(dtype, device.flops["half"])
    return 2 * m * n * k / (rate * filled(device, m, n, k)) + KERNEL


def filled(device: Device, m: int, n: int, k: int) -> float:
    """Share of the multiprocessors' time that goes into numbers of an (m, n) output."""
    if not device.multiprocessors:
        return 1.0
    splits = [split for split in SPLITS if split == 1 or k >= split * LONG]
    return max(
        _filled(device, m, n, tile, split) for tile in (TILE, TILE[::-1]) for split in splits
    )


def _filled(device: Device, m: int, n: int, tile: tuple[int, int], split: int) -> float:
    tiles = ceil(m / tile[0]) * ceil(n / tile[1]) * split
    waves = ceil(tiles / device.multiprocessors)
    return split * m * n / (waves * device.multiprocessors * tile[0] * tile[1])


def batched(device: Device, count: float, m: int, n: int, k: int) -> float:
    """Seconds for `count` small products, such as those of attention's heads.

    Rows of a head are k numbers apart: where that is not a whole number of aligned loads, each load
    moves less. The products are limited by what they compute or by the memory that they touch.
    """
    rate = PRODUCT * device.best * device.flops["half"] * gcd(k, LOAD) / LOAD
    touched = 2 * count * (m * k + n * k + m * n)
    return max(2 * count * m * n * k / rate, moved(device, touched)) + KERNEL


def moved(device: Device, size: float, kernels: int = 0) -> float:
    """Seconds to read and write so many bytes in so many kernels."""
    return size / (MEMORY * device.bandwidth) + kernels * KERNEL
