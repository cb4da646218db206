"""The loss scale: when it halves, when it doubles, where it stops, what is saved of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.optim import LossScale


def test_it_starts_at_65536() -> None:
    assert LossScale().value == 65536
    assert LossScale().floor == 1


def after_each(scale: LossScale, overflows: list[bool]) -> list[float]:
    """The scale after each step."""
    values = []
    for overflow in overflows:
        scale.update(overflow)
        values.append(scale.value)
    return values


@pytest.mark.parametrize("resumed", [False, True])
def test_the_count_of_clean_steps_is_part_of_the_state(resumed: bool) -> None:
    """Case K1: start 64, interval 4, an overflow at step 3; saved after step 6."""
    scale = LossScale(64, interval=4)
    assert after_each(scale, [False, False, True, False, False, False]) == [64, 64, 32, 32, 32, 32]
    if resumed:
        state, scale = scale.state(), LossScale(64, interval=4)
        scale.restore(state)
    assert after_each(scale, [False] * 6) == [64, 64, 64, 64, 128, 128]


def test_it_halves_down_to_its_floor_and_never_below() -> None:
    """Case A8: 16 halvings of 2^16; what then is the caller's to say."""
    scale, halvings = LossScale(), 0
    while not scale.at_floor:
        scale.update(overflow=True)
        halvings += 1
    assert (halvings, scale.value) == (16, 1)
    assert after_each(scale, [True] * 3) == [1, 1, 1]


@given(
    start=st.integers(0, 20), interval=st.integers(1, 5), overflows=st.lists(st.booleans())
)  # fmt: skip
def test_it_is_a_power_of_two_whatever_happens(
    start: int, interval: int, overflows: list[bool]
) -> None:
    """And it moves by one doubling or halving, up only after `interval` clean steps in a row."""
    scale, clean = LossScale(2.0**start, interval), 0
    for overflow in overflows:
        before = scale.value
        scale.update(overflow)
        assert math.frexp(scale.value)[0] == 0.5
        clean = 0 if overflow else clean + 1
        if overflow:
            assert scale.value == max(1, before / 2)
        else:
            assert scale.value == before * (2 if clean == interval else 1)
        clean %= interval


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"value": 1000.0}, "value must be a power of two, such as 65536 or 1, got 1000.0"),
        ({"value": 0.0}, "got 0.0"),
        ({"value": math.inf}, "got inf"),
        ({"floor": -1.0}, "floor must be a power of two"),
        ({"value": 1.0, "floor": 2.0}, "the value 1.0 must be at least the floor 2.0"),
        ({"interval": 0}, "the interval 0 at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LossScale(**options)  # type: ignore[arg-type]
