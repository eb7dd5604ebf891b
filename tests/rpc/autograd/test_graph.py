"""A graph that runs piece by piece finds what it finds at once, and calls hooks as often."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from random import Random

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dure.rpc.autograd.graph import LocalGraph, aside, edge_of
from tests.waiting import PATIENCE_S


@dataclass
class Drawn:
    """A random graph of float64 tensors: leaves, what was computed of them, and its hooks."""

    random: Random
    leaves: list[torch.Tensor] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    called: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        torch_random = torch.Generator().manual_seed(self.random.randrange(2**31))
        for _ in range(self.random.randint(1, 3)):
            leaf = torch.randn(4, dtype=torch.float64, generator=torch_random, requires_grad=True)
            self.leaves.append(leaf)
        self.tensors = list(self.leaves)
        for _ in range(self.random.randint(2, 12)):
            self.tensors += self.computed()
        for number, tensor in enumerate(self.tensors):
            if self.random.random() < 0.3:
                tensor.register_hook(lambda g, number=number: self.hook(f"tensor {number}", g))
        for number, leaf in enumerate(self.leaves):
            accumulator = get_gradient_edge(leaf).node
            accumulator.register_hook(
                lambda _, got, number=number: self.hook(f"leaf {number}", got[0])
            )

    def hook(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        self.called[name] += 1
        return gradient * gradient if name.startswith("tensor") else None  # not linear

    def computed(self) -> list[torch.Tensor]:
        a, b = self.random.choices(self.tensors, k=2)
        kind = self.random.randrange(5)
        if kind == 0:
            return [a * b]
        if kind == 1:
            return [a.sin()]
        if kind == 2:
            return [a + b]
        if kind == 3:  # a node with two outputs, of which one may lead nowhere
            return [each.repeat(2) for each in (a * 1.5).split(2)]
        return [torch.maximum(a, b)]


def run_in_pieces(seed: int) -> None:
    drawn = Drawn(Random(seed))
    random = drawn.random
    roots: dict[Hashable, list[torch.Tensor]] = {
        name: random.choices(drawn.tensors, k=random.randint(1, 3))
        for name in range(random.randint(1, 4))
    }
    ones = {
        name: [torch.ones_like(each) for each in each_root] for name, each_root in roots.items()
    }
    wanted: list[torch.Tensor | None] = []
    for leaf in drawn.leaves:
        leaf.grad = None
    torch.autograd.backward(
        [get_gradient_edge(t) for name in roots for t in roots[name]],
        [g for name in roots for g in ones[name]],
        retain_graph=True,
    )
    for leaf in drawn.leaves:
        wanted.append(leaf.grad)
        leaf.grad = torch.full_like(leaf, 7.0)
    calls, drawn.called = drawn.called, Counter()

    graph = LocalGraph(edges(roots), {})
    names = list(roots)
    random.shuffle(names)
    for name in names:
        assert graph.missing
        assert graph.arrive(name, ones[name]) == {}
    assert not graph.missing
    for leaf, gradient in zip(drawn.leaves, wanted, strict=True):
        torch.testing.assert_close(graph.leaves.get(leaf), gradient)
        assert leaf.grad is not None
        assert leaf.grad.eq(7.0).all()
    assert drawn.called == calls


def test_gradients_and_hooks_are_those_of_one_run() -> None:
    for seed in range(50):
        run_in_pieces(seed)


def edges(roots: dict[Hashable, list[torch.Tensor]]) -> dict[Hashable, list[GradientEdge]]:
    return {name: [get_gradient_edge(t) for t in tensors] for name, tensors in roots.items()}


def node(tensor: torch.Tensor) -> Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn


def test_hooks_of_one_graph_may_wait_for_another_with_other_leaves() -> None:
    """As those of data parallelism do, by way of other processes."""
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    ended: list[bool] = []

    def run(leaf: torch.Tensor) -> None:
        graph = LocalGraph({"root": [edge_of(leaf)]}, {})
        graph.arrive("root", [torch.ones(2)])
        assert torch.equal(graph.leaves[leaf], torch.ones(2))

    def other_way(_: torch.Tensor) -> None:
        thread = threading.Thread(target=run, args=(second,), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        ended.append(not thread.is_alive())

    first.register_post_accumulate_grad_hook(other_way)
    run(first)
    assert ended == [True]


def test_a_leaf_is_set_aside_by_one_thread_at_a_time() -> None:
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    got = threading.Event()

    def take() -> None:
        with aside([second, first]):
            got.set()

    thread = threading.Thread(target=take)
    with aside([first]), aside([first]):  # twice, by this thread
        thread.start()
        with aside([second]):  # the other thread has none while it waits for both
            assert not got.is_set()
    assert got.wait(PATIENCE_S)
    thread.join()
