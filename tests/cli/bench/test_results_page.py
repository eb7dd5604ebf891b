"""`benchmarks/performance.py`: its tables go between the markers of the page, and nowhere else."""

import importlib.util
from types import ModuleType

import pytest

from tests.arch.sources import ROOT
from tests.cli.bench.bench_sample import OURS, cell, report


@pytest.fixture
def performance(tmp_path, monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "performance", ROOT / "benchmarks" / "performance.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    made = report()
    made.contestants = [OURS, "gloo", "Some MPI"]
    made.cells = [
        cell(1024, OURS, 1e-6, ranks=2),
        cell(1024, "gloo", 100e-6, ranks=2),
        cell(1024, "Some MPI", 2e-6, ranks=2),
        cell(512, OURS, 0.5e-6, ranks=2, dtype="bfloat16"),
        cell(1024, OURS, 3e-6, ranks=8),
    ]
    for name in module.RUNS:
        (tmp_path / f"{name}.json").write_bytes(made.encode())
    return module


def test_tables_are_written_between_their_markers_and_nowhere_else(performance):
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    once = performance.render(page)
    assert performance.render(once) == once
    assert "| 1 KiB | 1.00 us | - | 100 us | 2.00 us | 0.50× | - | 100× |" in once
    assert "| 256 | 1.00 us | 0.500 us | 0.50× |" in once
    assert "| 1 KiB | 1.00 us | 3.00 us | 3.00× |" in once
    for name in performance.RENDERED:
        begin, end = once.find(f"<!-- figures: {name} -->"), once.find(f"<!-- end: {name} -->")
        assert 0 < begin < end
    for line in page.partition("<!-- figures")[0].splitlines():
        assert line in once
    assert once.endswith(page[-20:])
