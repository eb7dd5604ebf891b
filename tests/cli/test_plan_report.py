"""`dure plan layouts --report`: the rows as pictures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.cli.planned import LLAMA, answered, called


def test_the_report_has_the_rows_as_pictures_and_tables(tmp_path):
    page = tmp_path / "page.html"
    words = [*LLAMA, "--nodes", "4"]
    assert called(*words, "--report", str(page))[0] == 0
    found, text = answered(*words), page.read_text()
    bars, dots = (ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text, re.S))
    widths = [float(r.attrib["width"]) for r in bars.iter("rect") if r.find("title") is not None]
    drawn = [sum(widths[i : i + 8]) for i in range(0, len(widths), 8)]
    seconds = [row["seconds"] for row in found["rows"][:10]]
    assert len(drawn) == 10
    for length, each in zip(drawn, seconds, strict=True):
        assert length / drawn[0] == pytest.approx(each / seconds[0], abs=0.01)
    names = [c.find("title").text for c in dots.iter("circle")]
    assert {row["layout"]["text"] for row in found["rows"]} <= set(names)
    assert f"{found['rows'][0]['speed']:,.0f} tokens/s" in text
    for sentence in found["reasons"]:
        assert sentence in text
