"""An elastic job that a test starts with `dure run`, and whose processes it kills at chosen points.

    ELASTIC_FAULTS='[{"rank": 2, "at": "step 7", "do": "KILL"}]' dure run --nproc 4 --elastic ...

A fault happens once, in the process that was started first under that rank, at one of

    step N     before the gradients of the step after step N are averaged
    staged N   when commit N is staged on this rank, and not yet agreed on
    agree N    before it agrees on view N with the others
    form N     when it has agreed on view N, and the group is not made yet

and "do" is a signal to itself.

With ELASTIC_WAIT the ranks wait after half of the steps, committing, until they are so many again.
Tests of thread-ranks train with the same functions.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import dure
from dure.data import DataLoader
from dure.elastic import Options, State
from dure.elastic.membership import RankMembership
from dure.elastic.snapshot import Snapshot

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


def train(state: State, at_step: Callable[[int], object] | None = None) -> list[float]:
    """Train in batches that are the same, all ranks together, for any number of ranks."""
    model = dure.DistributedDataParallel(state.model) if dure.get_world_size() > 1 else state.model
    wait_for_others(state)
    state.loader = DataLoader(Numbers(), GLOBAL_BATCH // dure.get_world_size(), shuffle=True)
    while state.epoch < EPOCHS:
        state.loader.set_epoch(state.epoch)
        for index, x in state.loader:
            state.optimizer.zero_grad()
            loss = model(x).square().mean()
            if at_step is not None:
                at_step(state.steps)
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
    return torch.cat([p.detach().flatten() for p in state.model.parameters()]).tolist()


def wait_for_others(state: State) -> None:
    while state.steps == STEPS // 2 and dure.get_world_size() < _WAIT:
        time.sleep(0.01)  # leaves the cores to those that start
        state.commit()


# ---- faults ------------------------------------------------------------------------------------

_FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("ELASTIC_FAULTS", "[]"))
_WAIT = int(os.environ.get("ELASTIC_WAIT", "0"))
_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def fault(point: str, number: int) -> None:
    """Let happen what is to happen at this point."""
    for one in list(_FAULTS):
        if _FIRST and one["rank"] == int(os.environ["RANK"]) and one["at"] == f"{point} {number}":
            _FAULTS.remove(one)
            os.kill(os.getpid(), getattr(signal, f"SIG{one['do']}"))


def plant(kind: Any, method: str, point: str, number_of: Callable[..., int]) -> None:
    """Put a point of faults before a method of the code that is tested, or after a snapshot's."""
    real = getattr(kind, method)

    def faulty(self: Any, *args: Any) -> Any:
        if kind is not Snapshot:
            fault(point, number_of(*args))
        result = real(self, *args)
        if kind is Snapshot:
            fault(point, number_of(*args))
        return result

    setattr(kind, method, faulty)


def main() -> None:
    """Train, and tell how it went, as one line of JSON."""
    plant(RankMembership, "announce", "agree", lambda last, progress: last.number + 1)
    plant(RankMembership, "keys_of", "form", lambda view: view.number)
    plant(Snapshot, "take", "staged", lambda parts, values, step: step)
    state = make_state()
    options = Options(enough_s=20, timeout=timedelta(seconds=60))
    started = os.getpid()
    result = dure.elastic.run(train, state, options)
    told = {
        "rank": int(os.environ["RANK"]),
        "same_process": started == os.getpid(),
        "weights": result,
        "once": bool((state.seen == 1).all()),
        "steps": state.steps,
        "recoveries": [[r.lost, r.joined] for r in state.recoveries],
    }
    print(f"RESULT {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
