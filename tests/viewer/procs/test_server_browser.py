"""The page of a run, in a real browser: four ranks of which one is killed, and hostile files."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.launch.procs.launching import Launching
from tests.trace.made_up import record, write
from tests.viewer.procs.pages import ADDRESS, chromium, viewing
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("chromium")
expect.set_options(timeout=PATIENCE_S * 1000)

PROGRAM = """
    import sys, time
    import dure as dist
    import torch

    dist.init_process_group()
    rank = dist.get_rank()
    step = 0
    print("<script>window.hacked = 1</script>", "rank", rank, flush=True)
    print("<img src=x onerror='window.hacked = 1'>", file=sys.stderr, flush=True)
    while True:
        if rank == 2 and step == 20:
            time.sleep(1000)  # SLEEPS
        dist.all_reduce(torch.ones(250_000))  # REDUCES
        time.sleep(0.02)
        dist.log(step, loss=1.0 / (1 + step), **{"<b>lr</b>": 0.1})
        dist.progress(step, 40)
        step += 1
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a browser of its own, in which nothing goes wrong and no text becomes a program."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    shown = context.new_page()
    trouble: list[str] = []
    shown.on("pageerror", lambda error: trouble.append(str(error)))
    shown.on("console", lambda m: trouble.append(m.text) if m.type == "error" else None)
    shown.on("dialog", lambda dialog: trouble.append(f"dialog {dialog.message}"))
    shown.on("request", lambda r: None if "//127.0.0.1:" in r.url else trouble.append(r.url))
    yield shown
    assert shown.evaluate("window.hacked") is None
    context.close()
    assert trouble == []


def line_of(text: str) -> int:
    lines = PROGRAM.splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_four_ranks_run_and_one_is_killed(job: Launching, page: Page) -> None:
    program = job.write(PROGRAM)
    run = job.start("-n", "4", "--page", program, "many words <i>here</i>")
    first = run.stderr.readline()
    match = ADDRESS.search(first)
    assert match is not None, first
    page.goto(match[0])
    assert match["token"] not in page.url

    # The ranks: hosts, state, step, memory, CPU, and what the program says of itself.
    rows = page.locator("#ranks tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.nth(1)).to_contain_text("running")
    expect(rows.nth(3)).to_contain_text("19 of 40")
    expect(rows.nth(0)).to_contain_text("loss 0.05")
    expect(rows.nth(0)).to_contain_text("MiB")
    expect(rows.nth(0)).to_contain_text("%")
    expect(page.locator("h1")).to_contain_text("many words <i>here</i>")

    # Who waits for whom now.
    waits = page.locator("#waits tbody tr")
    expect(waits).to_have_count(3)
    for i in range(3):
        expect(waits.nth(i)).to_contain_text("rank 2")
        expect(waits.nth(i)).to_contain_text("all_reduce #21 (float32, 1000000 bytes, SUM)")
        expect(waits.nth(i)).to_contain_text(f"prog.py:{line_of('# REDUCES')}")
    expect(rows.nth(2)).to_contain_text(f"prog.py:{line_of('# SLEEPS')}")

    # Curves, collectives, output.
    for chart in ("step", "scalar loss", "scalar <b>lr</b>"):
        expect(page.locator(f'[data-chart="{chart}"] canvas')).to_be_visible()
    expect(page.locator("#collectives tbody tr").first).to_contain_text("all_reduce")
    expect(page.locator("#lines")).to_contain_text("<script>window.hacked = 1</script> rank 0")
    page.locator("#whose").select_option("3")
    expect(page.locator("#lines")).to_contain_text("<script>window.hacked = 1</script> rank 3")
    expect(page.locator("#lines .stderr")).to_have_text("<img src=x onerror='window.hacked = 1'>\n")

    # The first failure, with both call sites.
    pid = re.fullmatch(r"pid (\d+)", rows.nth(2).locator("td").nth(1).get_attribute("title") or "")
    assert pid is not None
    os.kill(int(pid[1]), signal.SIGKILL)
    failure = page.locator("#failure")
    expect(failure.locator("h2")).to_contain_text("rank 2")
    expect(failure.locator("h2")).to_contain_text("failed first: killed by SIGKILL")
    sites = failure.locator("tbody tr")
    expect(sites.first).to_contain_text(f"prog.py:{line_of('# SLEEPS')}")
    expect(sites.last).to_contain_text("ranks 0-1, 3")
    expect(sites.last).to_contain_text("all_reduce #21")
    expect(sites.last).to_contain_text(f"prog.py:{line_of('# REDUCES')}")

    done = job.finish(run)
    assert done.code == 128 + signal.SIGKILL
    expect(page.locator("#status")).to_contain_text("ended with exit code 137")
    expect(rows.nth(2)).to_contain_text("failed")  # the last state stays, though nobody answers
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_recorded_traces_with_hostile_texts_show_them_as_texts(page: Page, tmp_path: Path) -> None:
    evil = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    for rank in range(2):
        op = "all_reduce" if rank else "broadcast"
        last = record(rank, 2, op, file=f"/{evil}.py", function=evil)
        thread = {
            "name": evil,
            "main": True,
            "stack": [{"file": evil, "line": 1, "function": evil}],
        }
        changes = {"host": evil, "reason": f"ended by {evil}", "threads": [thread], "job": evil}
        marks = [{"step": i, "time_ns": i * 10**7, "scalars": {evil: i / 7}} for i in range(3)]
        span = {"track": "step", "global_rank": rank, "start_ns": 0, "end_ns": 5 * 10**6}
        spans = [
            span | {"name": f"{evil} {i % 2}", "start_ns": i * 10**7, "end_ns": (i + 1) * 10**7}
            for i in range(6)
        ]
        write(tmp_path, rank, [record(rank, 1), last], changes | {"marks": marks, "spans": spans})
    with viewing(tmp_path) as served:
        page.goto(served.url)
        expect(page.locator("#ranks tbody tr")).to_have_count(2)
        expect(page.locator("#failure h2")).to_contain_text(evil)
        expect(page.locator("#failure li").first).to_contain_text("differ in the operation")
        expect(page.locator("#ranks tbody tr").first).to_contain_text(evil)
        expect(page.locator("#timeline .lane i").first).to_contain_text(evil)
        expect(page.locator("section[data-chart^=scalar] h2")).to_contain_text(evil)
        assert page.locator("img, main script").count() == 0
