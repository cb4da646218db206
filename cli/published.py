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


def show_published(as_json: bool) -> None:
    """Each published run beside its prediction, and the error set by set."""
    from minitrain.planner.published import errors, predictions

    found = predictions()
    sets = list(errors(found))
    if as_json:
        click.echo(json.dumps({"sets": [asdict(one) for one in sets], "runs": _runs(found)}))
        return
    show("Steps, in seconds", ("set", "run", "published", "planned", "error"), _lines(found))
    columns = ("set", "", "mean error", "bias", "worst", "computed")
    show("Error by set", columns, [_summary(one) for one in sets])
    missing = Counter((one.run.set, one.reason) for one in found if one.reason)
    rows = [(name, reason, str(count)) for (name, reason), count in missing.items()]
    show("Not compared", ("set", "reason", "runs"), rows)


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
