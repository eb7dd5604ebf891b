"""Charts: round ticks that hold the data, well-formed SVG, points where they belong."""

import re
from xml.etree import ElementTree

import pytest

from dure.cli.charts import (
    Axis,
    Bar,
    Dots,
    Series,
    line_chart,
    scatter_chart,
    stacked_bars,
    ticks,
)

PLAIN = Axis("time (s) <&>")


@pytest.mark.parametrize(
    ("low", "high", "log", "marks"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0.3, 0.94, False, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (-7, 1230, False, [-500, 0, 500, 1000, 1500]),
        (5, 5, False, [5, 6]),
        (0.02, 3, True, [0.01, 0.1, 1, 10]),
        (1, 1, True, [1, 10]),
        (1, 10, True, [1, 10]),
    ],
)
def test_ticks_are_round_and_hold_the_range(low, high, log, marks):
    assert ticks(low, high, log=log) == pytest.approx(marks)


def test_line_chart_draws_every_line_within_the_plot():
    lines = [Series("1 rank", [(0, 2.0), (10, 0.5)]), Series("2 <ranks>", [(0, 2.0), (5, 0.5)])]
    root = ElementTree.fromstring(line_chart("Loss & time", lines, PLAIN, Axis("loss")))
    drawn = [e.attrib["points"] for e in root.iter("polyline")]
    assert drawn == ["62.0,34.0 546.0,274.0", "62.0,34.0 304.0,274.0"]
    assert {"2 <ranks>", "time (s) <&>"} <= {e.text for e in root.iter("text")}


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1, 2.0), (2, 2.0)]])
def test_line_chart_of_little_is_still_a_chart(points):
    for log in (False, True):
        axis = Axis("loss", log=log)
        ElementTree.fromstring(line_chart("t", [Series("a", points)], PLAIN, axis))


@pytest.mark.parametrize(
    ("points", "log", "kept", "last"),
    [
        ([(i, i % 7) for i in range(10_001)], False, 386, "546.0,"),  # thinned, but for its end
        ([(0, 1.0), (1, 0.0), (2, 10.0)], True, 2, "546.0,"),  # a logarithm cannot show 0
    ],
)
def test_line_chart_keeps_the_points_that_can_be_seen(points, log, kept, last):
    svg = line_chart("t", [Series("a", points)], PLAIN, Axis("loss", log=log))
    (drawn,) = re.findall(r'points="([^"]+)"', svg)
    assert len(drawn.split()) == kept
    assert drawn.split()[-1].startswith(last)


def test_stacked_bars_are_as_long_as_their_parts():
    bars = [Bar("1 rank", [1.0, 3.0]), Bar("2 ranks", [1.0, 1.0])]
    root = ElementTree.fromstring(stacked_bars("t", ["data", "compute"], bars, PLAIN))
    widths = [float(e.attrib["width"]) for e in root.iter("rect") if e.find("title") is not None]
    assert widths == [121.0, 363.0, 121.0, 121.0]


def test_bars_that_are_close_have_their_length_behind_them():
    bars = [Bar(str(i), [10.0]) for i in range(10)]
    root = ElementTree.fromstring(stacked_bars("t", ["all"], bars, PLAIN))
    lengths = [e for e in root.iter("text") if e.text == "10.0"]
    # 10 of 15 (ticks up to 10.8: 0, 5, 10, 15), from 62 to 546
    assert {float(e.attrib["x"]) for e in lengths} == {round(62 + 484 * 10 / 15 + 5, 1)}


def test_scatter_chart_draws_points_where_they_belong_and_the_edge():
    series = [Dots("a <b>", [(0, 100.0, "one"), (100, 200.0, "two & more")]), Dots("none", [])]
    svg = scatter_chart("t", series, Axis("GB"), Axis("speed"), 50)
    root = ElementTree.fromstring(svg)
    drawn = {
        c.find("title").text: (float(c.attrib["cx"]), float(c.attrib["cy"]), c.attrib["class"])
        for c in root.iter("circle")
    }
    assert drawn == {"one": (62, 274, "fill c0"), "two & more": (546, 34, "fill c0")}
    (edge,) = (e.attrib["d"] for e in root.iter("path") if e.attrib["class"] == "edge")
    assert edge == "M304.0 34V274"
    ElementTree.fromstring(scatter_chart("t", [Dots("a", [])], PLAIN, PLAIN, 50))
