"""Cases of tensors that are not contiguous, and of operations that are asynchronous."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.errors import Desync, UsageError
from dure.tensor import DTensor, Shard, init_device_mesh
from tests.waiting import until


def _odd_views() -> list[torch.Tensor]:
    """Return tensors of 24 elements, none of them contiguous."""
    return [
        torch.zeros(4, 6).t(),
        torch.zeros(48)[::2],
        torch.zeros(24, 3)[:, 1],
        torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.zeros(24, dtype=torch.complex64).conj(),
    ]


def case_all_reduce_of_odd_views(rank, n):
    for t in _odd_views():
        assert not t.is_contiguous() or t.is_conj()
        t.fill_(rank + 1)
        dist.all_reduce(t)
        assert torch.equal(t, torch.full_like(t, n * (n + 1) // 2))


def case_broadcast_of_odd_views(rank, n):
    for t in _odd_views():
        values = torch.arange(24).to(t.dtype).view(t.shape)
        if rank == n - 1:
            t.copy_(values)
        work = dist.broadcast(t, src=n - 1, async_op=True)
        work.wait()
        assert torch.equal(t.resolve_conj(), values)


def case_gathers_of_odd_views(rank, n):
    for view in _odd_views():
        mine = view.fill_(rank)
        outputs = [torch.zeros(48, dtype=view.dtype)[::2] for _ in range(n)]
        dist.all_gather(outputs, mine)
        assert all(torch.equal(o, torch.full_like(o, r)) for r, o in enumerate(outputs))
        flat = torch.zeros(n * 48, dtype=view.dtype)[::2]
        dist.all_gather_single(flat, mine)
        assert torch.equal(flat, torch.arange(n).to(view.dtype).repeat_interleave(24))


def case_reduce_scatter_into_odd_views(rank, n):
    output = torch.zeros(10)[::2]
    given = torch.arange(n * 5.0).repeat_interleave(2)[::2]
    dist.reduce_scatter_single(output, given)
    assert torch.equal(output, n * torch.arange(rank * 5.0, rank * 5 + 5))
    output.zero_()
    dist.reduce_scatter(output, [torch.full((10,), float(r))[::2] for r in range(n)])
    assert torch.equal(output, torch.full((5,), float(n * rank)))


def case_all_to_all_of_odd_views(rank, n):
    output, given = torch.zeros(n * 4)[::2], (torch.arange(n * 4.0) + 100 * rank)[::2]
    dist.all_to_all_single(output, given)
    wanted = torch.cat([torch.tensor([0.0, 2.0]) + 4 * rank + 100 * r for r in range(n)])
    assert torch.equal(output, wanted)


def case_parameters_that_require_grad(rank, n):
    parameter = torch.nn.Parameter(torch.full((6,), float(rank)))
    dist.broadcast(parameter, src=0)
    assert parameter.requires_grad
    assert torch.equal(parameter.detach(), torch.zeros(6))
    dist.all_reduce(parameter.detach().add_(1.0))
    assert torch.equal(parameter.detach(), torch.full((6,), float(n)))


def case_many_async_operations_end_in_order(rank, n):
    tensors = [torch.full((1 + 1000 * i,), float(rank + i)) for i in range(12)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    assert works[-1].wait()
    for i, (t, work) in enumerate(zip(tensors, works, strict=True)):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert torch.equal(t, torch.full_like(t, n * (n - 1) / 2 + n * i))


def case_operations_end_though_they_are_only_asked(rank, n):
    mine, part, whole = torch.ones(n * 100), torch.empty(100), torch.empty(n * n * 100)
    works = [
        dist.reduce_scatter_single(part, mine, async_op=True),
        dist.all_gather_single(whole, mine, async_op=True),
        dist.all_to_all_single(torch.empty_like(mine), mine, async_op=True),
        dist.broadcast(mine, 0, async_op=True),
    ]
    until(lambda: all(work.is_completed() for work in works))
    assert torch.equal(part, torch.full((100,), float(n)))


def case_every_form_is_asynchronous(rank, n):
    a, b = torch.ones(n), torch.ones(n) * rank
    gathered, single = [torch.empty(n) for _ in range(n)], torch.empty(n * n)
    received, exchanged = [torch.empty(1) for _ in range(n)], torch.empty(n)
    part, parts = torch.empty(1), torch.empty(1)
    scattered = torch.empty(1)
    slots = [torch.empty(n) for _ in range(n)] if rank == 0 else None
    given = [torch.tensor([float(r)]) for r in range(n)] if rank == n - 1 else None
    ones = list(torch.ones(n).split(1))
    works = [
        dist.all_reduce(a, async_op=True),
        dist.broadcast(b, src=0, async_op=True),
        dist.all_gather(gathered, torch.ones(n) * rank, async_op=True),
        dist.all_gather_single(single, torch.ones(n) * rank, async_op=True),
        dist.all_to_all(received, list((torch.ones(n) * rank).split(1)), async_op=True),
        dist.all_to_all_single(exchanged, torch.ones(n) * rank, async_op=True),
        dist.reduce_scatter(part, ones, async_op=True),
        dist.reduce_scatter_single(parts, torch.ones(n), async_op=True),
        dist.gather(torch.ones(n) * rank, slots, dst=0, async_op=True),
        dist.scatter(scattered, given, src=n - 1, async_op=True),
        dist.reduce(torch.ones(3), dst=0, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    ranks = torch.arange(n, dtype=torch.float32)
    assert torch.equal(a, torch.full((n,), float(n)))
    assert torch.equal(b, torch.zeros(n))
    assert torch.equal(torch.stack(gathered)[:, 0], ranks)
    assert torch.equal(single, ranks.repeat_interleave(n))
    assert torch.equal(torch.cat(received), ranks)
    assert torch.equal(exchanged, ranks)
    assert part.item() == parts.item() == n
    assert scattered.item() == rank
    assert slots is None or torch.equal(torch.stack(slots)[:, 0], ranks)


def case_future_holds_the_outputs(rank, n):
    t = torch.ones(4)
    work = dist.all_reduce(t, async_op=True)
    assert torch.equal(work.get_future().wait()[0], torch.full((4,), float(n)))
    assert torch.equal(work.result()[0], torch.full((4,), float(n)))


def case_inference_tensors_outside_inference_mode(rank, n):
    with torch.inference_mode():
        views = [torch.ones(6), torch.ones(6, dtype=torch.float16), torch.ones(4, 6).t()]
        parts, mail = [torch.zeros(2) for _ in range(n)], torch.zeros(1)
    for t in views:
        dist.all_reduce(t)
        assert torch.equal(t, torch.full_like(t, n))
    dist.all_to_all(parts, [torch.full((2,), float(rank))] * n)
    assert all(torch.equal(p, torch.full((2,), float(r))) for r, p in enumerate(parts))
    if n > 1:
        work = dist.isend(torch.ones(1), dst=(rank + 1) % n)
        dist.recv(mail, src=(rank - 1) % n)
        work.wait()
        assert mail.item() == 1


def case_negated_view_is_reduced_by_what_it_shows(rank, n):
    # Contiguous, but stored with the other sign: an engine that reads memory would take the
    # smallest for the largest.
    shown = torch.tensor([complex(0, -1.0 - rank)]).conj().imag
    assert shown.is_neg()
    assert shown.is_contiguous()
    dist.all_reduce(shown, dist.ReduceOp.MAX)
    assert shown.tolist() == [float(n)]


def _one_entry(
    indices: list[int], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a COO tensor whose sparse dimensions are as many as `indices`."""
    at = torch.tensor(indices).unsqueeze(1)
    values = torch.ones(1, *shape[len(indices) :], dtype=dtype)
    return torch.sparse_coo_tensor(at, values, shape, check_invariants=True)


def case_sparse_tensors_of_other_layouts_are_refused(rank, n):
    """On all ranks, before an entry is sent; the tensors are left as they were."""
    if n == 1:
        return
    half = torch.float16
    for first, last in (
        (_one_entry([1], (10,)), _one_entry([11], (12,))),
        (_one_entry([1], (10, 2)), _one_entry([1], (10, 3))),
        (_one_entry([1, 2], (4, 4)), _one_entry([1], (4, 4))),
        (_one_entry([1], (4,)), _one_entry([1], (4,), half)),
    ):
        mine = (last if rank == n - 1 else first).clone()
        before = mine.to_dense()
        for async_op in (False, True):
            with pytest.raises(Desync) as caught:
                dist.all_reduce(mine, async_op=async_op)
            assert str(list(mine.shape)) in caught.value.calls[rank]
        assert torch.equal(mine.to_dense(), before)
        same = first.clone()
        dist.all_reduce(same)
        assert torch.equal(same.to_dense(), n * first.to_dense())


class _Tagged(torch.Tensor):
    """A tensor that has memory of its own, and tells `torch.compile` of it."""

    plain = property(lambda self: self.as_subclass(torch.Tensor))

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> _Tagged:
        return torch.Tensor._make_subclass(cls, values)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None


def case_tensors_that_have_memory_of_their_own_are_taken_whatever_their_type(rank, n):
    tagged, empty = _Tagged(torch.ones(3)), _Tagged(torch.ones(0))
    dist.all_reduce(tagged)
    dist.all_reduce(empty)
    assert tagged.tolist() == [n] * 3
    work = dist.broadcast(tagged, 0, async_op=True)
    assert work is not None
    work.wait()
    assert type(tagged) is _Tagged


def case_tensors_made_of_others_are_refused_by_their_type(rank, n):
    mesh = init_device_mesh("cpu", (n,))
    divided = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    plain = torch.ones(2)
    for tensor in (divided, torch.nn.Parameter(divided)):
        for call in (
            lambda t=tensor: dist.all_reduce(t),
            lambda t=tensor: dist.all_reduce(t, async_op=True),
            lambda t=tensor: dist.broadcast(t, 0),
            lambda t=tensor: dist.all_gather_into_tensor(torch.ones(2 * n), t),
            lambda t=tensor: dist.reduce_scatter_tensor(t, torch.ones(2 * n)),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            assert "to_local()" in str(caught.value)
    dist.all_reduce(plain)
    assert plain.tolist() == [n, n]
