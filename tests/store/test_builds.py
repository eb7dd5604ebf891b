"""Builds that processes of a job compare."""

import pytest

from dure import version
from dure.store.builds import Build, own_build


def test_changed_files_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "VERSION", "0.2.0.dev20261128+g5d4b20e5.dirty")
    assert own_build() == Build(version.PROTOCOL, "0.2.0.dev20261128+g5d4b20e5")
