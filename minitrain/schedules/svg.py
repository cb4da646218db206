"""A figure as SVG: one text, with nothing outside it."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from minitrain.schedules.figure import Box, Figure, Words


def svg(figure: Figure) -> str:
    """The document. It scales to the width of what shows it, and is 1280 pixels wide by itself."""
    return "\n".join(_lines(figure)) + "\n"


def _lines(figure: Figure) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {figure.width:g} {figure.height:g}"'
        f' width="{figure.width:g}" height="{figure.height:g}"'
        ' font-family="Helvetica, Arial, sans-serif">'
    )
    for shape in figure.shapes:
        yield _box(shape) if isinstance(shape, Box) else _words(shape)
    yield "</svg>"


def _box(box: Box) -> str:
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'
    return f'<rect {place} fill="{box.colour}"/>'


def _words(words: Words) -> str:
    weight = ' font-weight="bold"' if words.bold else ""
    return (
        f'<text x="{words.x:.2f}" y="{words.y:.2f}" font-size="{words.size:g}"'
        f' fill="{words.colour}" text-anchor="{words.anchor}"{weight}>{escape(words.text)}</text>'
    )
