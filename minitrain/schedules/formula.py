"""The bubbles that the papers give, to stand beside the simulated ones. Transfers take no time."""

from __future__ import annotations


def bubble_time(
    name: str, stages: int, micro_batches: int, chunks: int, times: tuple[float, float, float]
) -> float | None:
    """How long a rank waits in a step; None where no formula holds.

    Args:
        name: the schedule.
        stages, micro_batches, chunks: p, M and v.
        times: F, B (for inputs) and W of a rank's whole part.
    """
    f, b, w = times
    one_pass = (stages - 1) * (f + b + w)
    if name in ("gpipe", "1f1b"):
        return one_pass
    if name == "interleaved":
        return one_pass / chunks if micro_batches >= stages else None
    if name == "zb-h1":
        return max((stages - 1) * (f + b - w), 0.0) if micro_batches >= stages else None
    if name == "zb-h2":
        enough = micro_batches >= 2 * stages - 1
        return max((stages - 1) * (f + b - 2 * w), 0.0) if enough else None
    # The schedules in a V have figures for passes that all take equally long.
    shares = {"zb-v": 0.0, "v-half": 1 / 2, "v-min": 2 / 3, "dualpipe-v": 1 / 6}
    if name in shares and f == b == w and micro_batches >= 2 * stages:
        return shares[name] * one_pass
    return None


def bubble(
    name: str, stages: int, micro_batches: int, chunks: int, times: tuple[float, float, float]
) -> float | None:
    """The same as a share of the step, 0 to 1."""
    wait = bubble_time(name, stages, micro_batches, chunks, times)
    work = micro_batches * sum(times)
    return None if wait is None or not work else wait / (wait + work)
