"""A figure as PNG, drawn by matplotlib (the `plot` extra)."""

from __future__ import annotations

from pathlib import Path

from minitrain.errors import UserError
from minitrain.schedules.figure import Box, Figure, Words

DOTS = 100  # an inch; everything is drawn at twice the size, to be sharp


def write_png(figure: Figure, path: Path) -> None:
    """Write the file.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
        from matplotlib.patches import Rectangle
    except ImportError:
        raise UserError(
            "a PNG needs matplotlib; install it with pip install 'minitrain[plot]', or write an SVG"
        ) from None
    canvas = Canvas(figsize=(figure.width / DOTS, figure.height / DOTS), dpi=2 * DOTS)
    FigureCanvasAgg(canvas)
    axes = canvas.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, figure.width), ylim=(figure.height, 0))
    axes.axis("off")
    for order, shape in enumerate(figure.shapes):
        if isinstance(shape, Box):
            corner = shape.x, shape.y
            axes.add_patch(Rectangle(corner, shape.width, shape.height, color=shape.colour,
                                     linewidth=0, zorder=order))  # fmt: skip
        else:
            _write(axes, shape, order)
    canvas.savefig(path)


def _write(axes: object, words: Words, order: int) -> None:
    anchor = {"start": "left", "middle": "center", "end": "right"}[words.anchor]
    axes.text(  # type: ignore[attr-defined]
        words.x, words.y, words.text, fontsize=words.size * 72 / DOTS, color=words.colour,
        ha=anchor, va="baseline", weight="bold" if words.bold else "normal", zorder=order,
    )  # fmt: skip
