"""The plot: well-formed, self-contained, a pair of charts for each operation with sizes."""

from xml.etree import ElementTree

from dure.cli.bench.plot import write_plot
from unit.bench.sample import cell, report

SVG = "{http://www.w3.org/2000/svg}"


def test_svg_is_well_formed_and_holds_a_pair_of_charts(tmp_path):
    write_plot(tmp_path / "plot.svg", report())
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert len(root.findall(f"{SVG}svg")) == 2
    # Two contestants, of whom one has no figure for the larger size.
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 1, 2, 1]


def test_page_escapes_what_it_shows_and_needs_nothing_else(tmp_path):
    write_plot(tmp_path / "plot.html", report())
    text = (tmp_path / "plot.html").read_text("utf-8")
    assert "Abacus &amp; Sons" in text
    assert "a &lt;b&gt;" in text
    assert text.count("<svg") == 2
    assert "url(" not in text
    assert "<script" not in text


def test_plot_of_nothing_is_still_a_page(tmp_path):
    empty = report()
    empty.cells = [cell(8, "dure shm", 1e-6)]
    for name in ("plot.html", "plot.svg"):
        write_plot(tmp_path / name, empty)
        assert (tmp_path / name).stat().st_size > 500
