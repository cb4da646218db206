"""Charts of the pages, as SVG that takes its colours from the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 720.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 26.0, 26.0
MOST = 600  # points of a curve: one for each pixel or so
COLOURS = 8


def curves(series: Mapping[str, Sequence[Point]], label: str) -> str:
    """Lines over one another, each with its name; points that are not finite are left out."""
    lines = {
        name: thinned([p for p in points if math.isfinite(p[1])]) for name, points in series.items()
    }
    every = [point for points in lines.values() for point in points]
    if not every:
        return _svg(HEIGHT, label, _text(LEFT, HEIGHT / 2, "nothing is known yet", "soft"))
    (x0, x1), (y0, y1) = (_range([point[axis] for point in every]) for axis in (0, 1))

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - (point[1] - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [*_axes(x0, x1, y0, y1, place), *_legend(list(lines))]
    for i, points in enumerate(lines.values()):
        at = [place(point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline class="s{i}" points="{path}" fill="none" stroke-width="1.5"/>')
        if len(at) <= 40:
            parts += [f'<circle class="f{i}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in at]
    return _svg(HEIGHT, label, *parts)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST points: the means of as many stretches."""
    if len(points) <= MOST:
        return list(points)
    found = []
    for i in range(MOST):
        part = points[i * len(points) // MOST : (i + 1) * len(points) // MOST]
        found.append((part[-1][0], sum(y for _, y in part) / len(part)))
    return found


def bars(rows: Mapping[str, Mapping[str, float]], unit: str, label: str) -> str:
    """A bar for each row, made of parts one after the other, with their sum beside it."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    edge, y, drawn = 132.0, TOP + 8, list(_legend(names))
    for title, parts in rows.items():
        x = edge
        drawn.append(_text(edge - 8, y + 13, title, "ink", "end"))
        for name, size in parts.items():
            width = size / longest * (WIDTH - edge - 100)
            told = escape(f"{title}, {name}: {size:.4g} {unit}")
            drawn.append(
                f'<rect class="f{names.index(name) % COLOURS}" x="{x:.1f}" y="{y:.1f}" '
                f'width="{max(width, 0):.1f}" height="18"><title>{told}</title></rect>'
            )
            x += width
        drawn.append(_text(x + 6, y + 13, f"{sum(parts.values()):.4g} {unit}", "ink"))
        y += 26
    return _svg(y + 4, label, *drawn)


def errors(values: Sequence[float], label: str) -> str:
    """How large errors are, each over its bound, in order: below the line they are within it.

    The largest of each stretch is shown, from 1e-6 of the bound to 1e12 times.
    """
    count, tallest = min(len(values), 360), 160.0
    low, high, floor = -6.0, 12.0, tallest - BOTTOM

    def height(value: float) -> float:
        exponent = high if not math.isfinite(value) else math.log10(max(value, 1e-30))
        share = (min(max(exponent, low), high) - low) / (high - low)
        return max(1.5, share * (floor - TOP))

    step = (WIDTH - LEFT - RIGHT) / max(count, 1)
    parts = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        worst = max(part, key=lambda x: x if math.isfinite(x) else math.inf)
        colour = 2 if worst <= 1 else 4
        tall = height(worst)
        parts.append(
            f'<rect class="f{colour}" x="{LEFT + i * step:.1f}" y="{floor - tall:.1f}" '
            f'width="{max(step - 0.4, 0.6):.2f}" height="{tall:.1f}"/>'
        )
    line = floor - height(1.0)
    parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH}" y1="{line:.1f}" y2="{line:.1f}"/>')
    for word, y in (("bound", line), ("× 1e12", TOP + 8), ("× 1e-6", floor)):
        parts.append(_text(LEFT - 6, y + 4, word, "soft", "end"))
    return _svg(tallest, label, *parts)


def _range(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _axes(x0: float, x1: float, y0: float, y1: float, place: Callable[[Point], Point]
          ) -> Iterator[str]:  # fmt: skip
    for value in _ticks(y0, y1, 5):
        _, y = place((x0, value))
        yield f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 6, y + 4, f"{value:.6g}", "soft", "end")
    for value in _ticks(x0, x1, 6):
        x, _ = place((value, y0))
        yield _text(x, HEIGHT - 8, f"{value:.6g}", "soft", "middle")


def _ticks(low: float, high: float, most: int) -> Iterator[float]:
    """Round numbers between two."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= raw)
    first = math.ceil(low / step)
    for i in range(first, math.floor(high / step + 1e-9) + 1):
        yield i * step


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = LEFT
    for i, name in enumerate(names):
        yield f'<rect class="f{i % COLOURS}" x="{x:.1f}" y="6" width="11" height="11"/>'
        yield _text(x + 16, 16, name, "ink")
        x += 34 + 7.2 * len(name)


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return (
        f'<text class="{colour}" x="{x:.1f}" y="{y:.1f}" font-size="12" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _svg(height: float, label: str, *parts: str) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif">\n{inside}\n</svg>\n'
    )
