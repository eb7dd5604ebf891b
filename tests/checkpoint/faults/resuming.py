"""A small run that uses all that a resume must bring back, and ways to kill it.

Two ranks train in step with dropout, AdamW, a schedule, shuffled and augmented data over several
epochs, and save after every other step. The loss of every step, summed over the ranks, is the
curve; it is saved with the rest, so that a resumed run has all of it.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import nn

import dure
from dure.checkpoint import Checkpointer
from dure.errors import CommError
from tests.comm.forked_ranks import Slot
from tests.waiting import PATIENCE_S

EPOCHS, SAMPLES, BATCH, EVERY = 3, 28, 3, 2
CALLS = 100  # of those a run makes to the disk, about the first half


@dataclass(frozen=True, slots=True)
class Kill:
    """Which ranks end themselves, and when: after some seconds, or at a call to the disk."""

    ranks: tuple[int, ...] = ()
    after_s: float | None = None
    at_call: int = 0

    @staticmethod
    def random(rng: random.Random, sharded: bool, span_s: float | None) -> Kill:
        """Draw a moment: within a call to the disk, that is inside a save; or any, of a span."""
        ranks = rng.choice([(0,), (1,), (0, 1)])
        if span_s is not None and rng.random() < 0.5:
            return Kill(ranks, after_s=rng.uniform(0.0005, span_s))
        ranks = ranks if sharded else (0,)  # where rank 0 writes alone, the other has no such call
        return Kill(ranks, at_call=rng.randint(1, CALLS))


@contextmanager
def dying(kill: Kill, rank: int):
    """Arm this process; a timer that has not gone off is disarmed at the end."""
    if rank not in kill.ranks:
        yield
        return
    if kill.after_s is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is
        signal.setitimer(signal.ITIMER_REAL, kill.after_s)
    left = [kill.at_call]

    def counting(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                if real is os_write:  # half of it is written
                    os_write(args[0], args[1][: len(args[1]) // 2])  # type: ignore[index, arg-type]
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    os_write, os_fsync, rename, mkdir = os.write, os.fsync, Path.rename, Path.mkdir

    try:
        if kill.at_call:
            os.write, os.fsync = counting(os_write), counting(os_fsync)  # type: ignore[assignment]
            Path.rename, Path.mkdir = counting(rename), counting(mkdir)  # type: ignore[assignment]
        yield
    finally:
        os.write, os.fsync = os_write, os_fsync
        Path.rename, Path.mkdir = rename, mkdir  # type: ignore[method-assign]
        signal.setitimer(signal.ITIMER_REAL, 0)


class Noisy:
    """Numbers with noise of all three generators: augmentation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((4,), index / SAMPLES) + 0.1 * torch.randn(4)
        return x + 0.1 * random.random() + 0.1 * float(np.random.rand())


def train(folder: str, sharded: bool) -> list[float]:
    """Train to the end, from the newest checkpoint in `folder`; return the curve."""
    torch.manual_seed(7 + dure.get_rank())
    random.seed(7)
    np.random.seed(7)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = dure.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = dure.DataLoader(Noisy(), BATCH, shuffle=True, seed=3)
    curve: list[float] = []
    run = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "curve": curve,
    }
    checkpoints = Checkpointer(folder, keep=2, sharded=sharded)
    checkpoints.load(**run)
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total = loss.detach().clone()
            dure.all_reduce(total)
            curve.append(total.item())
            if len(curve) % EVERY == 0:
                checkpoints.save(len(curve), **run)
    return curve


def stint(slot: Slot, folder: str, sharded: bool, kill: Kill) -> list[float] | str:
    """Be one rank until the end of the run, or until a peer is lost."""
    dure.init_process_group(
        "shm", slot.url, timedelta(seconds=PATIENCE_S), world_size=slot.size, rank=slot.rank
    )
    try:
        dure.barrier()
        with dying(kill, slot.rank):
            return train(folder, sharded)
    except CommError as e:
        return type(e).__name__
    finally:
        dure.destroy_process_group()
