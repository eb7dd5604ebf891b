"""What the ranks of the tests of the flight recorder do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch

import dure as dist
from dure import trace
from tests.waiting import until


def look_at_rank_0(rank: int, folder: str, op: str) -> None:
    """Rank 0 waits in `op`; rank 1 signals it until its file shows that it does."""
    os.environ["DURE_TRACE_DIR"] = folder
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        _signal_until_it_waits(pids[0], Path(folder, "rank0.json"), op)
    if op == "recv":
        (dist.recv if rank == 0 else dist.send)(torch.ones(4), 1 - rank)
    else:
        dist.all_reduce(torch.ones(4))
    dist.barrier()


def _signal_until_it_waits(pid: int, file: Path, op: str) -> None:
    def waits() -> bool:
        os.kill(pid, signal.SIGUSR2)
        until(file.exists, "a file for the signal")
        content = json.loads(file.read_text())
        file.unlink()
        last = content["records"][-1]
        if (last["op"], last["state"]) != (op, "started"):
            return False
        assert content["reason"] == "SIGUSR2" and last["file"] == __file__
        functions = [f["function"] for f in content["threads"][0]["stack"]]
        assert "look_at_rank_0" in functions, functions
        return True

    until(waits, f"rank 0 waiting in {op}")


def dump_now(rank: int, folder: str) -> str:
    """Do something of each kind, and write it down."""
    t = torch.ones(8)
    dist.all_reduce(t)
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    work.wait()
    if rank == 0:
        dist.send(t, 1, tag=4)
    if rank == 1:
        dist.recv(t, 0, tag=4)
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.broadcast(t, 0, group)
        dist.destroy_process_group(group)
    dist.barrier()
    return str(trace.dump(folder))
