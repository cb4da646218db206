"""Options in groups, so that --help of a command with many of them can be read."""

from __future__ import annotations

from typing import Any

import click

# In the order of --help; options of no group come before them.
GROUPS = {
    "text": "Text",
    "model": "Model",
    "mixture": "Mixture of experts",
    "run": "Run",
    "optimizer": "Loss and optimizer",
    "layout": "Ranks and layout",
    "sync": "Asynchronous and local steps",
    "mpi": "Under MPI",
}


class GroupedOption(click.Option):
    """An option that belongs to one of GROUPS."""

    def __init__(self, *args: Any, group: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose --help has a heading for each group of its options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, group by group."""
        rows: dict[str | None, list[tuple[str, str]]] = {None: [], **{name: [] for name in GROUPS}}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                rows[getattr(param, "group", None)].append(row)
        for name, records in rows.items():
            if records:
                with formatter.section("Options" if name is None else GROUPS[name]):
                    formatter.write_dl(records)
