"""What documents and docstrings show as Python runs, on real ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dure.testing import ProcessPool
from tests.docs import snippets

ALL = sorted(
    (
        page
        for page in map(snippets.read, [*snippets.PAGES[1:], *snippets.MODULES])
        if page.source.strip()
    ),
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
