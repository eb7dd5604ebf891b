"""Plain calls: which tensors take the fast path, and that both paths agree."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure import trace
from dure.comm.world import current_world
from dure.errors import UsageError

pytestmark = pytest.mark.needs("engine")


def _plain():
    plain = current_world().need_default()._plain
    assert plain is not None
    return plain


def _strided() -> torch.Tensor:
    return torch.ones(4, 4).t()


def _sliced() -> torch.Tensor:
    return torch.ones(8)[::2]


def _without_memory() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


class _Sub(torch.Tensor):
    pass


NOT_PLAIN = {
    "transposed": _strided,
    "with gaps": _sliced,
    "negated view": lambda: torch.ops.aten._neg_view(torch.ones(4)),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "8 bit float": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "empty": lambda: torch.ones(0, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "subclass": lambda: torch.ones(3).as_subclass(_Sub),
    "without memory": _without_memory,
    "list": lambda: [1.0],
}


def _declined(rank: int) -> list[str]:
    del rank
    return [
        k
        for k, make in NOT_PLAIN.items()
        if _plain().plain_broadcast(make(), 0, False, False) is not False
    ]


def _one_where_another_was(rank: int) -> None:
    """A negated tensor at the address of one that was seen before, with the same memory."""
    del rank
    plain, pair = _plain(), torch.tensor([1 + 2j])
    conjugate = pair.conj()
    in_its_place = 0
    for _ in range(20):
        tensor = pair.imag
        address = id(tensor)
        for _ in range(3):
            assert plain.plain_broadcast(tensor, 0, False, False) is True
        del tensor
        tensor = conjugate.imag
        in_its_place += id(tensor) == address
        assert plain.plain_broadcast(tensor, 0, False, False) is False
        del tensor
    assert in_its_place > 0


def _wrong_calls(rank: int) -> None:
    ones = torch.ones
    for wrong in (
        lambda: dist.all_reduce(_without_memory()),
        lambda: dist.all_gather([ones(4), ones(4)], _without_memory()),
        lambda: dist.send(_without_memory(), 1 - rank),
        lambda: dist.recv(_without_memory(), 1 - rank),
    ):
        with pytest.raises(UsageError):
            wrong()


def _both_roads(rank: int) -> None:
    """What only DTensors call, plain and while a hook listens (the slow path): the same bits."""
    torch.manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for numel in (1, 8, 5000, 300_000):
            source = (torch.randn(2 * numel) * 50).to(dtype)
            first = _along(source)
            hook = trace.add_hook(before=lambda event: None)
            second = _along(source)
            trace.remove_hook(hook)
            for a, b in zip(first, second, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _along(source: torch.Tensor) -> list[torch.Tensor]:
    wide, cut = source.view(2, len(source) // 2), 1 if len(source) > 2 else 0
    summed, rows, columns = (torch.empty_like(t) for t in (source, wide, wide))
    scattered_rows, scattered_columns = (torch.empty_like(t[0]) for t in (wide, wide.chunk(2, cut)))
    group = current_world().need_default()
    group.all_reduce_into(summed, source)
    group.all_to_all_along(rows, wide, 0, cut)
    group.all_to_all_along(columns, wide, cut, 0)
    group.scatter_along(scattered_rows, wide, 0, 1)
    group.scatter_along(scattered_columns, wide, cut, 0)
    mine, theirs = (half.clone() for half in source.chunk(2))
    reduced = torch.empty_like(mine)
    gathered, exchanged = ([torch.empty_like(mine) for _ in range(2)] for _ in range(2))
    group.all_gather(gathered, mine)
    group.all_to_all(exchanged, (mine, theirs))
    group.reduce_scatter(reduced, [mine, theirs])
    parts = [scattered_rows, scattered_columns, reduced, *gathered, *exchanged]
    return [summed, rows, columns, *parts]


def _lists(rank: int) -> None:
    """Lists of plain tensors take the fast path; other lists are left to the slow one."""
    plain, ones, total = _plain(), torch.ones, dist.ReduceOp.SUM
    x, other = torch.full((4,), rank + 1.0), ones(4)
    own = [ones(4), ones(4)]
    own[rank] = x  # in place
    assert plain.plain_all_gather_list(own, x, True, False) is True
    assert [t[0].item() for t in own] == [1.0, 2.0]
    assert own[1 - rank]._version == 1 and x._version == 1
    assert plain.plain_all_to_all_list((ones(4), ones(4)), own, False, False) is True
    assert plain.plain_reduce_scatter_list(other, own, total, False, False) is True
    assert other.tolist() == [2.0 * (rank + 1)] * 4

    lengths = [ones(3), ones(4)]
    assert plain.plain_all_gather_list(lengths, ones(3 + rank) + rank, False, False) is True
    assert [t.tolist() for t in lengths] == [[1.0] * 3, [2.0] * 4]

    whole = ones(8)
    for outputs in (
        [ones(4)],
        [ones(8), ones(8)],
        [ones(4), ones(4).int()],
        [ones(4), ones(0)],
        [ones(4), None],
        (each for each in own),
        [whole[:4], whole[2:6]][:: 1 if rank else -1],
    ):
        given = whole[2:6]
        assert plain.plain_all_gather_list(outputs, given, False, False) is False
        assert plain.plain_all_to_all_list(outputs, [given, ones(4)], False, False) is False
        assert plain.plain_reduce_scatter_list(given, outputs, total, False, False) is False
    assert plain.plain_all_to_all_list([], [], False, False) is False


def _list_that_changes(rank: int) -> None:
    """An operation that was started keeps the tensors of its lists."""
    outputs, inputs = (
        [torch.zeros(4), torch.zeros(4)],
        [torch.full((4,), 2.0 * rank + r) for r in (0, 1)],
    )
    work = dist.all_to_all(outputs, inputs, async_op=True)
    outputs.clear()
    inputs.clear()
    assert work is not None
    work.wait()
    assert [t.tolist() for t in work.result()] == [[float(rank)] * 4, [2.0 + rank] * 4]


@pytest.mark.parametrize(
    "program", [_wrong_calls, _one_where_another_was, _both_roads, _lists, _list_that_changes]
)
def test_two_ranks(process_pool, program):
    process_pool(2, "shm").run(program)


def test_tensors_that_are_not_plain_are_declined(process_pool):
    assert process_pool(2, "shm").run(_declined) == [[], []]
