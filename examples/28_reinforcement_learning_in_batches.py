"""The program of example 27, but the agent decides for all observers at once.

A call to `decide` returns a future (`rpc.functions.async_execution`): the agent answers when the
cells of all observers are there, after one pass of its policy over all of them. No thread of the
agent waits meanwhile. Observers walk in step, so all episodes have the same length.

What is learned is checked at the end, and that there was one pass a step, however many observers.

    dure run --nproc 3 examples/28_reinforcement_learning_in_batches.py          (at least 2)
"""

import os
import threading

import torch
from torch import nn

from dure import rpc

CELLS, STEPS, ROUNDS, DISCOUNT = 7, 12, 30, 0.8


class Observer:
    """Walks in a row of cells; each step into the last cell, or staying there, is rewarded."""

    def __init__(self, number: int) -> None:
        self.number = number

    def episode(self, agent: rpc.RRef) -> list[float]:
        """Walk so many steps; return the reward of each."""
        cell, rewards = CELLS // 2, []
        for _ in range(STEPS):
            action = agent.rpc_sync().decide(self.number, cell)
            cell = min(CELLS - 1, max(0, cell + (1 if action else -1)))
            rewards.append(float(cell == CELLS - 1))
        return rewards


class Agent:
    """The policy; and the observers that wait for its decision."""

    def __init__(self, observers: int) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Embedding(CELLS, 16), nn.Tanh(), nn.Linear(16, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.lock = threading.Lock()
        self.cells = torch.zeros(observers, dtype=torch.int64)
        self.waiting = 0
        self.answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.chosen: list[torch.Tensor] = []
        self.passes = 0
        self.observers = [
            rpc.remote(f"worker{i + 1}", Observer, args=(i,)) for i in range(observers)
        ]

    @rpc.functions.async_execution
    def decide(self, observer: int, cell: int) -> torch.futures.Future[int]:
        """Choose what an observer in this cell does, when all others have asked, too."""
        with self.lock:
            mine = self.answer.then(lambda done: int(done.value()[observer]))
            self.cells[observer] = cell
            self.waiting += 1
            if self.waiting == len(self.observers):
                logits = self.policy(self.cells.clone())  # backward needs them as they are now
                choice = torch.distributions.Categorical(logits=logits)
                actions = choice.sample()
                self.chosen.append(choice.log_prob(actions))
                self.passes += 1
                answer, self.answer, self.waiting = self.answer, torch.futures.Future(), 0
                answer.set_result(actions)
        return mine

    def round(self) -> float:
        """Let all observers walk, then learn; return the mean reward of an episode."""
        me = rpc.RRef(self)
        walks = [observer.rpc_async().episode(me) for observer in self.observers]
        rewards = torch.tensor([walk.wait() for walk in walks]).T  # [steps, observers]
        returns, after = torch.zeros_like(rewards), torch.zeros(len(self.observers))
        for step in reversed(range(STEPS)):
            after = returns[step] = rewards[step] + DISCOUNT * after
        advantage = returns - returns.mean()
        loss = -(torch.stack(self.chosen) * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.chosen.clear()
        return rewards.sum(0).mean().item()


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        agent = Agent(size - 1)
        rewards = [agent.round() for _ in range(ROUNDS)]
        print("rewards:", " ".join(f"{reward:.1f}" for reward in rewards))
        assert agent.passes == ROUNDS * STEPS
        best = STEPS - (CELLS - 1 - CELLS // 2) + 1
        assert sum(rewards[-5:]) / 5 > 0.8 * best, "the agent has not learned the way"
    rpc.shutdown()


if __name__ == "__main__":
    main()
