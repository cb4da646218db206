"""Rows of ranks in the terminal, in colour: of schedules and of traces."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minitrain.schedules.draw import Segment

# On what a kind's letters stand: F, B, I, W; of a trace also other work, and messages and waits.
STYLES = (
    "black on #fbe08a",
    "white on #3b2f6b",
    "black on #6cc3b0",
    "white on #2f7f9e",
    "black on #c9c9d4",
    "bright_black",
)
LATER = " italic underline"  # of a chunk behind the first
EDGE = 14  # columns for the names of the ranks


def width_of(asked: int | None) -> int:
    """The columns that there are for time itself: of a width asked for, or of the terminal."""
    return max(asked or shutil.get_terminal_size((100, 24)).columns, 40) - EDGE


class Picture:
    """Prints rows on a terminal."""

    def __init__(self, width: int):
        from rich.console import Console

        self.console = Console(highlight=False, width=width + EDGE)

    def row(self, name: str, segments: Iterable[Segment]) -> None:
        """A row of marks."""
        from rich.text import Text

        line = Text(f"{name:10} ")
        for segment in segments:
            later = LATER if segment.chunk else ""
            style = "" if segment.kind is None else STYLES[segment.kind] + later
            line.append(segment.label.ljust(segment.width), style)
        self.console.print(line, no_wrap=True, overflow="crop")

    def text(self, name: str, text: str) -> None:
        """A row that is a text."""
        self.console.print(f"{name:10} {text}", no_wrap=True, overflow="crop")


def can_print(character: str) -> bool:
    """Whether stdout's encoding has it."""
    try:
        character.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
