"""Hosts that have a folder on their own disks: each rank has its own file system mounted there."""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest

from dure.checkpoint import Checkpointer
from dure.errors import CheckpointNotWritten
from dure.testing import ProcessPool

CLONE_NEWNS = 0x20000


def _save_on_own_disks(rank, folder):
    """Mount another file system over the folder on rank 1, save, and return the error's parts."""
    libc = ctypes.CDLL(None, use_errno=True)
    if rank == 1:
        assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    checkpoints = Checkpointer(folder, keep=1)
    with pytest.raises(CheckpointNotWritten) as caught:
        checkpoints.save(2, state={"step": 2})
    return caught.value.what, sorted(os.listdir(folder))


@pytest.mark.needs("engine", "root")
def test_a_run_whose_hosts_have_the_folder_on_their_own_disks_is_refused(tmp_path):
    Checkpointer(tmp_path).save(1, state={"step": 1})
    with ProcessPool(2) as pool:
        told = pool.run(_save_on_own_disks, str(tmp_path))
    assert told[0][0] == told[1][0] == "the ranks do not see the same folder"
    assert told[0][1] == ["000001-step-1"] and told[1][1] == []
