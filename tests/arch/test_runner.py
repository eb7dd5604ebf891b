"""The script that runs the tests: what did not run is a failure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location("the_script", SCRIPTS / "tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "the_script", module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


class _Ended:
    def run(self, words: list[str], output: Path) -> tuple[int, str]:
        raise BrokenPipeError


def test_files_are_reported_whose_batch_raised_an_error(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, results = script.Queue({}, 1, ["tests/arch"]), script.Results()
    script.Lane(_Ended(), queue, results, [], tmp_path / "lane").wait()
    assert script.report(results, 1.0, None) == 1
    assert "BrokenPipeError(): tests/arch/" in capsys.readouterr().out
