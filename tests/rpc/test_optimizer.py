"""DistributedOptimizer does what one optimizer of one process does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from dure import autograd
from dure.errors import PeerLost, RpcError, UsageError
from dure.optim import DistributedOptimizer
from dure.rpc import api
from dure.rpc.rref import RRef
from tests.rpc.gates import Cluster


def weight(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(3, 3, generator=random).requires_grad_()


def forward(rref: RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (rref.local_value() @ x).tanh()


def dot_grad(rref: RRef[torch.Tensor]) -> Any:
    return rref.local_value().grad


def foreach(rref: RRef[Any]) -> bool:
    return rref.local_value().optimizer.defaults["foreach"]


def train(rrefs: list[RRef[torch.Tensor]], optimizer: DistributedOptimizer, turns: int = 3) -> None:
    for turn in range(turns):
        with autograd.context() as context_id:
            x = torch.eye(3) * (turn + 1)
            for rref in rrefs:
                x = api.rpc_sync(rref.owner(), forward, (rref, x))
            autograd.backward(context_id, [x.sum()])
            optimizer.step(context_id)


class FailsInStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        raise ValueError("Error running optimizer.")


class FailsWhenMade(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        raise ValueError("Error creating optimizer.")


class Overlaps(torch.optim.SGD):
    """Notes how many steps run at once."""

    running, most, lock = 0, 0, threading.Lock()
    beside: ClassVar[list[int]] = []  # how many did when a leaf had its gradient

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        with Overlaps.lock:
            Overlaps.running += 1
            Overlaps.most = max(Overlaps.most, Overlaps.running)
        super().step()
        threading.Event().wait(0.005)  # others would begin theirs
        with Overlaps.lock:
            Overlaps.running -= 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.05}),
        (torch.optim.Adagrad, {"lr": 0.05}),
        (torch.optim.RMSprop, {"lr": 0.05}),
        (torch.optim.Rprop, {"lr": 0.05}),
    ],
)
def test_three_steps_are_those_of_one_process(
    cluster: Cluster, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    twins = [weight(seed) for seed in (1, 2, 3)]
    local: Any = kind
    one = local(twins, **options)
    for turn in range(3):
        x = torch.eye(3) * (turn + 1)
        for twin in twins:
            x = (twin @ x).tanh()
        one.zero_grad()
        x.sum().backward()
        one.step()
    with cluster.on(0):
        rrefs = [
            api.remote(f"worker{to}", weight, (seed,)) for seed, to in ((1, 1), (2, 2), (3, 1))
        ]
        optimizer = DistributedOptimizer(kind, rrefs, **options)
        assert len(optimizer.remote_optimizers) == 2
        train(rrefs, optimizer)
        for rref, twin in zip(rrefs, twins, strict=True):
            torch.testing.assert_close(rref.to_here(), twin)
            assert api.rpc_sync(rref.owner(), dot_grad, (rref,)) is None


def test_own_parameters_and_owners_that_had_no_part(cluster: Cluster) -> None:
    mine = weight(1)
    with cluster.on(0):
        rrefs = [RRef(mine), api.remote("worker2", weight, (2,))]
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [mine.sum()])
            optimizer.step(context_id)
        assert torch.equal(mine, weight(1) - 1.0)
        assert torch.equal(rrefs[1].to_here(), weight(2))
        assert mine.grad is None


def test_foreach_kernels_are_used_unless_the_program_says_otherwise(cluster: Cluster) -> None:
    with cluster.on(0):
        rrefs = [api.remote("worker1", weight, (1,))]
        (on,) = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0).remote_optimizers
        (off,) = DistributedOptimizer(
            torch.optim.SGD, rrefs, lr=1.0, foreach=False
        ).remote_optimizers
        assert api.rpc_sync("worker1", foreach, (on,)) is True
        assert api.rpc_sync("worker1", foreach, (off,)) is False


def watched_weight(seed: int) -> torch.Tensor:
    made = weight(seed)
    made.register_hook(lambda _: Overlaps.beside.append(Overlaps.running))
    return made


def test_steps_of_several_programs_take_turns_also_with_their_gradients(cluster: Cluster) -> None:
    Overlaps.most, Overlaps.beside = 0, []
    with cluster.on(0):
        shared = api.remote("worker1", watched_weight, (1,))

    def run(_: int) -> None:
        with cluster.on(0):
            train([shared], DistributedOptimizer(Overlaps, [shared], lr=0.1), 2)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert Overlaps.most == 1
    assert Overlaps.beside == [0] * 8


def test_errors_of_owners_are_raised(cluster: Cluster) -> None:
    with cluster.on(0):
        rrefs = [api.remote(f"worker{to}", weight, (to,)) for to in (1, 2)]
        with pytest.raises(ValueError, match=r"Error creating optimizer\."):
            DistributedOptimizer(FailsWhenMade, rrefs)
        optimizer = DistributedOptimizer(FailsInStep, rrefs)
        with pytest.raises(ValueError, match=r"Error running optimizer\."):
            train(rrefs, optimizer, 1)
        good = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
        with pytest.raises(RpcError, match="Could not find autograd context with id: 77"):
            good.step(77)
        nothing: Any = [weight(1)]
        with pytest.raises(UsageError, match="must contain references"):
            DistributedOptimizer(torch.optim.SGD, nothing, lr=0.1)
        with autograd.context() as context_id:
            cluster.network.kill(2)
            with pytest.raises(PeerLost):
                good.step(context_id)
