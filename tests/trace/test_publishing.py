"""What a program says of its steps, and what a rank publishes of itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import dure
from dure.errors import UsageError
from dure.trace import flight, publishing
from dure.trace.merging import read_file


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A page that reads: this process is rank 5 of a launcher."""
    line = ModuleType("__dure_line__")
    line.__dict__.update(pid=os.getpid(), fd=-1, stack_signal=10)
    monkeypatch.setitem(sys.modules, "__dure_line__", line)
    monkeypatch.setenv("DURE_PAGE_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setattr(flight._recorder, "known", dict)  # without the groups of other tests
    publishing.stop()  # another test may have asked
    flight.read_steps(True)  # what is kept is kept until somebody begins anew
    flight.read_steps(False)
    yield tmp_path
    publishing.stop()


@pytest.mark.parametrize("value", ["0.5", None, True, [1.0], object()])
def test_value_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="loss"):
        dure.log(1, loss=value)  # pyright: ignore[reportArgumentType]


def test_without_a_reader_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publishing.stop()
    monkeypatch.delenv("DURE_PAGE_DIR", raising=False)
    before = list(flight._recorder.marks)
    dure.log(1, loss=0.5)
    assert list(flight._recorder.marks) == before
    publishing.stop()
    monkeypatch.setenv("DURE_PAGE_DIR", str(tmp_path))  # inherited by what is no rank
    dure.log(2, loss=0.5)
    assert list(flight._recorder.marks) == before
    assert list(tmp_path.iterdir()) == []


def test_marks_are_published_with_what_is_not_finite_left_out(page: Path) -> None:
    dure.log(7, loss=0.5, count=3, broken=float("nan"))
    publishing.on_crash(ValueError("my bug"))  # and so without waiting for the next time
    file = read_file(page / "rank5.json")
    assert (file.rank, file.failure) == (5, "ValueError: my bug")
    assert file.marks[-1].step == 7
    assert file.marks[-1].scalars == {"loss": 0.5, "count": 3.0, "broken": None}
    assert (page / "rank5.json").stat().st_mode & 0o777 == 0o600
