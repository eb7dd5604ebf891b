"""Ranks of a job that were stopped within a save, and continue while the next job saves there."""

import errno
import os
import signal
from contextlib import suppress

import pytest
import torch

import dure
from dure.checkpoint import agreement, load, save, saving
from dure.errors import CheckpointException, CommError
from tests.checkpoint.saved_states import counted, loaded, rows
from tests.comm.forked_ranks import Ranks, is_stopped
from tests.waiting import until

pytestmark = pytest.mark.needs("engine")


def _stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _before(act, function):
    def acting(*args):
        act()
        return function(*args)

    return acting


def _disk_is_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _stopped_at_a_failure(ranks, *args, **options):
    try:
        return _decided(ranks, *args, **options)
    except CheckpointException:
        _stop()
        raise


_decided = agreement.Ranks.decided


def _save(slot, folder, when=""):
    """Save [0, 1, ...]; or zeros, in a job whose rank 0 dies or fails and whose rank 1 stops."""
    dure.init_process_group("shm", init_method=slot.url, rank=slot.rank, world_size=slot.size)
    if when == "before it writes":
        saving.write_slices = _before(_stop if slot.rank else _die, saving.write_slices)
    elif when and slot.rank == 0:
        saving.publish = _disk_is_full
    elif when:
        agreement.Ranks.decided = _stopped_at_a_failure
    with suppress(*((CheckpointException, CommError) if when else ())):
        save({"w": rows(counted(7, 4) * (not when))}, checkpoint_id=folder)


@pytest.mark.parametrize("when", ["before it writes", "before it removes what it has written"])
def test_a_rank_that_continues_changes_no_file_of_the_next_save(tmp_path, when):
    """Its file has the name of one of the next save, whose number is the same."""
    folder = tmp_path / "saved"
    for name in ("saved", "job", "later"):
        (tmp_path / name).mkdir()
    with (
        Ranks(2, tmp_path / "job", _save, folder, when) as job,
        Ranks(2, tmp_path / "later") as later,
    ):
        assert job.result(0) is None
        until(lambda: is_stopped(job.pids[1]), "the stop of rank 1")
        later.run(_save, 2, folder)
        assert loaded(folder, 7, 4) == counted(7, 4).tolist()
        os.kill(job.pids[1], signal.SIGCONT)
        assert job.result(1) is None
    assert loaded(folder, 7, 4) == counted(7, 4).tolist()
    save({"w": torch.ones(7, 4)}, checkpoint_id=folder)
    assert len(list(folder.iterdir())) == 2  # a manifest and one part
    load({"w": torch.zeros(7, 4)}, checkpoint_id=folder)
