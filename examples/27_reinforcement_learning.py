"""Reinforcement learning with remote calls: observers walk, one agent decides and learns.

Every observer has an environment of its own, a corridor of nine cells with a reward at its right
end. For each step it asks the agent what to do, through a remote reference to it that came with
the call. The agent keeps the probability of each choice, and after each round of episodes it
improves its policy (REINFORCE).

What is learned is checked at the end: at first a walk is random, then it goes straight to the goal.

    dure run --nproc 3 examples/27_reinforcement_learning.py          (at least 2)
"""

import os
import threading

import torch
from torch import nn

from dure import rpc

CELLS, LONGEST, ROUNDS, DISCOUNT = 9, 24, 40, 0.9


class Corridor:
    """Cells in a row: one starts in the middle, and the reward is at the right end."""

    def reset(self) -> int:
        """Begin anew; return the cell."""
        self.cell = CELLS // 2
        return self.cell

    def step(self, action: int) -> tuple[int, float, bool]:
        """Go left (0) or right (1); return the cell, the reward, and whether it is over."""
        self.cell = max(0, self.cell + (1 if action else -1))
        over = self.cell == CELLS - 1
        return self.cell, float(over), over


class Observer:
    """Walks, and does what the agent says."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.corridor = Corridor()

    def episode(self, agent: rpc.RRef) -> int:
        """Walk to the goal, or until it takes too long; return how many steps were made."""
        cell = self.corridor.reset()
        for step in range(1, LONGEST + 1):
            action = agent.rpc_sync().decide(self.number, cell)
            cell, reward, over = self.corridor.step(action)
            agent.rpc_sync().reward(self.number, reward)
            if over:
                return step
        return LONGEST


class Agent:
    """The policy, and what has happened in the episodes of this round.

    Calls of several observers may run at the same time, each in a thread: hence the lock.
    """

    def __init__(self, observers: int) -> None:
        torch.manual_seed(0)
        self.policy = nn.Embedding(CELLS, 2)
        nn.init.zeros_(self.policy.weight)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.2)
        self.lock = threading.Lock()
        self.chosen: list[list[torch.Tensor]] = [[] for _ in range(observers)]
        self.rewards: list[list[float]] = [[] for _ in range(observers)]
        self.observers = [
            rpc.remote(f"worker{i + 1}", Observer, args=(i,)) for i in range(observers)
        ]

    def decide(self, observer: int, cell: int) -> int:
        """Choose what an observer in this cell does."""
        with self.lock:
            choice = torch.distributions.Categorical(logits=self.policy(torch.tensor(cell)))
            action = choice.sample()
            self.chosen[observer].append(choice.log_prob(action))
        return int(action)

    def reward(self, observer: int, reward: float) -> None:
        """Note what an observer got for its last step."""
        self.rewards[observer].append(reward)

    def improve(self) -> None:
        """Make choices that led to a reward more likely, and forget the episodes."""
        loss = torch.tensor(0.0)
        for chosen, rewards in zip(self.chosen, self.rewards, strict=True):
            after = 0.0
            for log_prob, reward in zip(reversed(chosen), reversed(rewards), strict=True):
                after = reward + DISCOUNT * after
                loss = loss - log_prob * after
            chosen.clear()
            rewards.clear()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def round(self) -> float:
        """Let all observers walk at the same time, then learn; return the mean number of steps."""
        me = rpc.RRef(self)
        walks = [observer.rpc_async().episode(me) for observer in self.observers]
        steps = [walk.wait() for walk in walks]
        self.improve()
        return sum(steps) / len(steps)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        agent = Agent(size - 1)
        steps = [agent.round() for _ in range(ROUNDS)]
        shortest = CELLS - 1 - CELLS // 2
        print("steps to the goal:", " ".join(f"{s:.1f}" for s in steps))
        assert sum(steps[-10:]) / 10 < 1.5 * shortest, "the agent has not learned the way"
    rpc.shutdown()


if __name__ == "__main__":
    main()
