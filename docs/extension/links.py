"""Every link inside the built pages leads somewhere, and nothing is loaded from a network."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of an element."""
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if tag in LOADS and LOADS[tag] in given:
            self.loads.add(given[LOADS[tag]])


def check(app: Any, exception: Exception | None) -> None:
    """After the build: fail with the links that lead nowhere."""
    if exception is None and app.builder.format == "html":
        wrong = list(broken(Path(app.outdir)))
        if wrong:
            raise RuntimeError("\n".join(["links that lead nowhere:", *wrong]))


def broken(site: Path) -> Iterator[str]:
    """Each link that leads nowhere, and each thing that comes from a network."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name} loads {url}" for url in page.loads if "//" in url)
        for link in sorted(page.links | page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists():
                yield f"{name}: {link}"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name}: {link} (no such anchor)"
