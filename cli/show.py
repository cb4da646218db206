"""minitrain show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from minitrain.layout import AXES, Layout, LayoutError
from minitrain.train.config.sections import OPTIONS

from .arguments import given as given_text
from .groups import GroupedCommand
from .options import ConfigSources, options_of
from .output import tell
from .tables import show as show_table

if TYPE_CHECKING:
    from minitrain.oracle.traffic import RankTraffic, Sent
    from minitrain.train.config.sections import RunConfig

VOCAB = 256  # bytes
MOST_RANKS, WIDEST = 256, 16  # threads of this process; columns of a matrix
_SIZES = [
    option
    for key, option in OPTIONS.items()
    if option.section == "model"
    or key in ("data.batch", "data.micro_batches", "optimizer.name", "optimizer.frozen",
               "run.dtype", "run.recompute", "run.stages")
]  # fmt: skip


@click.command(cls=GroupedCommand)
@click.argument("layout", type=given_text)
@click.option("--rank", type=click.IntRange(0), help="Of this rank alone. [all together]")
@options_of(_SIZES, default="nano")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of tables.")
def show(layout: str, rank: int | None, given: ConfigSources, as_json: bool) -> int:
    """Show what a LAYOUT such as dp2,tp2 does to a small model.

    The mesh as a grid, who holds which slice of every parameter, what the ranks send in one step,
    by operation, mesh axis and purpose and from rank to rank, and what a rank holds. One step is
    run on threads for it; so what is shown is measured, and the formula stands beside it.
    """
    from minitrain.oracle.traffic import measure
    from minitrain.parallel.table import check_layout, placements
    from minitrain.train.build import sizes_of

    from .pieces import pieces

    config, parsed = given._replace(preset=given.preset or "nano").resolve(), Layout.parse(layout)
    if parsed.size > MOST_RANKS:
        raise LayoutError(
            f"{layout} has {parsed.size:,} ranks, and their step is run on threads; show at most "
            f"{MOST_RANKS}, as what is done shows on few, or see `minitrain plan`"
        )
    if rank is not None:
        parsed.coordinates(rank)
    sizes = sizes_of(config, VOCAB)
    stages, frozen = config.run.stage_sizes, config.optimizer.frozen_patterns
    check_layout(parsed, sizes, batch=config.data.batch, micro_batches=config.data.micro_batches,
                 stages=stages, frozen=frozen)  # fmt: skip
    table = placements(sizes, parsed, stages=stages, frozen=frozen)
    ranks = measure(config, parsed, VOCAB)
    found = {
        "layout": str(parsed),
        "ranks": parsed.size,
        "mesh": [parsed.coordinates(each) for each in range(parsed.size)],
        "parameters": pieces(table, parsed, rank),
        "sent": [row._asdict() for row in _sent(ranks, rank)],
        "by_axis": _by_axis(config, parsed, ranks),
        "matrix": [each.to for each in ranks],
        "memory": _memory(config, parsed, ranks, rank or 0),
    }
    if as_json:
        tell(json.dumps(found))
    else:
        _print(parsed, found, rank)
    return 0


def _sent(ranks: list[RankTraffic], rank: int | None) -> list[Sent]:
    from minitrain.oracle.traffic import together

    return together(row for each in (ranks if rank is None else [ranks[rank]]) for row in each.sent)


def _by_axis(config: RunConfig, layout: Layout, ranks: list[RankTraffic]) -> list[dict[str, Any]]:
    """What all ranks sent, by mesh axis and purpose, beside the planner's formula."""
    from minitrain.planner.messages import sent
    from minitrain.train.build import sizes_of

    measured: dict[tuple[str, str], int] = {}
    for row in _sent(ranks, None):
        measured[row.axis, row.purpose] = measured.get((row.axis, row.purpose), 0) + row.bytes
    try:
        formula = sent(
            sizes_of(config, VOCAB), layout, batch=config.data.batch,
            length=config.model.context, micro_batches=config.data.micro_batches,
            dtype=config.run.dtype, recompute=config.run.recompute,
            stages=config.run.stage_sizes, frozen=config.optimizer.frozen_patterns,
        )  # fmt: skip
    except LayoutError:
        formula = {}
    return [
        {"axis": axis, "purpose": purpose, "measured": measured.get((axis, purpose), 0),
         "formula": formula.get((axis, purpose), 0) if formula else None}
        for axis, purpose in sorted({*measured, *formula})
    ]  # fmt: skip


def _memory(config: RunConfig, layout: Layout, ranks: list[RankTraffic],
            rank: int) -> list[dict[str, Any]]:  # fmt: skip
    """By kind, what a rank holds as measured and by the formula, where there is one."""
    from minitrain.planner.memory import held
    from minitrain.train.build import sizes_of

    parts = config.data.micro_batches * layout.data_ranks
    try:
        formula: dict[str, int] = held(
            sizes_of(config, VOCAB), layout, batch=-(-config.data.batch // parts),
            length=config.model.context, micro_batches=config.data.micro_batches, rank=rank,
            stages=config.run.stage_sizes, dtype=config.run.dtype,
            recompute=config.run.recompute, optimizer=config.optimizer.name,
            frozen=config.optimizer.frozen_patterns,
        )._asdict()  # fmt: skip
    except LayoutError:
        formula = {}
    holds = ranks[rank].holds
    return [
        {"kind": kind, "measured": holds.get(kind), "formula": formula.get(kind)}
        for kind in dict.fromkeys((*holds, *formula))
    ]


def _print(layout: Layout, found: dict[str, Any], rank: int | None) -> None:
    from .pieces import by_block

    columns, rows = grid(layout)
    show_table(f"Mesh of {layout}: {layout.size} rank(s)", columns, rows)
    which = "lives and is stepped" if rank is None else f"is on rank {rank}"
    keys = ("lives", "stepped") if rank is None else ("holds", "steps")
    show_table(f"Where each parameter {which}", ("parameter", "shape", *keys), [
        (row["name"], " × ".join(map(str, row["shape"])), *(str(row[key] or "-") for key in keys))
        for row in by_block(found["parameters"])
    ])  # fmt: skip
    who = "all ranks" if rank is None else f"rank {rank}"
    show_table(f"Sent in a step by {who}", ("operation", "axis", "purpose", "messages", "bytes"), [
        (row["op"], row["axis"], row["purpose"], f"{row['messages']:,}", f"{row['bytes']:,}")
        for row in found["sent"]
    ])  # fmt: skip
    if rank is None:
        columns = ("axis", "purpose", "measured", "formula")
        show_table("The same by axis, in bytes", columns, [
            (row["axis"], row["purpose"], f"{row['measured']:,}",
             "-" if row["formula"] is None else f"{row['formula']:,}")
            for row in found["by_axis"]
        ])  # fmt: skip
    if 1 < layout.size <= WIDEST:
        heads = ("from", *(f"to {number}" for number in range(layout.size)))
        show_table("Bytes from rank to rank", heads, [
            (str(number), *(f"{nbytes:,}" if nbytes else "-" for nbytes in row))
            for number, row in enumerate(found["matrix"])
        ])  # fmt: skip
    show_table(f"Bytes that rank {rank or 0} holds", ("", "measured", "formula"), [
        (row["kind"], *("-" if row[key] is None else f"{row[key]:,}"
                        for key in ("measured", "formula")))
        for row in found["memory"]
    ])  # fmt: skip


def grid(layout: Layout) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The ranks by their coordinates: the fastest axis from left to right, the others downwards."""
    axes = [axis for axis in layout.order if getattr(layout, axis) > 1] or [AXES[0]]
    *slow, fast = axes
    width = getattr(layout, fast)
    rows = []
    for first in range(0, layout.size, width):
        place = layout.coordinates(first)
        name = ", ".join(f"{axis} {place[axis]}" for axis in slow)
        rows.append((name, *(str(first + i) for i in range(width))))
    return ("", *(f"{fast} {i}" for i in range(width))), rows
