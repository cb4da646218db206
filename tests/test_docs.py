"""The site: a page for each strategy, and links that lead somewhere. `.ci/run` builds it."""

from __future__ import annotations

import re
from pathlib import Path

from extension.links import broken

ROOT = Path(__file__).parents[1]


def test_every_strategy_has_a_page_with_its_card() -> None:
    cards = {
        path.stem
        for path in (ROOT / "minitrain/parallel").glob("*.py")
        if re.search(r"^Equals serial because:", path.read_text("utf-8"), re.M)
    }
    pages = [path.read_text("utf-8") for path in (ROOT / "docs/strategies").glob("*.md")]
    assert sorted(re.findall(r"^```\{card\} (\w+)$", "\n".join(pages), re.M)) == sorted(cards)
    index = (ROOT / "docs/index.md").read_text("utf-8")
    listed = re.findall(r"^strategies/(\w+)$", index, re.M)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "docs/strategies").glob("*.md"))


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/one.html").write_text('<h1 id="top">One</h1><a href="../two.html#end">')
    (tmp_path / "two.html").write_text(
        '<p id="end"><a href="inner/one.html#top"></a><a href="#end"></a>'
        '<a href="https://example.org/"></a>'
    )
    assert list(broken(tmp_path)) == []
    (tmp_path / "three.html").write_text(
        '<a href="four.html"></a><a href="two.html#start"></a>'
        '<script src="https://cdn.example.org/x.js"></script><img src="x.png">'
    )
    assert list(broken(tmp_path)) == [
        "three.html loads https://cdn.example.org/x.js",
        "three.html: four.html",
        "three.html: two.html#start (no such anchor)",
        "three.html: x.png",
    ]
