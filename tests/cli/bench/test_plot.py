"""The page of `dure bench`."""

import re

from dure.cli.bench.plot import page
from tests.cli.bench.bench_sample import cell, report


def test_page_draws_what_was_measured_and_needs_nothing_else():
    text = page(report())
    assert "Abacus &amp; Sons" in text and "a &lt;b&gt;" in text
    assert "url(" not in text and "<script" not in text
    assert text.count("<svg") == 2
    # Two contestants, of whom one has no figure for the larger size.
    lines = re.findall('points="(.*)"', text)
    assert [len(points.split()) for points in lines] == [2, 1, 2, 1]


def test_plot_of_nothing_is_still_a_page():
    empty = report()
    empty.cells = [cell(8, "dure shm", 1e-6)]
    assert "1.00 us" in page(empty)
