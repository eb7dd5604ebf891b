"""`dure demo` for real: processes, shared memory, images of a user's own; the same training."""

from pathlib import Path

import numpy as np
import pytest

from dure.cli.app import run_command_line
from dure.cli.demo import command
from dure.data import load_digits


def _write_idx(directory: Path, prefix: str, images) -> None:
    pixels = (images.pixels.squeeze(1) * 255).round().numpy().astype(np.uint8)
    labels = images.labels.numpy().astype(np.uint8)
    for name, array in (
        (f"{prefix}-images-idx3-ubyte", pixels),
        (f"{prefix}-labels-idx1-ubyte", labels),
    ):
        header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, dtype=">u4").tobytes()
        (directory / name).write_bytes(header + array.tobytes())


def test_demo_with_two_ranks_learns_what_one_learns(monkeypatch, tmp_path, capfd):
    digits = load_digits()
    _write_idx(tmp_path, "train", digits.train)
    _write_idx(tmp_path, "t10k", digits.test)
    runs = []
    write_report = command.write_report

    def spy(path: Path, finished_runs, ran):
        runs.extend(finished_runs)
        write_report(path, finished_runs, ran)

    monkeypatch.setattr(command, "write_report", spy)
    words = ("--data", str(tmp_path), "--epochs", "3", "--out", str(tmp_path))
    code = run_command_line(["demo", *words])
    shown = capfd.readouterr()
    assert code == 0, shown.err
    one, two = runs
    assert (one.ranks, two.ranks) == (1, 2)
    assert (two.start.train_images, two.start.test_images, two.start.backend) == (1438, 359, "shm")
    assert len(one.points) == len(two.points) == 33
    # Rounding differs with the shape of a batch; it grows with the steps, to about 1e-3 here.
    assert [p.loss for p in one.points] == pytest.approx([p.loss for p in two.points], abs=0.02)
    assert one.accuracy > 0.7
    assert two.accuracy == pytest.approx(one.accuracy, abs=0.02)
    assert 0 < two.communication_share < 1
    assert one.communication_share == 0
    assert "time to training loss" in shown.out
    assert (tmp_path / "report.html").stat().st_size > 10_000
