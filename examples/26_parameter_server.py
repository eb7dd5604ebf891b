"""A parameter server by remote calls: trainers pull weights and push gradients, in two ways.

Worker 0 holds the model; the others hold the data. *Hogwild*: each gradient is applied as it comes,
so a trainer works with weights that others change meanwhile. *Synchronous*: the server waits for
the gradients of all trainers, steps once with their mean, and then answers all of them; no thread
waits there, for `push` returns a future.

How can one know that it is right? The synchronous server makes the steps that one process makes
with the whole batch; Hogwild, whose steps differ from run to run, comes to the same weights.

    dure run --nproc 3 examples/26_parameter_server.py          (at least 2)
"""

import os
import threading

import torch
from torch import nn

from dure import rpc

STEPS, ROWS, FEATURES = 40, 32, 8


class Server:
    """The model, and what has been pushed."""

    def __init__(self, trainers: int) -> None:
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.pushed = 0
        self.answer: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def weights(self) -> list[torch.Tensor]:
        """Return a copy of the weights."""
        return [p.detach().clone() for p in self.model.parameters()]

    def push_now(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Hogwild: change the weights at once, whoever else does so; return them."""
        with torch.no_grad():
            for p, gradient in zip(self.model.parameters(), gradients, strict=True):
                p.sub_(gradient, alpha=0.1 / self.trainers)
        return self.weights()

    @rpc.functions.async_execution
    def push(self, gradients: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        """Synchronous: add to the gradients; all are answered when the last one has pushed."""
        with self.lock:
            for p, gradient in zip(self.model.parameters(), gradients, strict=True):
                share = gradient / self.trainers
                p.grad = share if p.grad is None else p.grad + share
            self.pushed += 1
            answer = self.answer
            if self.pushed == self.trainers:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.pushed, self.answer = 0, torch.futures.Future()
                answer.set_result(self.weights())
        return answer


def model() -> nn.Module:
    """Return the model, the same everywhere."""
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 1).double()


def data(trainer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of a trainer: points [n, features], and a linear function of them [n, 1]."""
    generator = torch.Generator().manual_seed(trainer)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return x, x @ torch.linspace(-1, 1, FEATURES, dtype=torch.float64)[:, None] + 0.5


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error."""
    return (net(x) - y).square().mean()


def train(server: rpc.RRef, trainer: int, how: str) -> None:
    """Be a trainer: work out gradients with the server's weights, push them, go on with its."""
    net = model()
    x, y = data(trainer)
    weights = server.rpc_sync().weights()
    for _ in range(STEPS):
        with torch.no_grad():
            for p, weight in zip(net.parameters(), weights, strict=True):
                p.copy_(weight)
        gradients = torch.autograd.grad(loss_of(net, x, y), list(net.parameters()))
        weights = getattr(server.rpc_sync(), how)(list(gradients))


def train_alone(trainers: int) -> list[torch.Tensor]:
    """Make the synchronous steps in one process; return the weights."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = (torch.cat(parts) for parts in zip(*map(data, range(1, trainers + 1)), strict=True))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        expected = train_alone(size - 1)
        for how in ("push", "push_now"):
            server = Server(size - 1)
            mine = rpc.RRef(server)
            trainers = range(1, size)
            work = [rpc.rpc_async(f"worker{i}", train, args=(mine, i, how)) for i in trainers]
            torch.futures.wait_all(work)
            pairs = zip(server.weights(), expected, strict=True)
            off = max((a - b).abs().max().item() for a, b in pairs)
            assert off < (1e-12 if how == "push" else 0.1), off
            print(f"{how}: {size - 1} trainers, {STEPS} steps each, {off:.1e} off one process")
    rpc.shutdown()


if __name__ == "__main__":
    main()
