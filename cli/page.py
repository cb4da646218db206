"""Pages of one file: HTML with its style and pictures inside, which needs no network and no script.

A page is made of texts of HTML that the functions here make, and everything they are given is
escaped. Colours come from the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d23; --paper: #fff; --faint: #6b6b76; --line: #dcdce4;
  --good: #1f7a5c; --bad: #b3261e; --c0: #3b2f6b; --c1: #e0a526; --c2: #6cc3b0; --c3: #2f7f9e;
  --c4: #b56576; --c5: #8d99ae; --c6: #7f8f3a; --c7: #5f4b3b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ee; --paper: #17171c; --faint: #9c9ca8;
  --line: #33333d; --good: #6fd0aa; --bad: #ff8a80; --c0: #a79be6; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
h1, h2, summary { overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figcaption, .faint { color: var(--faint); font-size: .9rem; }
.wide { overflow-x: auto; } svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; } td.number, th.number { text-align: right; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
  padding-left: .8rem; } summary { cursor: pointer; padding: .3rem 0; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
@media (max-width: 40em) { figure { overflow-x: auto; } svg { min-width: 36rem; } }
.ink { fill: var(--ink); } .soft { fill: var(--faint); } .rule { stroke: var(--line); }
"""
STYLE += "".join(
    f".f{i} {{ fill: var(--c{i}); }} .s{i} {{ stroke: var(--c{i}); }}\n" for i in range(8)
)


def page(title: str, *parts: str) -> str:
    """The document."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{''.join(parts)}"
        f'<p class="faint">minitrain {escape(version("minitrain"))}</p>\n</body></html>\n'
    )


def heading(text: str) -> str:
    """Of a section."""
    return f"<h2>{escape(text)}</h2>\n"


def words(text: str, kind: str = "") -> str:
    """A paragraph; kind: good, bad or faint."""
    return f"<p{_class(kind)}>{escape(text)}</p>\n"


def verbatim(text: str) -> str:
    """A text with its own lines."""
    return f"<pre>{escape(text)}</pre>\n"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; what is a number is aligned to the right, None is a dash."""
    lines = [list(row) for row in rows]
    right = [any(isinstance(row[i], (int, float)) for row in lines) for i in range(len(columns))]
    head = "".join(_cell("th", *pair) for pair in zip(columns, right, strict=True))
    body = "".join(
        f"<tr>{''.join(_cell('td', *pair) for pair in zip(row, right, strict=True))}</tr>\n"
        for row in lines
    )
    return (
        f'<div class="wide"><table><caption>{escape(title)}</caption>\n'
        f"<tr>{head}</tr>\n{body}</table></div>\n"
    )


def figure(drawn: str, caption: str) -> str:
    """A picture with a line below it."""
    return f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>\n"


def folded(title: str, *parts: str, is_open: bool = False) -> str:
    """Parts below a line that opens and closes them."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(title)}</summary>\n{''.join(parts)}</details>\n"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _cell(tag: str, value: object, right: bool) -> str:
    text = "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    if isinstance(value, float):
        text = f"{value:.4g}"
    return f"<{tag}{_class('number' if right else '')}>{escape(text)}</{tag}>"
