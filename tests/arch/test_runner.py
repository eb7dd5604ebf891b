"""The script that runs the tests: what did not run is a failure."""

from pathlib import Path

import pytest

from tests.arch.sources import ROOT, script


class _Ended:
    def run(self, words: list[str], output: Path) -> tuple[int, str]:
        raise BrokenPipeError


def test_files_are_reported_whose_batch_raised_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    runner = script("scripts/tests.py")
    queue, results = runner.Queue({}, 1, ["tests/arch"]), runner.Results()
    runner.Lane(_Ended(), queue, results, [], tmp_path / "lane").wait()
    assert runner.report(results, 1.0, None) == 1
    assert "BrokenPipeError(): tests/arch/" in capsys.readouterr().out
