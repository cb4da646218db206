"""The schedule of a run's pipeline: its layout's or, under zb-auto, one that is found and kept.

zb-auto is searched for given times before the run begins, or for those of its steps 2 and 3, which
are done as zb-h1 tells, or zb-v where ranks have two chunks. What is found is kept in the
configuration, so that the run goes on with it. A schedule decides when something is computed, and
never what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from minitrain.layout import Layout
from minitrain.parallel.stages import check_schedule, route_of
from minitrain.schedules.auto import NAME as AUTO
from minitrain.schedules.auto import zb_auto_on
from minitrain.schedules.build import build
from minitrain.schedules.check import check
from minitrain.schedules.instruction import Schedule, words_of
from minitrain.schedules.times import Times, read_times
from minitrain.train.config.option import ConfigError
from minitrain.train.config.sections import RunConfig

MEASURED = (2, 3)
"""The steps whose times count, from the first that this process does, which is slower."""

OPTIONS = ("times", "memory", "instructions")


def is_auto(layout: Layout) -> bool:
    """Whether there is a schedule to be found."""
    return layout.pp > 1 and layout.schedule == AUTO


def schedule_of(config: RunConfig, layout: Layout) -> Schedule | None:
    """What a run begins with; None: what its layout says.

    Raises:
        UserError: instructions that cannot be run on the layout.
    """
    if not is_auto(layout):
        return None
    if config.run.instructions is not None:
        return given(config, layout)
    if config.run.times is not None:
        return found(config, layout, Times.uniform(route_of(layout), *read_times(config.run.times)))
    return _until(config, layout)


def _until(config: RunConfig, layout: Layout) -> Schedule:
    """What is run until times are known."""
    return build("zb-h1" if layout.chunks == 1 else "zb-v", layout.pp, config.data.micro_batches)


def given(config: RunConfig, layout: Layout) -> Schedule:
    """The schedule that the configuration has.

    Raises:
        UserError: it cannot be run on the layout, or not within the memory that is allowed.
    """
    lines = str(config.run.instructions).split("/")
    route, count = route_of(layout), config.data.micro_batches
    if len(lines) != layout.pp:
        raise ConfigError(
            f"run.instructions are of {len(lines)} stage(s), but {layout} has {layout.pp}; give "
            "those of each, with / between, or leave them out"
        )
    schedule = Schedule.read(AUTO, count, route, lines)
    check_schedule(schedule, layout, count)
    check(schedule, memory=config.run.memory)
    return schedule


def found(config: RunConfig, layout: Layout, times: Times) -> Schedule:
    """The best schedule for times, within the memory that the configuration allows."""
    return zb_auto_on(route_of(layout), config.data.micro_batches, times, config.run.memory)


def kept(config: RunConfig, schedule: Schedule) -> RunConfig:
    """The configuration with a schedule that was found."""
    return replace(config, run=replace(config.run, instructions=words_of(schedule)))


def settled(config: RunConfig, layout: Layout) -> RunConfig:
    """The configuration of a run that is about to begin; with the schedule for times, if given.

    Raises:
        UserError: options of zb-auto for another schedule; instructions that cannot be run.
    """
    if not is_auto(layout):
        for name in OPTIONS:
            if getattr(config.run, name) is not None:
                raise ConfigError(
                    f"run.{name} = {getattr(config.run, name)} is for {AUTO}, but the layout is "
                    f"{layout}; leave it out, or take --layout pp2,{AUTO}"
                )
        return config
    schedule = schedule_of(config, layout)
    if schedule is None or is_measured(config, layout):
        return config
    return kept(config, schedule)


def is_measured(config: RunConfig, layout: Layout) -> bool:
    """Whether a schedule is to be found for times that nobody knows yet."""
    return is_auto(layout) and config.run.instructions is None and config.run.times is None


def notes(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Where a schedule is to be found: when, and what is run until then."""
    if is_measured(config, layout):
        first, last = MEASURED
        yield (
            f"{AUTO}: {_until(config, layout).name} until steps {first} and {last} of these are "
            "timed, then the schedule that is found for their times; --times F,B,W,T finds one now"
        )


def resettled(config: RunConfig, layout: Layout, stored: RunConfig, before: str) -> RunConfig:
    """The configuration of a run that goes on: what was kept for another layout than this one, or
    found for other times or memory, is left behind.

    Args:
        stored: the configuration of its checkpoint. before: the layout there.
    """
    old = stored.run
    asked = (config.run.times, config.run.memory) == (old.times, old.memory)
    left: dict[str, Any] = {}
    if not (asked and before == str(layout)) and config.run.instructions == old.instructions:
        left["instructions"] = None
    if not is_auto(layout):
        left |= {n: None for n in OPTIONS if getattr(config.run, n) == getattr(old, n)}
    return settled(replace(config, run=replace(config.run, **left)), layout)
