"""An elastic job that a test starts with `dure run`, and whose processes it kills at chosen points.

    ELASTIC_FAULTS='[{"rank": 2, "at": "step 7", "do": "KILL"}]' dure run --nproc 4 --elastic ...

A fault happens once, in the process that was started first under that rank, at one of

    enter      before it says in the store that it has come
    step N     before the gradients of the step after step N are averaged
    staged N   when commit N is staged on this rank, and not yet agreed on
    agree N    before it agrees on view N with the others
    form N     when it has agreed on view N, and the group is not made yet

and "do" is a signal to itself, or "WAKE" (SIGCONT to all).

With ELASTIC_WAIT the ranks wait after half of the steps, committing, until they are so many again.
"""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import dure
from dure.data import DataLoader
from dure.elastic import Options, State
from dure.elastic.membership import Membership
from dure.elastic.snapshot import Snapshot
from dure.elastic.views import View

SAMPLES, GLOBAL_BATCH, EPOCHS = 120, 12, 2
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH


class Numbers:
    """Samples that say who they are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        return i, self.x[i]


def make_state() -> State:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.5, 0.5, p.numel(), dtype=p.dtype).view_as(p))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = torch.zeros(EPOCHS, SAMPLES)
    return State(model=model, optimizer=optimizer, epoch=0, steps=0, seen=seen)


def train(state: State) -> list[float]:
    """Train in batches that are the same, all ranks together, for any number of ranks."""
    model = dure.DistributedDataParallel(state.model) if dure.get_world_size() > 1 else state.model
    pids: list[Any] = [None] * dure.get_world_size()
    dure.all_gather_object(pids, os.getpid())
    _PIDS.update(pids)
    wait_for_others(state)
    state.loader = DataLoader(Numbers(), GLOBAL_BATCH // dure.get_world_size(), shuffle=True)
    while state.epoch < EPOCHS:
        state.loader.set_epoch(state.epoch)
        for index, x in state.loader:
            state.optimizer.zero_grad()
            loss = model(x).square().mean()
            fault("step", state.steps)
            loss.backward()
            state.optimizer.step()
            seen = torch.zeros(SAMPLES)
            seen[index] = 1
            dure.all_reduce(seen)
            state.seen[state.epoch] += seen
            state.steps += 1
            state.commit()
            wait_for_others(state)
        state.epoch += 1
    return weights(state)


def wait_for_others(state: State) -> None:
    while state.steps == STEPS // 2 and dure.get_world_size() < _WAIT:
        time.sleep(0.01)  # leaves the cores to those that start
        state.commit()


def weights(state: State) -> list[float]:
    return torch.cat([p.detach().flatten() for p in state.model.parameters()]).tolist()


# ---- faults ------------------------------------------------------------------------------------

_FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("ELASTIC_FAULTS", "[]"))
_WAIT = int(os.environ.get("ELASTIC_WAIT", "0"))
_PIDS: set[int] = set()
_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def fault(point: str, number: int | None = None) -> None:
    """Let happen what is to happen at this point."""
    at = point if number is None else f"{point} {number}"
    for one in list(_FAULTS):
        if one["rank"] == int(os.environ.get("RANK", "-1")) and one["at"] == at and _FIRST:
            _FAULTS.remove(one)
            if one["do"] == "WAKE":
                for pid in _PIDS:
                    os.kill(pid, signal.SIGCONT)
            else:
                os.kill(os.getpid(), getattr(signal, f"SIG{one['do']}"))


def plant() -> None:
    """Put the points of faults into the code that is tested."""
    enter, announce, keys_of = Membership.enter, Membership.announce, Membership.keys_of
    take = Snapshot.take

    def faulty_enter(self: Membership) -> View:
        fault("enter")
        return enter(self)

    def faulty_announce(self: Membership, last: View, progress: Any) -> None:
        fault("agree", last.number + 1)
        announce(self, last, progress)

    def faulty_keys_of(self: Membership, view: View) -> Any:
        fault("form", view.number)
        return keys_of(self, view)

    def faulty_take(self: Snapshot, parts: Any, values: Any, step: int) -> None:
        take(self, parts, values, step)
        fault("staged", step)

    Membership.enter, Membership.announce = faulty_enter, faulty_announce
    Membership.keys_of = faulty_keys_of
    Snapshot.take = faulty_take


def main() -> None:
    """Train, and tell how it went, as one line of JSON."""
    plant()
    state = make_state()
    limit = timedelta(seconds=float(os.environ.get("ELASTIC_TIMEOUT_S", "60")))
    options = Options(enough_s=20, timeout=limit)
    started = os.getpid()
    result = dure.elastic.run(train, state, options)
    told = {
        "rank": int(os.environ["RANK"]),
        "same_process": started == os.getpid(),
        "weights": result,
        "once": bool((state.seen == 1).all()),
        "steps": state.steps,
        "commits": state.commits,
        "recoveries": [[r.lost, r.joined, r.step] for r in state.recoveries],
        "slowest_s": max([r.total_s for r in state.recoveries], default=0.0),
    }
    print(f"RESULT {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
