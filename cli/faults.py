"""What `minitrain verify` tells of known faults, and how it plants them all."""

from __future__ import annotations

import json

from .output import tell

FOUND, MISSED = 0, 1


def names() -> list[str]:
    """Every fault's name."""
    from minitrain.oracle.faults import FAULTS

    return list(FAULTS)


def where(name: str) -> str:
    """On what a fault acts, in the words of the command."""
    from minitrain.oracle.faults import shows_on

    layout, family = shows_on(name)
    more = {"llama": " --family llama", "mixture": " --experts 8 --capacity 1"}
    return f"{layout or 'float16 alone'}{more.get(family, '')}"


def list_faults(as_json: bool) -> None:
    """Every fault: its strategy, a layout on which it acts, its story."""
    from minitrain.oracle.faults import FAULTS, shows_on

    rows = []
    for name, fault in FAULTS.items():
        layout, family = shows_on(name)
        rows.append({"fault": name, "strategy": fault.module, "layout": layout or None,
                     "family": family, "story": fault.story(name)})  # fmt: skip
    if as_json:
        tell(json.dumps(rows))
        return
    for row in rows:
        tell(f"{row['fault']}  ({row['strategy']}; acts on {where(str(row['fault']))})")
        tell(f"    {row['story']}")


def plant_all(as_json: bool) -> int:
    """Verify a layout with each fault in turn: whether all are found, as an exit status."""
    from minitrain.comm.errors import DeadlockError
    from minitrain.oracle.faults import FAULTS, shows_on
    from minitrain.oracle.task import FAMILIES
    from minitrain.oracle.verify import verify

    rows = []
    for name in FAULTS:
        layout, family = shows_on(name)
        if not layout:
            continue
        try:
            report = verify(FAMILIES[family], layout, fault=name, steps=4)
            first = report.first and report.first.tensor
            diagnosis = report.diagnosis and report.diagnosis._asdict()
            text = report.diagnosis and report.diagnosis.text
        except DeadlockError:
            first, diagnosis, text = "deadlock", None, "ranks wait for each other"
        rows.append({"fault": name, "layout": layout, "found": first is not None,
                     "first_wrong": first, "diagnosis": diagnosis})  # fmt: skip
        if not as_json:
            tell(f"{name} on {layout}: {f'{first}: {text}' if first else 'NOT FOUND'}")
    if as_json:
        tell(json.dumps({"ok": all(row["found"] for row in rows), "rows": rows}))
    return FOUND if all(row["found"] for row in rows) else MISSED
