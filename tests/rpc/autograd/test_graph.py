"""Graphs that run piece by piece in several threads; `test_backward` has what they find."""

from __future__ import annotations

import threading

import torch

from dure.rpc.autograd.graph import LocalGraph, aside, edge_of
from tests.waiting import PATIENCE_S


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
