"""Backward through graphs over several processes finds what one process finds.

The processes are contexts in one process; a call is a function of tensors that came.
"""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch

from dure.errors import RpcError
from dure.rpc.autograd.context import Context


class Processes:
    """Contexts that send tensors, and later gradients, to each other."""

    def __init__(self, number: int, random: Random | None = None) -> None:
        self.contexts = [Context(1) for _ in range(number)]
        self.random, self.last, self.passes = random or Random(0), 0, 0
        self.sent_back = 0

    def carry(self, tensor: torch.Tensor, by: int, to: int, what: str = "a call") -> torch.Tensor:
        self.last += 1
        message = (by, self.last)
        if not self.contexts[by].sends(message, [tensor], to, what):
            return tensor
        copy = tensor.detach().clone().requires_grad_()
        (placed,) = self.contexts[to].receives(message, [copy], by, what)
        return placed

    def backward(self, at: int, *roots: torch.Tensor, retain_graph: bool = False) -> int:
        """Run a pass; return how many gradients are awaited at its end."""
        self.passes += 1
        number = (at, self.passes)
        under_way, awaited = self.contexts[at].begin(number, roots, retain_graph)
        while under_way:
            out = under_way.pop(self.random.randrange(len(under_way)))
            self.sent_back += 1
            gradients = [None if g is None else g.clone() for g in out.gradients] or [None]
            sent, more = self.contexts[out.to].arrive(number, out.message, gradients, retain_graph)
            under_way, awaited = under_way + sent, awaited + more
        return awaited


def test_there_and_back_again() -> None:
    two = Processes(2)
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    w = torch.tensor([5.0, 7.0], requires_grad=True)  # lies at process 1
    there = two.carry(x, 0, 1)
    back = two.carry(there * w, 1, 0)
    assert two.backward(0, (back * x).sum()) == 0
    here, elsewhere = (context.gradients for context in two.contexts)
    assert here[x].tolist() == [2 * 2 * 5, 2 * 3 * 7]
    assert elsewhere[w].tolist() == [4.0, 9.0]
    assert (len(here), len(elsewhere), x.grad) == (1, 1, None)


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_over_three_processes(seed: int) -> None:
    random = Random(seed)
    processes = Processes(3, random)
    leaves: list[torch.Tensor] = []
    pool: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # distributed, and on one process
    calls: list[int] = [0, 0]

    def count(n: int, gradient: torch.Tensor) -> torch.Tensor:
        calls[n] += 1
        return gradient * gradient  # not linear: parts of it would show

    for _ in range(3):
        leaf = torch.rand(3, dtype=torch.float64, requires_grad=True)
        twin = leaf.detach().clone().requires_grad_()
        leaf.register_hook(partial(count, 0))
        twin.register_hook(partial(count, 1))
        leaves += [leaf, twin]
        pool.append([(leaf, twin)])
    for _ in range(random.randint(3, 14)):
        at = random.randrange(3)
        (a, a1), (b, b1) = random.choices(pool[at], k=2)
        if random.random() < 0.5:
            made = (a * b).sin(), (a1 * b1).sin()
            for tensor, n in zip(made, (0, 1), strict=True):
                tensor.register_hook(partial(count, n))
            pool[at].append(made)
        else:
            to = random.choice([n for n in range(3) if n != at])
            pool[to].append((processes.carry(a, at, to), a1))
    # All that came must reach the loss, which is at process 0.
    parts = list(pool[0])
    for me in (1, 2):
        total = sum(t.sum() for t, _ in pool[me])
        total1 = sum(t.sum() for _, t in pool[me])
        assert isinstance(total, torch.Tensor)
        assert isinstance(total1, torch.Tensor)
        parts.append((processes.carry(total, me, 0), total1))
    loss = torch.stack([t.sum() for t, _ in parts]).sum()
    loss1 = torch.stack([t.sum() for _, t in parts]).sum()
    assert processes.backward(0, loss) == 0
    loss1.backward()
    for me in range(3):
        leaf, twin = leaves[2 * me], leaves[2 * me + 1]
        torch.testing.assert_close(processes.contexts[me].gradients.get(leaf), twin.grad)
    assert calls[0] == calls[1]


def test_a_second_pass_adds_and_sends_again() -> None:
    two = Processes(2)
    w = torch.tensor([5.0], requires_grad=True)
    back = two.carry(two.carry(torch.tensor([2.0], requires_grad=True), 0, 1) * w, 1, 0)
    loss = back.sum()
    assert two.backward(0, loss, retain_graph=True) == 0
    assert two.backward(0, loss) == 0
    assert two.contexts[1].gradients[w].tolist() == [4.0]
    assert two.sent_back == 4


def test_a_result_that_the_loss_does_not_need_is_an_error_that_names_the_call() -> None:
    two = Processes(2)
    w = torch.ones(1, requires_grad=True)
    two.carry(w * 2, 1, 0, "w1.idle() called by w0")
    with pytest.raises(RpcError, match=r"w1\.idle\(\) called by w0"):
        two.backward(0, torch.ones(1, requires_grad=True) * 3)


def test_gradients_that_are_none_are_sent_all_the_same() -> None:
    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # pyright: ignore
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # pyright: ignore
            return None

    two = Processes(2)
    w = torch.ones(1, requires_grad=True)
    back = two.carry(w * 2, 1, 0)
    x = torch.ones(1, requires_grad=True)
    assert two.backward(0, Drops.apply(back) + x) == 0
    assert two.contexts[1].gradients == {}
    assert two.sent_back == 1
