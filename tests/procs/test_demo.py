"""`dure demo` for real: processes, shared memory, images; as many ranks, the same training."""

from pathlib import Path

import numpy as np
import pytest

from dure.cli.app import run_command_line
from dure.cli.demo import command
from dure.cli.demo.events import EpochEnd, Start, decode
from dure.data import load_digits
from dure.launch import JobSpec, run_job


@pytest.fixture
def finished(monkeypatch):
    """Collect the runs that are reported."""
    runs = []
    write_report = command.write_report

    def spy(path: Path, finished_runs, ran):
        runs.extend(finished_runs)
        write_report(path, finished_runs, ran)

    monkeypatch.setattr(command, "write_report", spy)
    return runs


def test_demo_with_two_ranks_learns_what_one_learns(finished, tmp_path, capfd):
    code = run_command_line(["demo", "--quick", "--epochs", "4", "--out", str(tmp_path)])
    shown = capfd.readouterr()
    assert code == 0, shown.err
    one, two = finished
    assert (one.ranks, two.ranks) == (1, 2)
    assert len(one.points) == len(two.points) == 44
    # Rounding differs with the shape of a batch; it grows with the steps, to about 1e-3 here.
    assert [p.loss for p in one.points] == pytest.approx([p.loss for p in two.points], abs=0.02)
    assert one.accuracy > 0.9
    assert two.accuracy == pytest.approx(one.accuracy, abs=0.02)
    assert two.start.backend == "shm"
    assert 0 < two.communication_share < 1
    assert one.communication_share == 0
    assert "time to training loss" in shown.out
    assert (tmp_path / "report.html").stat().st_size > 10_000


def _write_idx(directory: Path, prefix: str, images) -> None:
    pixels = (images.pixels.squeeze(1) * 255).round().to("cpu").numpy().astype(np.uint8)
    labels = images.labels.numpy().astype(np.uint8)
    for name, array in (
        (f"{prefix}-images-idx3-ubyte", pixels),
        (f"{prefix}-labels-idx1-ubyte", labels),
    ):
        header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, dtype=">u4").tobytes()
        (directory / name).write_bytes(header + array.tobytes())


def test_demo_training_program_reads_idx_files_by_itself(tmp_path):
    digits = load_digits()
    _write_idx(tmp_path, "train", digits.train)
    _write_idx(tmp_path, "t10k", digits.test)
    events = []
    result = run_job(
        JobSpec(
            program="dure.cli.demo.train",
            kind="module",
            args=("--data", str(tmp_path), "--epochs", "1", "--images", "240", "--events"),
            on_line=lambda line: events.append(decode(line.text.decode())),
            stdin="none",
        )
    )
    result.check()
    (start,) = (e for e in events if isinstance(e, Start))
    assert (start.train_images, start.test_images, start.steps) == (240, 359, 2)
    assert [e.epoch for e in events if isinstance(e, EpochEnd)] == [1]
