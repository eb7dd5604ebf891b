"""`dure demo` for real: processes, shared memory, images of a user's own; the same training."""

import numpy as np
import pytest

from dure.cli.app import run_command_line
from dure.cli.demo import command
from dure.cli.demo.results import PHASES
from dure.data import load_digits
from tests.data.idx_files import write_idx


def test_demo_with_two_ranks_learns_what_one_learns(monkeypatch, tmp_path, capfd):
    digits = load_digits()
    for prefix, images in (("train", digits.train), ("t10k", digits.test)):
        pixels = (images.pixels.squeeze(1) * 255).round().numpy().astype(np.uint8)
        write_idx(tmp_path, prefix, pixels, images.labels.numpy().astype(np.uint8))
    runs = []
    real = command.report

    def spy(finished_runs, command_line):
        runs.extend(finished_runs)
        return real(finished_runs, command_line)

    monkeypatch.setattr(command, "report", spy)
    words = ("--data", str(tmp_path), "--epochs", "1", "--out", str(tmp_path))
    code = run_command_line(["demo", *words])
    shown = capfd.readouterr()
    assert code == 0, shown.err
    one, two = runs
    assert (one.ranks, two.ranks) == (1, 2)
    assert (two.facts["Training images"], two.facts["Test images"]) == (1438, 359)
    assert len(one.losses) == len(two.losses) == 11
    # Rounding differs with the shape of a batch; it grows with the steps, to about 1e-3 here.
    assert one.losses == pytest.approx(two.losses, abs=0.02)
    assert one.losses[-1] < one.losses[0]
    assert two.accuracy == pytest.approx(one.accuracy, abs=0.02)
    waits = PHASES.index("exposed communication")
    assert sum(phases[waits] for phases in two.phases) > 0
    assert sum(phases[waits] for phases in one.phases) == 0
    assert "training loss" in shown.out
    assert "<polyline fill" in (tmp_path / "report.html").read_text()
