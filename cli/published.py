"""minitrain plan --published: the tables and the JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .tables import Rows, show

if TYPE_CHECKING:
    from minitrain.planner.published import Prediction, SetError
    from minitrain.planner.published_memory import Memory


def show_published(as_json: bool) -> None:
    """Each published run beside its prediction, and the error set by set."""
    from minitrain.planner.published import errors, predictions
    from minitrain.planner.published_memory import memories

    found = predictions()
    sets = list(errors(found))
    held = list(memories())
    if as_json:
        values = {"sets": [asdict(one) for one in sets], "runs": _runs(found)}
        click.echo(json.dumps(values | {"memory": _memory(held)}))
        return
    show("Steps, in seconds", ("set", "run", "published", "planned", "error"), _lines(found))
    columns = ("set", "", "mean error", "bias", "worst", "computed")
    show("Error by set", columns, [_summary(one) for one in sets])
    missing = Counter((one.run.set, one.reason) for one in found if one.reason)
    rows = [(name, reason, str(count)) for (name, reason), count in missing.items()]
    show("Not compared", ("set", "reason", "runs"), rows)
    lines = [
        (one.run.set, one.run.name, f"{one.published / 1e9:.4g}", f"{one.planned.total / 1e9:.4g}",
         f"{one.error:+.1%}")
        for one in held
        if one.published is not None
    ]  # fmt: skip
    show("Memory, in GB", ("set", "run", "published", "planned", "error"), lines)
    wrong = [(one.run.set, one.run.name, one.misjudged) for one in held if one.misjudged]
    show("Misjudged", ("set", "run", "how"), wrong)


def _runs(found: list[Prediction]) -> list[dict[str, Any]]:
    return [
        {
            "set": one.run.set,
            "name": one.run.name,
            "source": one.run["source"],
            "seconds": one.seconds,
            "planned": one.time and {"seconds": one.time.seconds, **asdict(one.time)},
            "error": one.error,
            "reason": one.reason or None,
        }
        for one in found
    ]


def _memory(held: list[Memory]) -> list[dict[str, Any]]:
    return [
        {
            "set": one.run.set,
            "name": one.run.name,
            "bytes": one.published,
            "planned": {"total": one.planned.total, **asdict(one.planned)},
            "error": one.error,
            "misjudged": one.misjudged or None,
        }
        for one in held
    ]


def _lines(found: list[Prediction]) -> Rows:
    return [
        (one.run.set, one.run.name, f"{one.seconds:.4g}", f"{one.time.seconds:.4g}",
         f"{one.error:+.1%}")
        for one in found
        if one.error is not None and one.time is not None
    ]  # fmt: skip


def _summary(one: SetError) -> tuple[str, ...]:
    kind = "fitted" if one.fitted else "held out"
    parts = (f"{one.mean:.1%}", f"{one.bias:+.1%}", f"{one.worst:+.1%}")
    return (one.name, kind, *parts, f"{one.computed} of {one.total}")
