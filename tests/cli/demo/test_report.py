"""The report of `dure demo`."""

from dure.cli.demo.events import Memory
from dure.cli.demo.report import Ran, write_report
from dure.cli.demo.results import comparison
from tests.cli.demo.demo_sample import finished_run

RAN = Ran(command="dure demo --out 'a <b>'", when="2026-01-31 12:00", busy_cores=0.5)


def test_memory_is_the_most_of_every_rank_added_up(tmp_path):
    ddp, fsdp = finished_run(2, 1.0), finished_run(2, 0.8)
    ddp.way, fsdp.way = "DDP", "FSDP"
    for run, most in ((ddp, 30_000_000), (fsdp, 12_000_000)):
        run.add(0, Memory(nbytes=most))
        assert run.memory == 0  # one rank has not told
        assert "memory of all ranks" not in {row.label for row in comparison([ddp, fsdp])}
        run.add(1, Memory(nbytes=10_000_000))
        run.add(1, Memory(nbytes=8_000_000))
    row = next(row for row in comparison([ddp, fsdp]) if row.label == "memory of all ranks")
    assert (row.values, row.gain) == (("40 MB", "22 MB"), "1.82×")
    write_report(tmp_path / "r.html", [ddp, fsdp], RAN)
    text = (tmp_path / "r.html").read_text()
    assert "FSDP trains 1.25 times as fast as DDP, in 0.55 of its memory" in text
    assert "DDP, 2 ranks" in text


def test_report_is_self_contained_and_complete(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, [finished_run(1, 1.0), finished_run(2, 0.5, 0.1)], RAN)
    text = path.read_text("utf-8")
    assert text.count("<svg") == 4
    for outside in ("src=", "href", "url(", "<script", "<link", "<img", "<b>"):
        assert outside not in text
    for wanted in ("a &lt;b&gt;", RAN.when, "stripes &amp; dots", "Kernel", "1,234", "2.00×"):
        assert wanted in text
    assert len(text) < 100_000
