"""Cases of point-to-point messages."""

from __future__ import annotations

import torch

import dure as dist

from .values import LARGE, movable, noise, same

NEEDS_PEERS = True


def _ring(rank: int, n: int) -> tuple[int, int]:
    return (rank + 1) % n, (rank - 1) % n


def case_ring_of_blocking_messages(rank, n):
    right, left = _ring(rank, n)
    for count in (0, 1, n, LARGE):
        mine, got = torch.full((count,), float(rank)), torch.empty(count)
        if rank % 2 == 0:
            dist.send(mine, dst=right)
            source = dist.recv(got, src=left)
        else:
            source = dist.recv(got, src=left)
            dist.send(mine, dst=right)
        assert source == left
        assert torch.equal(got, torch.full((count,), float(left))), count


def case_every_dtype_moves(rank, n):
    right, left = _ring(rank, n)
    for dtype in movable(n):
        got = torch.empty_like(noise(0, 11, dtype))
        sent = dist.isend(noise(rank, 11, dtype), dst=right)
        dist.recv(got, src=left)
        sent.wait()
        assert same(got, noise(left, 11, dtype)), dtype


def case_tags_are_told_apart(rank, n):
    right, left = _ring(rank, n)
    sends = [dist.isend(torch.tensor([10 * rank + tag]), dst=right, tag=tag) for tag in (1, 2, 3)]
    for tag in (3, 2, 1):  # the others came before the third, and wait
        got = torch.zeros(1, dtype=torch.int64)
        dist.recv(got, src=left, tag=tag)
        assert got.item() == 10 * left + tag
    for work in sends:
        work.wait()


def case_one_pair_and_tag_keeps_order(rank, n):
    right, left = _ring(rank, n)
    sends = [dist.isend(torch.tensor([i]), dst=right, tag=9) for i in range(20)]
    for i in range(20):
        got = torch.zeros(1, dtype=torch.int64)
        dist.recv(got, src=left, tag=9)
        assert got.item() == i
    for work in sends:
        work.wait()


def case_from_anyone(rank, n):
    if rank:
        dist.send(torch.full((3,), rank), dst=0, tag=40)
        return
    sources = []
    for _ in range(n - 1):
        got = torch.zeros(3, dtype=torch.int64)
        source = dist.recv(got, tag=40)
        assert torch.equal(got, torch.full((3,), source))
        sources.append(source)
    assert sorted(sources) == list(range(1, n))


def case_receives_posted_before_sends(rank, n):
    right, left = _ring(rank, n)
    outputs = [torch.empty(500) for _ in range(6)]
    receives = [dist.irecv(o, src=left, tag=i) for i, o in enumerate(outputs)]
    sends = [
        dist.isend(torch.full((500,), 10.0 * rank + i), dst=right, tag=i)
        for i in reversed(range(6))
    ]
    for i, (o, work) in enumerate(zip(outputs, receives, strict=True)):
        work.wait()
        assert torch.equal(o, torch.full((500,), 10.0 * left + i))
    for work in sends:
        work.wait()
        assert work.is_completed()


def case_batch(rank, n):
    right, left = _ring(rank, n)
    got_left, got_right = torch.empty(40_000), torch.empty(40_000)
    mine = torch.full((40_000,), float(rank))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, right, tag=1),
            dist.P2POp(dist.isend, mine, left, tag=2),
            dist.P2POp(dist.irecv, got_left, left, tag=1),
            dist.P2POp(dist.irecv, got_right, right, tag=2),
        ]
    )
    for work in works:
        work.wait()
    assert torch.equal(got_left, torch.full_like(got_left, float(left)))
    assert torch.equal(got_right, torch.full_like(got_right, float(right)))


def case_odd_views_move(rank, n):
    right, left = _ring(rank, n)
    given, got = (
        torch.arange(12).view(3, 4).t() + rank,
        torch.zeros(4, 6, dtype=torch.int64)[:, ::2],
    )
    sent = dist.isend(given, dst=right)
    dist.recv(got, src=left)
    sent.wait()
    assert torch.equal(got, torch.arange(12).view(3, 4).t() + left)


def case_messages_beside_collectives(rank, n):
    right, left = _ring(rank, n)
    got = torch.empty(5)
    receive = dist.irecv(got, src=left, tag=8)
    t = torch.ones(2)
    dist.all_reduce(t)
    dist.barrier()
    dist.isend(torch.full((5,), float(rank)), dst=right, tag=8).wait()
    receive.wait()
    assert torch.equal(got, torch.full((5,), float(left)))
    assert torch.equal(t, torch.full((2,), float(n)))


def case_objects_by_message(rank, n):
    if rank > 1:
        return
    if rank == 0:
        dist.send_object_list(["a", {"b": 1}, None], dst=1)
        return
    got = [None, None, None]
    assert dist.recv_object_list(got, src=0) == 0
    assert got == ["a", {"b": 1}, None]
