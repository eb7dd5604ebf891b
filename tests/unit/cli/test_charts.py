"""Charts: round ticks that hold the data, well-formed SVG, points where they belong."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.cli.charts import Axis, Bar, Series, line_chart, stacked_bars, ticks

PLAIN = Axis("time (s) <&>")
SANE = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda v: round(v, 3))


@given(SANE, SANE)
def test_ticks_hold_the_range_in_round_steps(a, b):
    low, high = sorted((a, b))
    marks = ticks(low, high)
    span = max(high - low, 1e-3)
    assert marks[0] <= low + span * 1e-6
    assert marks[-1] >= high - span * 1e-6
    assert 2 <= len(marks) <= 8
    step = marks[1] - marks[0]
    assert step / 10 ** math.floor(math.log10(step) + 1e-9) == pytest.approx(
        min((1, 2, 5, 10), key=lambda m: abs(m - step / 10 ** math.floor(math.log10(step) + 1e-9)))
    )


@pytest.mark.parametrize(
    ("low", "high", "marks"), [(0.02, 3, [0.01, 0.1, 1, 10]), (1, 1, [1, 10]), (1, 10, [1, 10])]
)
def test_ticks_of_a_logarithmic_axis_are_powers_of_ten(low, high, marks):
    assert ticks(low, high, log=True) == pytest.approx(marks)


def test_line_chart_draws_every_line_within_the_plot():
    lines = [Series("1 rank", [(0, 2.0), (10, 0.5)]), Series("2 <ranks>", [(0, 2.0), (5, 0.5)])]
    root = ElementTree.fromstring(line_chart("Loss & time", lines, PLAIN, Axis("loss")))
    drawn = [e.attrib["points"] for e in root.iter("polyline")]
    assert len(drawn) == 2
    (_, y0), (x1, y1) = ([float(v) for v in p.split(",")] for p in drawn[0].split())
    x2 = float(drawn[1].split()[1].split(",")[0])
    assert y0 < y1
    assert x2 < x1
    texts = [e.text for e in root.iter("text")]
    assert "2 <ranks>" in texts
    assert "time (s) <&>" in texts


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1, 2.0), (2, 2.0)]])
def test_line_chart_of_little_is_still_a_chart(points):
    for log in (False, True):
        axis = Axis("loss", log=log)
        ElementTree.fromstring(line_chart("t", [Series("a", points)], PLAIN, axis))


def test_line_chart_thins_long_lines_and_keeps_their_ends():
    line = Series("a", [(i, i % 7) for i in range(10_001)])
    svg = line_chart("t", [line], PLAIN, PLAIN)
    (points,) = re.findall(r'points="([^"]+)"', svg)
    assert len(points.split()) <= 402
    assert points.split()[-1].startswith("546.0,")


def test_line_chart_leaves_out_what_a_logarithm_cannot_show():
    line = Series("a", [(0, 1.0), (1, 0.0), (2, 10.0)])
    svg = line_chart("t", [line], PLAIN, Axis("loss", log=True))
    assert len(re.findall(r'points="([^"]+)"', svg)[0].split()) == 2


def test_stacked_bars_are_as_long_as_their_parts():
    bars = [Bar("1 rank", [1.0, 3.0]), Bar("2 ranks", [1.0, 1.0])]
    root = ElementTree.fromstring(stacked_bars("t", ["data", "compute"], bars, PLAIN))
    widths = [float(e.attrib["width"]) for e in root.iter("rect") if e.find("title") is not None]
    unit = widths[0]
    assert widths == pytest.approx([unit, 3 * unit, unit, unit], abs=0.2)
