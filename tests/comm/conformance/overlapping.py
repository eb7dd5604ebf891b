"""Cases of tensors of one call that share memory: right results, or an error before data move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dure as dist
from dure.errors import ShapeError

COUNTS = (1, 3, 5000)
"""Elements of a part: 5,000 float32 are more than backends treat as small."""


def _numbers(rank: int, count: int) -> torch.Tensor:
    """Return 0, 1, 2, ... with `rank` in the thousands of thousands."""
    return torch.arange(count, dtype=torch.float64) + 1e6 * rank


def _each_place(n: int, k: int) -> list[int]:
    """Return where a tensor of `k` elements may begin within one of `n * k`: odd places too."""
    return sorted({0, *(r * k for r in range(n)), (n * k - k) // 2})


def case_gathered_input_lies_anywhere_in_the_output(rank, n):
    for k in COUNTS:
        for at in _each_place(n, k):
            wanted = torch.cat([_numbers(r, n * k)[at : at + k] for r in range(n)])
            for parts in (False, True):
                output = _numbers(rank, n * k)
                mine = output[at : at + k]
                if parts:
                    dist.all_gather(list(output.split(k)), mine)
                else:
                    dist.all_gather_single(output, mine)
                assert torch.equal(output, wanted), (k, at, parts)
            output = _numbers(rank, n * k)
            slots = list(output.split(k)) if rank == n - 1 else None
            dist.gather(output[at : at + k], slots, dst=n - 1)
            assert torch.equal(output, wanted if rank == n - 1 else _numbers(rank, n * k))


def case_output_of_reduce_scatter_lies_anywhere_in_the_input(rank, n):
    for k in COUNTS:
        total = sum(_numbers(r, n * k) for r in range(n))
        assert isinstance(total, torch.Tensor)
        for at in _each_place(n, k):
            for async_op in (False, True):
                given = _numbers(rank, n * k)
                work = dist.reduce_scatter_single(given[at : at + k], given, async_op=async_op)
                assert work is None or work.wait()
                assert torch.equal(given[at : at + k], total[rank * k : rank * k + k]), (k, at)
            given = _numbers(rank, n * k)
            dist.reduce_scatter(given[at : at + k], list(given.split(k)))
            assert torch.equal(given[at : at + k], total[rank * k : rank * k + k]), (k, at)
            given = _numbers(rank, n * k)
            parts = list(given.split(k)) if rank == 0 else None
            dist.scatter(given[at : at + k], parts, src=0)
            assert torch.equal(given[at : at + k], _numbers(0, n * k)[rank * k : rank * k + k])


def case_all_to_all_of_shifted_memory(rank, n):
    for k in COUNTS:
        length = n * k
        for shift in sorted({0, 1, k // 2, k, length - 1}):
            for parts in (False, True):
                memory = _numbers(rank, length + shift)
                given, output = memory[:length], memory[shift:]
                wanted = torch.cat([_numbers(r, length)[rank * k : rank * k + k] for r in range(n)])
                if parts:
                    dist.all_to_all(list(output.split(k)), list(given.split(k)))
                else:
                    dist.all_to_all_single(output, given)
                assert torch.equal(output, wanted), (k, shift, parts)


def case_all_to_all_in_place_with_split_sizes(rank, n):
    # Rank i sends i + 1 rows to each, so it receives r + 1 rows from rank r.
    rows = n * (n + 1) // 2
    longest = max(n * (rank + 1), rows)
    memory = _numbers(rank, longest)
    given, output = memory[: n * (rank + 1)], memory[:rows]
    wanted = torch.cat(
        [_numbers(r, n * n)[rank * (r + 1) : (rank + 1) * (r + 1)] for r in range(n)]
    )
    dist.all_to_all_single(output, given, [r + 1 for r in range(n)], [rank + 1] * n)
    assert torch.equal(output, wanted)


def case_columns_of_one_matrix_do_not_overlap(rank, n):
    for wide in (torch.zeros(3, 2 * n), torch.zeros(2 * n, 3).t(), torch.zeros(3, 4 * n)[:, ::2]):
        dist.all_gather(list(wide.chunk(n, 1)), torch.full((3, 2), float(rank)))
        assert torch.equal(wide[0], torch.arange(n).repeat_interleave(2).float())
    # Every n-th column: pieces of the same strides that begin in one row.
    woven = torch.zeros(3, 2 * n)
    dist.all_gather([woven[:, r::n] for r in range(n)], torch.full((3, 2), float(rank)))
    assert torch.equal(woven[0], torch.arange(n).repeat(2).float())
    # One piece runs along the rows, the other along the columns.
    mixed = [torch.zeros(9).as_strided((2, 3), (3, 2)) for _ in range(n)]
    dist.all_gather(mixed, torch.full((2, 3), float(rank)))
    assert all(torch.equal(t, torch.full((2, 3), float(r))) for r, t in enumerate(mixed))


def case_outputs_that_overlap_are_refused(rank, n):
    if n == 1:
        return
    x, t, wide = torch.zeros(4), torch.zeros(4), torch.zeros(4 * n)
    shifted = [wide[3 * r : 3 * r + 4] for r in range(n)]
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather([t] * n, x),
        lambda: dist.all_gather(shifted, x),
        lambda: dist.all_to_all(shifted, [x] * n),
        lambda: dist.all_reduce_coalesced([t, x, t]),
        lambda: dist.all_reduce_coalesced([wide[:4], wide[2:8]]),
        lambda: dist.all_reduce(torch.zeros(1).expand(4)),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except ShapeError:
            pass
        else:
            pytest.fail(f"call {number} was not refused")
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == n, number


def case_batch_of_messages_that_overlap_is_refused(rank, n):
    if n == 1:
        return
    after, before, memory = (rank + 1) % n, (rank - 1) % n, torch.zeros(6)

    def send(t: torch.Tensor) -> dist.P2POp:
        return dist.P2POp(dist.isend, t, after)

    def receive(t: torch.Tensor) -> dist.P2POp:
        return dist.P2POp(dist.irecv, t, before)

    for batch in (
        [send(memory), receive(memory)],
        [send(memory[:4]), receive(memory[3:])],
        [receive(memory[:4]), receive(memory[2:])],
    ):
        with pytest.raises(ShapeError):
            dist.batch_isend_irecv(batch)
    given = torch.full((3,), float(rank))
    batch = [send(given), send(given), receive(memory[:3]), receive(memory[3:])]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(memory, torch.full((6,), float(before)))
