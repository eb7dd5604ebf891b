"""The report: one file, nothing from elsewhere, nothing unescaped."""

from html.parser import HTMLParser

from dure.cli.demo.events import Memory
from dure.cli.demo.report import Ran, write_report
from unit.demo.sample import finished_run

RAN = Ran(command="dure demo --out 'a <b>'", when="2026-01-31 12:00", busy_cores=0.5)


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in {"src", "href", "xlink:href"}]

    def handle_data(self, data):
        self.text.append(data)


def _read(path):
    reader = _Reader()
    reader.feed(path.read_text("utf-8"))
    return reader


def test_report_is_self_contained_and_complete(tmp_path):
    path = tmp_path / "new" / "report.html"
    write_report(path, [finished_run(1, 1.0), finished_run(2, 0.5, 0.1)], RAN)
    page = _read(path)
    assert page.links == []
    assert "url(" not in path.read_text("utf-8")
    assert not {"script", "link", "img", "b"} & set(page.tags)
    assert page.tags.count("svg") == 4
    text = " ".join(page.text)
    for wanted in (RAN.command, RAN.when, "stripes & dots", "Kernel", "2 ranks", "1,234", "2.00×"):
        assert wanted in text
    assert path.stat().st_size < 100_000


def test_report_of_one_run_has_no_comparison(tmp_path):
    write_report(tmp_path / "r.html", [finished_run(1, 1.0)], RAN)
    page = _read(tmp_path / "r.html")
    assert "gain" not in " ".join(page.text)


def test_report_of_ways_says_what_the_last_gains_in_time_and_memory(tmp_path):
    ddp, fsdp = finished_run(2, 1.0), finished_run(2, 0.8)
    for run, way, nbytes in ((ddp, "DDP", 40_000_000), (fsdp, "FSDP", 10_000_000)):
        run.way = way
        for rank in range(2):
            run.add(rank, Memory(nbytes=nbytes))
    page = tmp_path / "report.html"
    write_report(page, [ddp, fsdp], Ran(command="dure demo", when="now", busy_cores=0.0))
    text = page.read_text()
    assert "FSDP trains 1.25 times as fast as DDP, in 0.25 of its memory" in text
    assert "memory of all ranks" in text
