"""What ranks do in a drill: work in steps, write down what they did, and die where they are told.

    programs.py WHAT FOLDER

Every process appends lines of JSON to a file of its own in FOLDER/said: what, when (on the clock
that all processes of a machine share), and who. An *order* is a file in FOLDER/orders, named after
a point of the program; the first process to come to that point takes it away and dies of SIGKILL
after as many seconds as it says. The job ends well once there is a file FOLDER/enough.
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
"""Numbers that the state has besides, so that it takes a while to send."""

LIMIT_S = 60.0

_said = (FOLDER / "said" / f"{os.getpid()}-{time.monotonic_ns()}").open("a", buffering=1)


def say(word: str, **facts: object) -> None:
    """Write down that this process has come to `word`."""
    entry = {"word": word, "at": time.monotonic(), "pid": os.getpid(), "rank": RANK, **facts}
    _said.write(json.dumps(entry) + "\n")


def heed(point: str) -> None:
    """Die, if there is an order for this point that nobody else has taken."""
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
    """Return a method that begins by heeding an order."""

    def heeds(*arguments: Any) -> Any:
        heed(point)
        return method(*arguments)

    return heeds


def enough() -> bool:
    """Tell whether the job may end."""
    return (FOLDER / "enough").exists()


# ---- rounds: checkpoints in files ----------------------------------------------------------------


def _write(path: Path, value: object) -> None:
    """Let a file appear whole."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(value))
    draft.rename(path)


def _await(path: Path) -> Any:
    """Return what is in a file, once it is there."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path.name)
        time.sleep(0.002)
    return json.loads(path.read_text())


def _commit(path: Path, value: object) -> None:
    """Let a commit appear whole, if nobody has committed that step."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(value))
    try:
        os.link(draft, path)
    except FileExistsError:
        say("late", commit=path.name)
    finally:
        draft.unlink()


def rounds() -> None:
    """Work in steps that rank 0 commits as files, when it has the parts of all ranks."""
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
    """Train with `dure.elastic`; the state tells which samples were seen how often."""
    heed("start")
    import torch  # lazy: the other programs must start without it

    import dure as dist  # lazy: as torch
    from dure.elastic import State, run  # lazy: as torch
    from dure.elastic.membership import Membership  # lazy: as torch
    from dure.elastic.snapshot import Snapshot  # lazy: as torch
    from dure.parallel import DistributedDataParallel  # lazy: as torch

    for kind, name in ((Membership, "agree"), (Snapshot, "send"), (Snapshot, "receive")):
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
