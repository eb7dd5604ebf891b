"""Backward passes over several processes, message by message, in every order, with deaths.

The processes are in this one; messages between two of them keep their order, and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from dure.errors import PeerLost, RpcError
from dure.rpc.autograd.backward import Contexts, inside
from dure.rpc.codec import Codec, insert
from dure.rpc.message import PassTag
from dure.rpc.names import WorkerInfo
from dure.rpc.tensors import rebuild


class Ticket(threading.Event):
    @property
    def done(self) -> bool:
        return self.is_set()


class Port:
    """What one process sends with."""

    def __init__(self, network: Network, me: int) -> None:
        self.network, self.me, self.transport = network, me, self
        self.allow = None

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def queue(self, to: int, topic: int, body: bytes, hurry: bool = True) -> None:
        with suppress(PeerLost):
            self.send(to, lambda: self.network.at[to].receive(self.me, body))

    def send_gradients(self, to: int, tag: PassTag, gradients: tuple[Any, ...]) -> None:
        copies = Codec().pack(gradients)
        memories = [memory.clone() for memory in copies.memories]

        def read() -> Any:
            body = copies.body
            tensors = rebuild(body.tensors, body.inline, memories)
            return insert(Codec().load(body, tensors), body, tensors, ())

        def arrive() -> None:
            run = partial(self.network.at[to].arrive, tag, self.me, read)
            if not self.network.at[to].waits(tag.backward, run):
                self.network.works.append((to, run))

        self.send(to, arrive)

    def send(self, to: int, arrive: Callable[[], None]) -> None:
        if to in self.network.dead:
            raise PeerLost(f"worker {to} is gone", peer=to)
        self.network.sent += 1
        self.network.under_way.setdefault((self.me, to), deque()).append(arrive)

    def ticket(self) -> Ticket:
        return Ticket()

    def complete(self, ticket: Any) -> None:
        ticket.set()

    def wait(self, ticket: Any, seconds: float = 60.0) -> bool:
        while not ticket.done:
            assert self.network.pump(), "nothing is under way, and somebody waits"
        return True


class Network:
    def __init__(self, number: int, seed: int = 0) -> None:
        self.random, self.dead, self.sent = Random(seed), set[int](), 0
        self.under_way: dict[tuple[int, int], deque[Callable[[], None]]] = {}
        self.works: list[tuple[int, Callable[[], None]]] = []
        self.hooks = [0, 0]  # called in the program, and in its twin of one process
        ports: list[Any] = [Port(self, me) for me in range(number)]
        self.at = [Contexts(WorkerInfo(f"w{me}", me), port) for me, port in enumerate(ports)]

    def pump(self) -> bool:
        """Let one thing happen; tell whether there was one."""
        ways = [way for way, bodies in self.under_way.items() if bodies and way[1] not in self.dead]
        works = [n for n, (me, _) in enumerate(self.works) if me not in self.dead]
        if not ways and not works:
            return False
        choice = self.random.randrange(len(ways) + len(works))
        if choice < len(ways):
            self.under_way[ways[choice]].popleft()()
        else:
            self.works.pop(works[choice - len(ways)])[1]()
        return True

    def settle(self) -> None:
        while self.pump():
            pass

    def die(self, me: int) -> None:
        """What it has sent arrives; then the others hear of it."""
        self.dead.add(me)
        for to, contexts in enumerate(self.at):
            if to not in self.dead:
                for arrive in self.under_way.pop((me, to), ()):
                    arrive()
                contexts.lost(me, PeerLost(f"worker {me} is gone", peer=me))

    def context(self) -> int:
        """Make a context at process 0 that all know."""
        number = self.at[0].new().number
        for to in range(1, len(self.at)):
            self.carry(number, torch.ones(1), 0, to)
        return number

    def carry(
        self, context: int, tensor: torch.Tensor, by: int, to: int, what: str = "a call"
    ) -> torch.Tensor:
        with inside(context):
            tag = self.at[by].sending(to, what, [tensor])
        assert tag is not None
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        (placed,) = self.at[to].receiving(by, tag, [copy])
        return placed


def test_there_and_back_again() -> None:
    network = Network(2)
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    w = torch.tensor([5.0, 7.0], requires_grad=True)  # lies at process 1
    number = network.context()
    back = network.carry(number, network.carry(number, x, 0, 1) * w, 1, 0)
    network.at[0].backward(number, [(back * x).sum()], False)
    assert network.at[0].find(number).gradients[x].tolist() == [2 * 2 * 5, 2 * 3 * 7]
    assert network.at[1].find(number).gradients[w].tolist() == [4.0, 9.0]
    assert network.sent == 2  # gradients there and back
    assert [contexts.counts for contexts in network.at] == [(1, 0), (1, 0)]
    assert (x.grad, w.grad) == (None, None)


def program(network: Network, random: Random) -> tuple[int, torch.Tensor, list[Any], torch.Tensor]:
    """Compute something over all processes, and the same in one; return context, loss and leaves.

    Everything that is sent has a part in the loss, which is at process 0.
    """

    def hook(n: int, gradient: torch.Tensor) -> torch.Tensor:
        network.hooks[n] += 1
        return gradient * gradient  # not linear: parts of it would show

    count = len(network.at)
    number = network.context()
    leaves: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    pool: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for me in range(count):
        leaf = torch.rand(3, dtype=torch.float64, requires_grad=True)
        twin = leaf.detach().clone().requires_grad_()
        leaf.register_hook(partial(hook, 0))
        twin.register_hook(partial(hook, 1))
        leaves.append((me, leaf, twin))
        pool.append([(leaf, twin)])
    for _ in range(random.randint(2, 10)):
        at = random.randrange(count)
        (a, a1), (b, b1) = random.choices(pool[at], k=2)
        to = random.choice([n for n in range(count) if n != at])
        product, product1 = (a * b).sin(), (a1 * b1).sin()
        product.register_hook(partial(hook, 0))
        product1.register_hook(partial(hook, 1))
        pool[at].append((product, product1))
        pool[to].append((network.carry(number, product, at, to), product1))
    parts: list[torch.Tensor] = []
    parts1: list[torch.Tensor] = []
    for me in reversed(range(count)):
        total = torch.stack([t.sum() for t, _ in pool[me]]).sum()
        parts.append(total if me == 0 else network.carry(number, total, me, 0))
        parts1.append(torch.stack([t.sum() for _, t in pool[me]]).sum())
    return number, torch.stack(parts).sum(), leaves, torch.stack(parts1).sum()


def grads_are_those_of(network: Network, number: int, leaves: list[Any]) -> None:
    """Compare the gradients of a context with those of one process."""
    for me, leaf, twin in leaves:
        found = network.at[me].find(number).gradients.get(leaf)
        torch.testing.assert_close(found, twin.grad)
        assert leaf.grad is None


def release(network: Network, number: int) -> None:
    """Release a context; no living process may know it then."""
    network.settle()
    network.at[0].release(number)
    network.settle()
    living = [contexts for me, contexts in enumerate(network.at) if me not in network.dead]
    assert [contexts.counts for contexts in living] == [(0, 0)] * len(living)


def run_a_program(seed: int) -> None:
    network = Network(4, seed)
    number, loss, leaves, loss1 = program(network, Random(seed))
    network.at[0].backward(number, [loss], False)
    loss1.backward()
    grads_are_those_of(network, number, leaves)
    assert network.hooks[0] == network.hooks[1]
    release(network, number)


def test_random_programs_find_what_one_process_finds() -> None:
    for seed in range(20):
        run_a_program(seed)


def kill_during_a_pass(seed: int) -> None:
    random = Random(seed)
    network = Network(4, seed)
    number, loss, leaves, loss1 = program(network, random)
    moment, victim = random.randint(0, 25), random.randint(1, 3)
    plain, left = network.pump, [moment]

    def pump() -> bool:
        left[0] -= 1
        if left[0] == 0:
            network.die(victim)
            return True
        return plain()

    network.pump = pump
    if moment == 0:
        network.die(victim)
    lost = None
    try:
        network.at[0].backward(number, [loss], False)
    except PeerLost as error:
        lost = error
    if lost is None:
        loss1.backward()
        grads_are_those_of(network, number, leaves)
    else:
        assert lost.peer == victim
    release(network, number)


def test_a_death_at_any_moment_ends_the_pass() -> None:
    for seed in range(20):
        kill_during_a_pass(seed)


def test_who_made_a_context_dies_and_it_is_forgotten() -> None:
    network = Network(3)
    number = network.at[0].new().number
    x = network.carry(number, torch.ones(2), 0, 1)
    network.carry(number, x, 1, 2)
    network.die(0)
    network.settle()
    assert [contexts.counts for contexts in network.at[1:]] == [(0, 0), (0, 0)]


def test_an_error_reaches_the_caller_and_the_next_pass_begins_anew() -> None:
    network = Network(3)
    w = torch.tensor([5.0], requires_grad=True)
    number = network.at[0].new().number

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("no such gradient")

    x = network.carry(number, torch.tensor([2.0], requires_grad=True), 0, 1)
    product = network.carry(number, x * 2, 1, 2) * w
    broken = product.register_hook(fail)
    loss = network.carry(number, network.carry(number, product, 2, 1) + x, 1, 0).sum()
    for _ in range(2):
        with pytest.raises(RpcError, match="Error on Node 2: no such gradient") as caught:
            network.at[0].backward(number, [loss], True)
        assert "ZeroDivisionError" in caught.value.remote_traceback
        network.settle()
        assert [contexts.counts[1] for contexts in network.at] == [0, 0, 0]
    broken.remove()
    network.at[0].backward(number, [loss], False)
    assert network.at[2].find(number).gradients[w].tolist() == [4.0]


def test_a_result_without_gradient_deep_below_is_named() -> None:
    network = Network(3)
    w = torch.ones(1, requires_grad=True)
    number = network.at[0].new().number
    x = network.carry(number, torch.ones(1, requires_grad=True), 0, 1)
    network.carry(number, x * 3, 1, 2, "w2.keep() called by w1")  # nothing comes back
    back = network.carry(number, x * w, 1, 0)
    with pytest.raises(RpcError, match=r"got no gradient.*w2\.keep\(\) called by w1"):
        network.at[0].backward(number, [back], False)
    release(network, number)


def test_a_release_is_known_everywhere_and_late_messages_change_nothing() -> None:
    network = Network(3)
    number = network.at[0].new().number
    x = network.carry(number, torch.ones(2), 0, 1)  # needs no gradients
    with inside(number):
        late = network.at[1].sending(2, "late", [x])
    assert late is not None
    assert late.needing == 0
    network.carry(number, x, 1, 2)
    network.at[0].release(number)
    network.settle()
    assert [contexts.counts for contexts in network.at] == [(0, 0)] * 3
    assert network.at[2].receiving(1, late, [x]) == [x]
    with inside(number):
        assert network.at[1].sending(2, "later", [x]) is None
    assert network.at[2].counts == (0, 0)
    with pytest.raises(RpcError, match=f"Could not find autograd context with id: {number}"):
        network.at[0].find(number)
    network.at[0].release(number)


def test_a_release_during_a_pass_ends_it() -> None:
    network = Network(2)
    number = network.at[0].new().number
    w = torch.ones(1, requires_grad=True)
    product = network.carry(number, torch.ones(1, requires_grad=True), 0, 1) * w
    product.register_hook(lambda _: network.at[0].release(number))
    with pytest.raises(RpcError, match="released"):
        network.at[0].backward(number, [network.carry(number, product, 1, 0)], False)
    network.settle()
    assert [contexts.counts for contexts in network.at] == [(0, 0), (0, 0)]


def test_a_graph_that_is_not_retained_is_run_once_and_then_forgotten() -> None:
    network = Network(2)
    number = network.at[0].new().number
    w = torch.tensor([3.0], requires_grad=True)

    def loss() -> torch.Tensor:
        there = network.carry(number, torch.ones(1, requires_grad=True), 0, 1)
        return network.carry(number, there * w, 1, 0)

    losses: list[torch.Tensor] = []
    for _ in range(3):  # forward and backward in turns, in one context
        losses.append(loss())
        network.at[0].backward(number, losses[-1:], True)
        network.at[0].backward(number, losses[-1:], False)
    assert network.at[1].find(number).gradients[w].tolist() == [6.0]
    with pytest.raises(RuntimeError, match="another process"):
        network.at[0].backward(number, losses[:1], False)


def test_gradients_of_remote_tensors_are_not_lost_in_a_local_pass() -> None:
    network = Network(2)
    number = network.context()
    came = network.carry(number, torch.ones(1, requires_grad=True), 1, 0)
    with pytest.raises(RuntimeError, match=r"dure\.autograd\.backward"):
        (came * 2).backward()


def test_without_grad_mode_a_message_only_makes_the_context_known() -> None:
    network = Network(2)
    number = network.at[0].new().number
    with torch.no_grad():
        x = network.carry(number, torch.ones(1, requires_grad=True), 0, 1)
    assert x.is_leaf
    assert network.at[1].find(number).workers == {0}


def test_gradients_that_are_none_are_sent_all_the_same() -> None:
    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> None:  # pyright: ignore
            return None

    network = Network(2)
    number = network.at[0].new().number
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    back = network.carry(number, network.carry(number, x, 0, 1) * 2, 1, 0)
    network.at[0].backward(number, [Drops.apply(back) + y], False)
    assert network.at[0].find(number).gradients == {y: torch.ones(1)}
    assert network.sent == 2  # there and back, though there is nothing to tell
