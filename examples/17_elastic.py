"""A job that outlives the death of one of its ranks, and the proof that nothing was lost.

    dure run --nproc 4 --elastic examples/17_elastic.py

After a third of the training the last rank is killed, as the kernel does when memory runs out. The
others learn it from their next collective, make a group without it, go back to the last committed
step (one step at most is done again), and train on: in the same processes, within a fraction of a
second. In the end each of them checks that

* every sample of each epoch was trained on exactly once,
* the model is the one that a single rank trains, whom nobody disturbs.

The second point holds because the batch of a step is the same 24 samples however many ranks share
them: 6 each with four ranks, 8 each with three. 24 can be divided by 1, 2, 3 and 4.

With `--max-restarts` a new rank takes the dead one's place. If it comes after the end, `run`
returns None to it: it has no trained model, and must not save one.
"""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

import dure as dist
from dure.data import DataLoader
from dure.elastic import State

SAMPLES, GLOBAL_BATCH, EPOCHS = 240, 24, 3
KILL_AT = 10


class Points:
    """Points and the values of an unknown function there; a sample tells its own number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(SAMPLES, 3, generator=generator, dtype=torch.float64)
        self.y = torch.sin(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return sample `i`."""
        return i, self.x[i], self.y[i]


def make_state() -> State:
    """Make everything that must not be lost. Each rank makes the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return State(model=model, optimizer=optimizer, epoch=0, seen=torch.zeros(EPOCHS, SAMPLES))


def train(state: State) -> int:
    """Train from where the state says; called again whenever the group has changed."""
    n = dist.get_world_size()
    model = dist.DistributedDataParallel(state.model)
    state.loader = DataLoader(Points(), GLOBAL_BATCH // n, shuffle=True)  # goes on where it was
    while state.epoch < EPOCHS:
        state.loader.set_epoch(state.epoch)
        for index, x, y in state.loader:
            state.optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            if state.commits == KILL_AT and n > 1 and is_victim():
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            state.optimizer.step()
            state.seen[state.epoch] += seen_by_all(index)
            state.commit()
        state.epoch += 1
    return n


def is_victim() -> bool:
    """Tell whether this is the rank that will die: none where the launcher would end the others."""
    last = str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    return "DURE_ELASTIC" in os.environ and os.environ["RANK"] == last


def seen_by_all(index: torch.Tensor) -> torch.Tensor:
    """Return how often each sample is in this step, on all ranks together."""
    seen = torch.zeros(SAMPLES)
    seen[index] = 1
    dist.all_reduce(seen)
    return seen


def train_alone() -> State:
    """Train the same model without any group."""
    state, points = make_state(), Points()
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH):
            state.optimizer.zero_grad()
            (state.model(points.x[batch]) - points.y[batch]).square().mean().backward()
            state.optimizer.step()
    return state


def main() -> None:
    """Train with a death on the way; check the result."""
    state, me, before = make_state(), os.getpid(), int(os.environ.get("WORLD_SIZE", "1"))
    left = dist.elastic.run(train, state)
    assert me == os.getpid()
    if left is None:  # `--max-restarts` has put a rank in the dead one's place
        print("this rank came too late: the others had trained to the end")
        return
    victims = int(before > 1 and "DURE_ELASTIC" in os.environ)
    assert before - victims <= left <= before, "one rank was to die, and no other"
    assert (state.seen == 1).all(), "a sample was lost, or seen twice"
    assert state.commits == EPOCHS * SAMPLES // GLOBAL_BATCH
    for ours, alone in zip(state.model.parameters(), train_alone().model.parameters(), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-9, atol=1e-12)
    for change in state.recoveries:
        print(
            f"lost {change.lost} of {before} ranks after step {change.step}: going on took "
            f"{1000 * change.total_s:.0f} ms (agreement {1000 * change.agreement_s:.0f}, "
            f"group {1000 * change.group_s:.0f}, state {1000 * change.state_s:.0f})"
        )
    print(f"{left} of {before} ranks trained to the end, every sample once")


if __name__ == "__main__":
    main()
