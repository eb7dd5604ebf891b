"""`benchmarks/`: a page has the committed figures."""

from tests.arch.sources import ROOT, script


def test_the_page_has_the_figures_of_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    performance = script("benchmarks/performance.py")
    page = performance.DOCUMENT.read_text("utf-8")
    assert performance.render(page) == page
