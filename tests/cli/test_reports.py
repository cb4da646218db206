"""One-file pages: of verify and of train, whole, well formed, and with nothing from a network."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command import invoke, trained

from minitrain_cli import charts, page

VOID = {"meta"}  # without an end tag


class Checked(HTMLParser):
    """A page whose elements are closed in order; its words."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick", "onload"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(path: Path) -> Checked:
    text = path.read_text("utf-8")
    without_namespace = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|url\(|@import|<script", without_namespace)
    return Checked(text)


def test_verify_shows_each_layout_its_errors_and_what_was_sent(folder: Path) -> None:
    result = invoke("verify", "dp2", "tp2", "--steps", 1, "--fault", "g-doubled", "--json",
                    "--report", "page.html")  # fmt: skip
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    shown = read(folder / "page.html").text
    assert "1 of 2 layout(s) equal to one device, with the fault g-doubled planted" in shown
    assert rows[1]["first_wrong"]["tensor"] in shown
    assert rows[1]["diagnosis"]["text"] in shown
    assert "tp 0 tp 1" in shown
    assert re.search(r"all_reduce tp activation \d+ [\d,]+", shown)
    assert re.search(r"all_reduce dp gradient \d+ [\d,]+", shown)
    assert re.search(r"sgd gradient \d+ 0 \d\.\d\de-1\d 1e-12 sgd step 1 gradient", shown)


def test_verify_shows_ranks_that_hang(folder: Path) -> None:
    result = invoke(
        *("verify", "pp2", "--steps", 1, "--fault", "sends-block", "--report", "page.html")
    )
    assert result.exit_code == 3
    shown = read(folder / "page.html").text
    assert "broken" in shown
    assert "DeadlockError" in shown


@pytest.mark.parametrize("options", [("--layout", "dp2,tp2", "--trace"),
                                     ("--layout", "dp2", "--sync", "async"),
                                     ("--layout", "dp2", "--sync", "local")])  # fmt: skip
def test_train_shows_loss_a_step_memory_traffic_samples(
    folder: Path, options: tuple[str, ...]
) -> None:
    small = ("--preset", "nano", "--layers", 1, "--steps", 5, "--data", "text.txt")
    trained(*small, *options, "--run-dir", "a<b", "--report", "page.html")
    made = read(folder / "page.html")
    assert {"svg", "polyline", "figure", "details"} <= made.seen
    for words in ("a<b", "training", "held out", "A step", "parameters", "What all ranks send",
                  "5 steps, held out", "model.layers 1"):  # fmt: skip
        assert words in made.text, words
    if "--trace" in options:
        assert "rank 3" in made.text
        assert "Steps 2, 3, 4 as traced" in made.text


def test_samples_on_the_way_are_shown_with_what_html_would_take_for_its_own(folder: Path) -> None:
    small = ("--preset", "nano", "--layers", 1, "--steps", 2, "--data", "text.txt")
    trained(*small, "--run-dir", "run")
    record = {"step": 2, "text": "<script>alert(1)</script> & more"}
    (folder / "run/samples.jsonl").write_text(json.dumps(record) + '\n{"step": 3, "te')
    trained("--resume", "--run-dir", "run", "--steps", 3, "--report", "page.html")
    shown = read(folder / "page.html").text
    assert "After step 2 <script>alert(1)</script> & more" in shown


@pytest.mark.parametrize("command", [("train", "--preset", "nano", "--steps", 1), ("verify",)])
@pytest.mark.parametrize("path", [".", "no/page.html", "/dev/null"])
def test_a_page_that_could_not_be_kept_is_refused_first(
    folder: Path, command: tuple[str, ...], path: str
) -> None:
    result = invoke(*command, "--report", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"minitrain: cannot write the report {path}: ")
    assert list(folder.iterdir()) == [folder / "text.txt"]
    assert Path("/dev/null").is_char_device()


def test_a_page_is_of_layouts() -> None:
    result = invoke("verify", "--list-faults", "--report", "page.html")
    assert result.exit_code == 2
    assert "--list-faults" in result.stderr


def test_charts_of_nothing_of_one_point_and_of_infinities() -> None:
    for points in ([], [(1.0, 2.0)], [(1.0, math.inf), (2.0, math.nan), (3.0, 5.0)]):
        Checked(page.page("x", charts.curves({"y": points}, "y")))
    Checked(page.page("x", charts.errors([0.0, math.inf, math.nan, 1e-3], "errors")))
    Checked(page.page("x", charts.errors([], "errors")))
    Checked(page.page("x", charts.bars({"a": {}, "b": {"part": 0.0}}, "MB", "bars")))


def test_a_long_curve_is_thinned_to_means_that_end_where_it_ends() -> None:
    points = [(float(i), float(i % 2)) for i in range(6000)]
    thin = charts.thinned(points)
    assert len(thin) == charts.MOST
    assert thin[-1] == (5999.0, 0.5)
