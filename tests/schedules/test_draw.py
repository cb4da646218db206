"""Pictures show each instruction where it runs, and what a rank holds."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.errors import UserError
from minitrain.schedules import Times
from minitrain.schedules.build import build
from minitrain.schedules.draw import columns, fullest, holding, memory_line, picture, segments
from minitrain.schedules.figure import COLOURS, Box, Words, figure
from minitrain.schedules.png import write_png
from minitrain.schedules.simulate import Timeline, simulate
from minitrain.schedules.svg import svg

SVG = "{http://www.w3.org/2000/svg}"


def run(name: str, p: int = 2, m: int = 2, *times: float) -> Timeline:
    schedule = build(name, p, m)
    return simulate(schedule, Times.uniform(schedule.route, *times))


def test_by_hand() -> None:
    assert picture(run("1f1b"), 27, plain=True).splitlines() == [
        "rank 0   |F0-F1-      B0====   B1====|",
        "rank 1   |   F0-B0====F1-B1====      |",
        "memory 0 |444888888888888888444444444|",
    ]
    assert "▄▄▄█████" in picture(run("1f1b"), 27)


def test_letters_say_the_pass_and_the_chunk() -> None:
    row = "".join(segment.text() for segment in segments(run("zb-v", 1, 2), 0, 36))
    assert row == "F0-f0-i0~I0~w0.F1-W0.f1-i1~I1~w1.W1."
    narrow = "".join(segment.text() for segment in segments(run("1f1b", 1, 2), 0, 6))
    assert narrow == "FB0FB1"
    three = build("interleaved", 1, 1, 3)
    words = [segment.label for segment in segments(simulate(three), 0, 36)]
    assert words == ["F0", "f0", "f0.2", "b0.2", "b0", "B0"]


@given(st.integers(1, 5), st.integers(1, 9), st.integers(4, 200), st.floats(0, 2))
def test_rows_fill_the_width(p: int, m: int, width: int, transfer: float) -> None:
    for name in ("gpipe", "interleaved", "zb-h2", "v-min"):
        timeline = run(name, p, m, 1, 1, 1, transfer)
        for rank in range(p):
            row = segments(timeline, rank, width)
            assert sum(segment.width for segment in row) == width
            assert all(len(segment.text()) == segment.width for segment in row)
            assert len(memory_line(timeline, rank, width)) == width


def test_one_scale_for_all() -> None:
    timelines = [run("1f1b", 4, 8), run("zb-h1", 4, 8)]
    assert columns(timelines, 80) == [66, 54]  # 33 and 27 units of time, two columns each
    assert columns([run("1f1b", 4, 8)], 30) == [30]  # no room for whole numbers


def test_what_is_held() -> None:
    timeline = run("zb-h1", 3, 4)
    for rank in range(3):
        points = list(holding(timeline, rank))
        assert max(held for _, held in points) == 3
        assert points[-1] == (timeline.ends[rank], 0)
        assert [time for time, _ in points] == sorted(time for time, _ in points)
    assert fullest(run("1f1b", 3, 4)) == 0
    assert fullest(run("zb-h1", 3, 4), kept=2.0) == 2


def test_an_svg_stands_by_itself() -> None:
    timelines = [run("1f1b", 4, 8), run("zb-v", 4, 8)]
    text = svg(figure(timelines, ["1f1b <a> & b", "zb-v"]))
    root = ET.fromstring(text)
    assert root.attrib["width"] == "1280"
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert {"1f1b <a> & b", "zb-v", "rank 3", "F forward", "W backward for weights"} <= set(words)
    assert "line below: second chunk" in words
    boxes = [element.attrib for element in root.iter(f"{SVG}rect")]
    drawn = [box for box in boxes if box["fill"] in COLOURS and box["height"] == "26.00"]
    assert len(drawn) == sum(len(codes) for t in timelines for codes in t.schedule.ranks)
    for box in boxes:
        assert 0 <= float(box["x"]) <= float(box["x"]) + float(box["width"]) <= 1280
        assert float(box["y"]) + float(box["height"]) <= float(root.attrib["height"])
    assert "href" not in text


def test_boxes_are_where_events_are() -> None:
    timeline = run("1f1b", 2, 3)
    drawn = figure([timeline], ["1f1b"])
    bars = [s for s in drawn.shapes if isinstance(s, Box) and s.colour in COLOURS]
    scale = (1280 - 74 - 76) / timeline.makespan
    events = [event for rank in range(2) for event in timeline.events(rank)]
    bars = [bar for bar in bars if bar.height == 26]
    assert [round(bar.x, 6) for bar in bars] == [round(74 + e.start * scale, 6) for e in events]
    labels = [s.text for s in drawn.shapes if isinstance(s, Words) and s.anchor == "middle"]
    assert labels[:6] == ["F0", "F1", "B0", "F2", "B1", "B2"]


def test_colours_differ_in_grey() -> None:
    """By the luminance of ITU-R BT.709, at least a tenth of the way from black to white apart."""
    greys = []
    for colour in COLOURS:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        greys.append((0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255)
    greys.sort()
    assert min(b - a for a, b in pairwise(greys)) > 0.1


def test_too_many_to_see_are_refused() -> None:
    with pytest.raises(UserError, match=r"64000 instructions .* which can show 60000; draw fewer"):
        figure([run("1f1b", 16, 2000)], [""])


def test_png(tmp_path: Path) -> None:
    drawn, path = figure([run("1f1b")], ["1f1b"]), tmp_path / "a.png"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"needs matplotlib; .*minitrain\[plot\]"):
            write_png(drawn, path)
        return
    write_png(drawn, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (2560, round(2 * drawn.height))
