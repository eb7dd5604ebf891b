"""TensorBoard files of steps."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

import pytest

import dure as dist
from dure.errors import UsageError
from dure.testing import run_ranks
from tests.parallel.metrics.ranks.metered import STEPS, Training

NAMES = {"step/compute_s", "step/exposed_comm_s", "step/data_wait_s", "samples/s", "loss"}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's event files."""
    reading = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


@pytest.mark.parametrize("per_rank", [False, True])
def test_tensorboard_gets_the_means_of_2_ranks_or_each_rank_writes_its_own(tmp_path, per_rank):
    def body(_: int) -> int:
        training = Training()
        with dist.TensorBoardWriter(tmp_path, training.meter, every=2, per_rank=per_rank) as board:
            training.run(board=board)
        return training.meter.num_gathers

    assert run_ranks(2, body) == [0 if per_rank else STEPS // 2] * 2
    folders = [tmp_path / f"rank{rank}" for rank in (0, 1)] if per_rank else [tmp_path]
    for folder in folders:
        assert len(list(folder.iterdir())) == 1
        found = scalars(folder)
        assert found.keys() >= NAMES
        assert [step for step, _ in found["step/compute_s"]] == [2, 4]
        assert found["loss"] == [(2, 2.0), (4, 4.0)]


def test_what_was_written_is_in_the_file_although_it_was_not_closed(tmp_path):
    board = dist.TensorBoardWriter(tmp_path, dist.StepMeter(), every=1, per_rank=True)
    board.write(loss=3.0)
    del board  # as at the end of a program
    gc.collect()
    assert scalars(tmp_path / "rank0")["loss"] == [(1, 3.0)]


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    def missing(name: str) -> object:
        raise ImportError(f"no {name}")

    monkeypatch.setattr("dure.parallel.metrics.board.importlib.import_module", missing)
    with pytest.raises(UsageError) as caught:
        dist.TensorBoardWriter(tmp_path / "new", dist.StepMeter())
    assert "'.[tensorboard]'" in caught.value.fix
    assert not (tmp_path / "new").exists()
