"""Coalescing managers: when their operations have ended, and that messages in them do not block."""

import pytest
import torch

import dure as dist
from dure.testing import run_ranks
from tests.waiting import PATIENCE_S

BACKENDS = ["threads", "gloo", pytest.param("shm", marks=pytest.mark.needs("engine"))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("async_ops", [False, True])
def test_all_operations_of_a_manager_have_ended_at_its_end_or_after_wait(backend, async_ops):
    def body(rank):
        sums = [torch.full((k + 1,), float(rank + 1)) for k in range(50)]
        parts, lists = torch.empty(2, 3), [torch.empty(2), torch.empty(2)]
        sent, wide = torch.full((3,), float(rank)), torch.ones(4, 2)
        with dist.coalescing_manager(async_ops=async_ops) as manager:
            for number, tensor in enumerate(sums):
                dist.all_reduce(tensor, async_op=number % 3 == 0)
            dist.all_gather_into_tensor(parts, sent)
            dist.all_gather(lists, torch.full((2,), float(rank)))
            dist.all_reduce(wide[:, 1])  # strided: copied to plain memory and back
        if async_ops:
            manager.wait()
        assert [t.tolist() for t in sums] == [[3.0] * (k + 1) for k in range(50)]
        assert parts.tolist() == [[0.0] * 3, [1.0] * 3]
        assert [t.tolist() for t in lists] == [[0.0] * 2, [1.0] * 2]
        assert wide.tolist() == [[1.0, 2.0]] * 4
        dist.all_reduce(sent)  # the group is as before
        assert sent.tolist() == [1.0] * 3

    run_ranks(2, body, backend=backend, timeout=PATIENCE_S)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_may_send_to_each_other_first_in_a_manager(backend):
    count = 1 << 20  # more than a sender may leave behind

    def body(rank):
        given, taken = torch.full((count,), float(rank)), torch.empty(count)
        with dist.coalescing_manager():
            dist.send(given, 1 - rank)
            dist.irecv(taken, 1 - rank)
        assert taken.eq(1 - rank).all()

    run_ranks(2, body, backend=backend, timeout=PATIENCE_S)


@pytest.mark.parametrize("backend", BACKENDS)
def test_coalesced_forms_wait_or_return_a_work(backend):
    def body(rank):
        one, two = torch.full((2,), float(rank)), torch.ones(1)
        assert dist.all_reduce_coalesced([one, two]) is None
        assert (one.tolist(), two.tolist()) == ([1.0, 1.0], [2.0])
        work = dist.all_reduce_coalesced([one, two], async_op=True)
        assert work is not None
        work.wait()
        assert (one.tolist(), two.tolist()) == ([2.0, 2.0], [4.0])
        rows = [[torch.empty(2), torch.empty(1)] for _ in range(2)]
        dist.all_gather_coalesced(rows, [one + rank, two])
        assert [[t.tolist() for t in row] for row in rows] == [
            [[2.0, 2.0], [4.0]],
            [[3.0, 3.0], [4.0]],
        ]

    run_ranks(2, body, backend=backend, timeout=PATIENCE_S)
