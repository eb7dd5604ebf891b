"""A flight recorder of a test's own, and where it dumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure.trace import flight


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with a recorder that has seen nothing."""
    monkeypatch.setattr(flight, "_recorder", flight._Recorder())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where errors and signals dump."""
    monkeypatch.setenv("DURE_TRACE_DIR", str(tmp_path))
    return tmp_path
