"""`benchmarks/`: libraries are compared with right results; a page has the committed figures."""

import importlib.util
import json
import subprocess
import sys

from dure.cli.bench.operations import OPERATIONS
from tests.arch.sources import ROOT
from tests.needs import why_missing
from tests.waiting import PATIENCE_S

BENCHMARKS = ROOT / "benchmarks"


def test_libraries_are_compared_with_right_results(tmp_path):
    rivals = ["gloo"] if why_missing("MPI") else ["gloo", "mpi"]
    words = ["--op", "all", "--sizes", "4,12K", "--samples", "2", "--sample-time", "0.001"]
    words += ["--against", ",".join(rivals), "--json", str(tmp_path / "figures.json")]
    command = [sys.executable, str(BENCHMARKS / "collectives.py"), *words]
    subprocess.run(command, check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)
    cells = json.loads((tmp_path / "figures.json").read_text())["cells"]
    assert len({(cell["op"], cell["contestant"]) for cell in cells}) == len(OPERATIONS) * (
        1 + len(rivals)
    )
    for cell in cells:
        assert (len(cell["samples_s"]), cell["wrong"]) == (2, 0), cell


def test_the_page_has_the_figures_of_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("performance", BENCHMARKS / "performance.py")
    assert spec is not None and spec.loader is not None
    performance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(performance)
    page = performance.DOCUMENT.read_text("utf-8")
    assert performance.render(page) == page
