"""What the documents show as Python runs, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dure.testing import ProcessPool
from tests.docs import snippets

ALL = sorted(
    (page for page in map(snippets.read, snippets.PAGES[1:]) if page.source.strip()),
    key=lambda page: page.ranks,  # so that pools are not made again
)


@pytest.mark.parametrize("page", ALL, ids=[str(p.path.relative_to(snippets.ROOT)) for p in ALL])
def test_snippets_of_a_document_run(
    page: snippets.Snippets, process_pool: Callable[..., ProcessPool], tmp_path: Path, port: int
) -> None:
    pool = process_pool(page.ranks, "shm")
    pool.run(snippets.run, str(page.path), page.source, str(tmp_path), port)


def test_training_in_the_readme_goes_on_where_it_was(
    process_pool: Callable[..., ProcessPool], tmp_path: Path, port: int
) -> None:
    page = snippets.read(snippets.ROOT / "README.md")
    words = (str(page.path), page.source, str(tmp_path), port)
    first, second = (process_pool(page.ranks, "shm").run(snippets.run, *words) for _ in range(2))
    assert all("median of 3 steps" in text for text in first)
    assert all("no steps were measured" in text for text in second)
    assert "rank 1 of 4: [6.0, 6.0, 6.0, 6.0]" in first[1]


def test_snippets_are_read_with_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n<!-- first: x = 1 -->\n```python\ny = x\n```\n"
        "<!-- not run: needs a moon -->\n```python\nland()\n```\n<!-- ranks: 3 -->\n"
    )
    read = snippets.read(page)
    assert read.source.splitlines()[2:5] == ["x = 1", "", "y = x"]
    assert "land" not in read.source
    assert (read.ranks, read.left_out) == (3, ((8, "needs a moon"),))
