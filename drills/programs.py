"""The program of a drill's ranks: they work in steps, log what they do, and die when ordered to.

    programs.py KIND FOLDER

Every process appends entries (JSON lines) to a separate file in FOLDER/said: event, time (on the
clock that all processes of a host share), process and rank. An *order* is a file in FOLDER/orders,
named after a point of the program. The first process that reaches the point removes it, and dies of
SIGKILL after the number of seconds in it. The job ends after FOLDER/enough was created.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[2])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUND = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
SAMPLES = 24
"""Samples of a step, which its ranks share."""

STEP_S = 0.02
BALLAST = 1 << 20
"""Additional numbers in the state, so that sending it takes some time."""

LIMIT_S = 60.0

_said = (FOLDER / "said" / f"{os.getpid()}-{time.monotonic_ns()}").open("a", buffering=1)


def say(word: str, **facts: object) -> None:
    """Log the event `word` of this process."""
    entry = {"word": word, "at": time.monotonic(), "pid": os.getpid(), "rank": RANK, **facts}
    _said.write(json.dumps(entry) + "\n")


def heed(point: str) -> None:
    """Die if there is an order for this point that no other process has taken."""
    order = FOLDER / "orders" / point
    taken = FOLDER / "taken" / f"{point}-{os.getpid()}"
    try:
        order.rename(taken)
    except FileNotFoundError:
        return
    delay_s = float(taken.read_text())
    say("dies", point=point)
    if delay_s == 0:
        _die()
    timer = threading.Timer(delay_s, _die)
    timer.daemon = True
    timer.start()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def heeding(point: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with a call of `heed` before it."""

    def heeds(*arguments: Any) -> Any:
        heed(point)
        return method(*arguments)

    return heeds


def enough() -> bool:
    """Return whether the job may end."""
    return (FOLDER / "enough").exists()


# ---- rounds: checkpoints in files ----------------------------------------------------------------


def _write(path: Path, value: object) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(value))
    draft.rename(path)


def _await(path: Path) -> Any:
    """Wait for a file, and return its content."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path.name)
        time.sleep(0.002)
    return json.loads(path.read_text())


def _commit(path: Path, value: object) -> None:
    """Write a commit atomically, unless the step has been committed."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(value))
    try:
        os.link(draft, path)
    except FileExistsError:
        say("late", commit=path.name)
    finally:
        draft.unlink()


def rounds() -> None:
    """Work in steps; rank 0 commits each as a file when it has the parts of all ranks."""
    heed("start")
    commits, parts = FOLDER / "commits", FOLDER / "parts"
    step = len(list(commits.glob("[0-9]*")))
    say("begin", step=step, round=ROUND, world=WORLD)
    last = False
    while not last:
        time.sleep(STEP_S)
        _write(parts / f"{step}-{ROUND}-{RANK}", list(range(RANK, SAMPLES, WORLD)))
        mine = commits / f"{step:05d}"
        if RANK == 0:
            seen = [_await(parts / f"{step}-{ROUND}-{rank}") for rank in range(WORLD)]
            heed("commit")
            value = {"round": ROUND, "world": WORLD, "samples": [*chain(*seen)], "last": enough()}
            _commit(mine, value)
        last = _await(mine)["last"]
        step += 1
        say("committed", step=step)
    say("end", step=step)


# ---- elastic -------------------------------------------------------------------------------------


def elastic() -> None:
    """Train with `dure.elastic`; the state counts how often each sample was seen."""
    heed("start")
    import torch  # lazy: the other programs must start without it

    import dure as dist  # lazy: as torch
    from dure.elastic import State, run  # lazy: as torch
    from dure.elastic.membership import RankMembership  # lazy: as torch
    from dure.elastic.snapshot import Snapshot  # lazy: as torch
    from dure.parallel import DistributedDataParallel  # lazy: as torch

    for kind, name in ((RankMembership, "agree"), (Snapshot, "send"), (Snapshot, "receive")):
        setattr(kind, name, heeding(name, getattr(kind, name)))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = State(model=model, optimizer=optimizer, step=0, seen=[], last=False)
    state.ballast = torch.ones(BALLAST)

    def train(state: State) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        say("begin", step=state.step, world=world, new_rank=rank)
        ddp = DistributedDataParallel(state.model)
        while not state.last:
            time.sleep(STEP_S)
            counts = torch.zeros(SAMPLES + 1)
            counts[rank:SAMPLES:world] += 1
            counts[SAMPLES] = float(rank == 0 and enough())
            optimizer.zero_grad()
            ddp(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            dist.all_reduce(counts)
            state.last = bool(counts[SAMPLES])
            state.seen = [*state.seen, [state.step, counts[:SAMPLES].tolist()]]
            state.step += 1
            heed("commit")
            state.commit()
            say("committed", step=state.step)
        say("seen", seen=state.seen)

    heed("join")
    run(train, state)
    say("end", step=state.step)


if __name__ == "__main__":
    (elastic if sys.argv[1] == "elastic" else rounds)()
