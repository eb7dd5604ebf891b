"""A program of two ranks without a launcher: rank 0, which serves the store, ends first.

    python store_holder.py leaves|is_killed

The groups are over the simulated NCCL alone. Rank 1 prints what it thinks of rank 0's end.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import dure as dist
from dure.testing import accelerator
from tests.waiting import until


def main() -> None:
    """Run one rank."""
    accelerator.install()
    dist.init_process_group("sim:simulated_nccl")
    group: Any = dist.group.WORLD
    t = torch.empty(3, device="sim").fill_(dist.get_rank() + 1.0)
    dist.all_reduce(t)
    assert t.tolist() == [3.0] * 3
    if dist.get_rank() == 0:
        group.store.wait(["rank 1 has the sum"])  # which needs the store
        if sys.argv[1] == "leaves":
            dist.destroy_process_group()
            sys.exit()
        os._exit(0)
    group.store.set("rank 1 has the sum", "")
    engine = group._backends["sim"]
    until(lambda: engine._deaths.has_died(0), "the end of rank 0")
    engine.look()
    record = engine._state.record
    print("no loss" if record is None else f"{record.kind} {record.peer}")


if __name__ == "__main__":
    main()
