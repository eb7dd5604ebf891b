"""`benchmarks/`: the pages have the committed figures."""

from tests.arch.sources import ROOT, script


def test_the_pages_have_the_figures_of_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    performance = script("benchmarks/performance.py")
    pages = [document.read_text("utf-8") for document in performance.DOCUMENTS]
    assert [performance.render(page) for page in pages] == pages
    for name in performance.RENDERED:
        assert sum(f"<!-- figures: {name} -->" in page for page in pages) == 1
