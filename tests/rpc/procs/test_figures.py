"""What a process tells of its remote calls is found by others."""

import os
from pathlib import Path

import torch

from dure.rpc.figures import Board, Figures, seen
from dure.testing.rpc import Cluster
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import until

NAME = f"mine{os.getpid()}"


def mine(name: str) -> list[Figures]:
    return [each.figures for each in seen() if (each.pid, each.name) == (os.getpid(), name)]


def seen_with_a_child(_: Slot) -> tuple[list[int], int]:
    """Return the workers named `NAME` of which this process is one that has forked, and its id."""
    board = Board(NAME)
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"1")
        os.close(wait[1])
        os.read(wait[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    found = [each.pid for each in seen() if each.name == NAME]
    os.close(wait[1])
    os.waitpid(child, 0)
    board.close()
    return found, os.getpid()


def test_a_forked_child_is_no_worker_of_its_own(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, seen_with_a_child) as ranks:
        ((found, pid),) = ranks.values()
    assert found == [pid]


def test_an_agent_counts_its_calls_and_those_that_come():
    with Cluster(2) as cluster:
        here, there = cluster.agents
        for _ in range(3):
            assert here.rpc_sync(there.me, torch.add, (torch.ones(1000), 1)).sum() == 2000

        def shown() -> tuple[Figures, ...] | None:
            found = {each.name: each.figures for each in seen() if each.pid == os.getpid()}
            caller, callee = (found[agent.me.name] for agent in (here, there))
            over = caller.made == 3 and callee.served == 3
            return (caller, callee) if over and caller.waiting == callee.running == 0 else None

        for figures in until(shown, "the figures") or ():
            assert 3 * 4000 <= figures.bytes_sent < 3 * 5000
            assert 3 * 4000 <= figures.bytes_received < 3 * 5000
