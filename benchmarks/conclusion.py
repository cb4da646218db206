"""What every benchmark ends with."""

from __future__ import annotations

import json
from statistics import geometric_mean
from typing import Any

import click


def conclude(name: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """The geometric mean of the rows' ratios, and with --json all of it on one line."""
    mean = geometric_mean([row["ratio"] for row in rows])
    click.echo(f"geometric mean of the ratios: {mean:.2f}", err=as_json)
    if as_json:
        click.echo(json.dumps({"name": name, "rows": rows, "ratio_geomean": mean}))
