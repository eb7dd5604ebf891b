"""`dure demo` for real: processes, shared memory, images of a user's own; the same training."""

from pathlib import Path

import numpy as np
import pytest

from dure.cli.app import run_command_line
from dure.cli.demo import command
from dure.data import load_digits
from tests.data.idx_files import write_idx


def test_demo_with_two_ranks_learns_what_one_learns(monkeypatch, tmp_path, capfd):
    digits = load_digits()
    for prefix, images in (("train", digits.train), ("t10k", digits.test)):
        pixels = (images.pixels.squeeze(1) * 255).round().numpy().astype(np.uint8)
        write_idx(tmp_path, prefix, pixels, images.labels.numpy().astype(np.uint8))
    runs = []
    write_report = command.write_report

    def spy(path: Path, finished_runs, ran):
        runs.extend(finished_runs)
        write_report(path, finished_runs, ran)

    monkeypatch.setattr(command, "write_report", spy)
    words = ("--data", str(tmp_path), "--epochs", "1", "--out", str(tmp_path))
    code = run_command_line(["demo", *words])
    shown = capfd.readouterr()
    assert code == 0, shown.err
    one, two = runs
    assert (one.ranks, two.ranks) == (1, 2)
    assert (two.start.train_images, two.start.test_images, two.start.backend) == (1438, 359, "shm")
    assert len(one.points) == len(two.points) == 11
    # Rounding differs with the shape of a batch; it grows with the steps, to about 1e-3 here.
    assert [p.loss for p in one.points] == pytest.approx([p.loss for p in two.points], abs=0.02)
    assert one.points[-1].loss < one.points[0].loss
    assert two.accuracy == pytest.approx(one.accuracy, abs=0.02)
    assert 0 < two.communication_share < 1
    assert one.communication_share == 0
    assert "time to training loss" in shown.out
    assert (tmp_path / "report.html").stat().st_size > 10_000
