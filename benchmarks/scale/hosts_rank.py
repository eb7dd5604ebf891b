"""One rank of row_hosts.py: python hosts_rank.py FOLDER RANKS_OF_A_HOST."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import dure


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def main(folder: Path, each: int) -> None:
    """Make the group, use it, and learn of a death."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["DURE_HOST_ID"] = f"simulated-{rank // each}"
    had = descriptors(), threads()
    began = time.monotonic()
    dure.init_process_group("hybrid")
    figures: dict[str, float] = {"s until the group is made": time.monotonic() - began}
    value = torch.ones(1 << 16)
    dure.all_reduce(value)
    right, left = (rank + each) % size, (rank - each) % size
    dure.batch_isend_irecv(
        [
            dure.P2POp(dure.isend, value, right),
            dure.P2POp(dure.irecv, torch.empty_like(value), left),
        ]
    )
    dure.barrier()
    figures["descriptors of the group"] = descriptors() - had[0]
    figures["threads of the group"] = threads() - had[1]
    died = folder / "died"
    if rank == size - 1:
        time.sleep(1.0)  # the others are in their reduction
        died.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dure.all_reduce(value)
    except dure.PeerLost as error:
        learned = time.monotonic()
        if error.peer != size - 1:
            raise
        figures["s until a death is known"] = learned - float(died.read_text())
        (folder / f"{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
