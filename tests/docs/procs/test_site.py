"""The site builds, and its search finds the right page first (`make drill`)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.docs.snippets import ROOT
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

FIRST = {
    "nccl timeout": "debugging.html",
    "hang": "debugging.html",
    "deadlock": "debugging.html",
    "gradient accumulation": "batch_size.html",
    "batch size": "batch_size.html",
    "evaluate": "evaluating.html",
    "docker": "containers.html",
    "out of memory": "memory.html",
    "seed": "reproducibility.html",
    "cuda": "gpu.html",
    "slurm": "clusters.html",
    "install": "install.html",
    "all_reduce": "reference/collectives.html",
    "environment variable": "reference/environment.html",
    "torchrun": "migration.html",
    "dure run": "launch.html",
    "launch": "launch.html",
    "checkpoint resume": "checkpoint.html",
    "fsdp offload": "fsdp.html",
    "ddp": "ddp.html",
    "kubernetes": "clusters.html",
    "multi-node": "hosts.html",
    "restart": "restarts.html",
    "trainer": "clients.html",
    "accelerate": "clients.html",
    "교착": "ko/debugging.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    subprocess.run(mkdocs, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S)
    return folder


def test_links_from_korean_pages_to_english_ones_are_marked(site: Path) -> None:
    page = (site / "ko/start.html").read_text()
    assert '<a hreflang="en" href="../install.html">' in page
    assert '<a href="concepts.html">' in page


def test_search_finds_the_right_page_first(site: Path) -> None:
    start = f"{site.as_uri()}/index.html"
    first = "a.md-search-result__link"
    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        for words in FIRST:
            page.goto(f"{start}?q={words}")
            link = page.wait_for_selector(first, state="attached", timeout=PATIENCE_S * 1000)
            assert link is not None
            target = link.get_attribute("href") or ""
            found[words] = target.partition("?")[0].removeprefix(start.removesuffix("index.html"))
        browser.close()
    assert found == FIRST
