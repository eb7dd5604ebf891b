"""The small programs that launchers start in `launch.py`, for torch.distributed and for Dure.

    launch_programs.py WHAT MODULE FOLDER

MODULE stands in for `torch.distributed`. What happens when is told by empty files in FOLDER, whose
names are a word, the process, and the nanoseconds of the clock that all of a machine share.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any  # Any: a module that is named on the command line

STEPS = 60
LAST_STEP = 20
ROWS = 64
WIDTH = 256


def mark(word: str) -> None:
    """Say that this process has come to `word`."""
    Path(sys.argv[3], f"{word}-{os.getpid()}-{time.monotonic_ns()}").touch()


def die(how: str) -> None:
    """End this process at once."""
    mark("dies")
    if how == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL)


def has_happened(word: str) -> bool:
    """Tell whether any process has come to `word`."""
    return any(Path(sys.argv[3]).glob(f"{word}-*"))


def meet() -> Any:
    """Import torch and join the group; return the module that stands for `torch.distributed`."""
    dist = importlib.import_module(sys.argv[2])
    dist.init_process_group(*(["gloo"] if sys.argv[2] == "torch.distributed" else []))
    dist.barrier()
    return dist


def initialises() -> None:
    """Join a group, and leave it."""
    meet().destroy_process_group()


def idles() -> None:
    """Import torch, and wait until the folder says so."""
    importlib.import_module("torch")
    mark("ready")
    while not has_happened("enough"):
        time.sleep(0.05)


def dies(how: str, where: str) -> None:
    """Let rank 1 die, while the others sleep or wait in a collective."""
    dist = meet() if where == "collective" else None
    if os.environ["RANK"] == "1":
        time.sleep(0.3)  # the others get to where they wait
        die(how)
    if dist is None:
        time.sleep(100)
    else:
        torch = importlib.import_module("torch")
        dist.all_reduce(torch.zeros(10))


def restarts() -> None:
    """Let rank 1 die in its first life; mark the first line of the second."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        mark("line")
        return
    importlib.import_module("torch")
    if os.environ["RANK"] == "1":
        time.sleep(0.3)  # the others have come as far
        die("SIGKILL")
    time.sleep(100)


def survives() -> None:
    """Train with `dure.elastic`; rank 1 is killed after a step, and the others go on."""
    import torch  # lazy: programs above must not load it

    import dure as dist  # lazy: as torch
    from dure import elastic  # lazy: Dure alone has it
    from dure.parallel import DistributedDataParallel  # lazy: loads torch

    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = elastic.State(model=model, optimizer=optimizer, step=0)
    newcomer = has_happened("dies")

    def train(state: elastic.State) -> None:
        ddp = DistributedDataParallel(state.model)
        if newcomer:
            mark("joined")
        whole = dist.get_world_size() == int(os.environ["WORLD_SIZE"])
        last = state.step + STEPS if whole and has_happened("dies") else sys.maxsize
        while state.step < last:
            optimizer.zero_grad()
            ddp(torch.ones(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if has_happened("dies") and not newcomer:
                mark("step")
            elif os.environ["RANK"] == "1" and state.step == LAST_STEP and not newcomer:
                die("SIGKILL")

    elastic.run(train, state)


def main() -> None:
    """Do what the first argument names."""
    what, _, rest = sys.argv[1].partition(":")
    if what == "imports":
        importlib.import_module("torch")
    elif what != "nothing":
        globals()[what](*rest.split(":") if rest else ())


if __name__ == "__main__":
    main()
