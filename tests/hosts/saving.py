"""A program for ranks on hosts: it saves a checkpoint after each of five steps, in all rounds.

In the first round rank 0 pauses in the commit of the third checkpoint, after its last look at the
lock: it writes its host and process into the file `commits`, waits for the file `go on`, and writes
`tried` after the commit. In later rounds rank 0 pauses before it writes slices of the third: it
writes `writes`, and waits for `finish`. The folder behaves as one on a network file system that has
no locks.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import dure as dist
from dure.checkpoint import Checkpointer, lock, saving
from dure.checkpoint.folder import Folder

STEPS = 5


def pause(note: Path, until: Path) -> None:
    note.write_text(f"{socket.gethostname()} {os.getpid()}")
    while not until.exists():
        time.sleep(0.01)


def main() -> None:
    folder = Path(sys.argv[1])
    lock.LEASE_S, lock.RENEW_S = 3.0, 0.5
    vars(lock).update(_is_of_one_host=lambda _: False, _flock=lambda *_: None)
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    dist.init_process_group(timeout=timedelta(seconds=60))
    checkpoints = Checkpointer(folder / "run", sharded=True)
    check, commit, write_slices = Folder.check, Folder.commit, saving.write_slices
    step = [0]

    def paused_check(self: Folder) -> None:
        check(self)
        if step[0] == 3 and sys._getframe(1).f_code is commit.__code__:
            pause(folder / "commits", folder / "go on")

    def noted_commit(self: Folder, made: Path) -> Path:
        try:
            return commit(self, made)
        finally:
            if step[0] == 3:
                (folder / "tried").touch()

    def paused_write(*args: Any) -> Any:
        if step[0] == 3 and dist.get_rank() == 0:
            pause(folder / "writes", folder / "finish")
        return write_slices(*args)

    if number == 0:
        Folder.check, Folder.commit = paused_check, noted_commit
    else:
        saving.write_slices = paused_write
    state = {"made in round": torch.zeros(8)}
    last = checkpoints.load(state=state)
    for step[0] in range((last or 0) + 1, STEPS + 1):
        state["made in round"] = torch.full((8,), float(number))
        dist.all_reduce(torch.ones(1))
        checkpoints.save(step[0], state=state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
