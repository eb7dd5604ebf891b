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
    group = current_world().default
    assert group is not None
    assert group._plain is not None
    return group._plain


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
        if _plain().plain_broadcast(make(), 0, False) is not False
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
            assert plain.plain_broadcast(tensor, 0, False) is True
        del tensor
        tensor = conjugate.imag
        in_its_place += id(tensor) == address
        assert plain.plain_broadcast(tensor, 0, False) is False
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
    """Every operation, plain and while a hook listens (which takes the slow path): same bits."""
    torch.manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for numel in (1, 8, 5000, 300_000):
            source = (torch.randn(2 * numel) * 50).to(dtype)
            first = _everything(rank, source)
            hook = trace.add_hook(before=lambda event: None)
            second = _everything(rank, source)
            trace.remove_hook(hook)
            for a, b in zip(first, second, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _everything(rank: int, source: torch.Tensor) -> list[torch.Tensor]:
    n, empty = source.numel(), torch.empty_like
    reduced, root = source.clone(), source.clone()
    gathered, exchanged, got = source.new_empty(2 * n), empty(source), empty(source)
    scattered = source.new_empty(n // 2)
    summed, wide = empty(source), source.view(2, n // 2)
    rows, columns = empty(wide), empty(wide)
    group = current_world().default
    assert group is not None
    group.all_reduce_into(summed, source)
    cut = 1 if n > 2 else 0
    group.all_to_all_along(rows, wide, 0, cut)
    group.all_to_all_along(columns, wide, cut, 0)
    scattered_rows, scattered_columns = empty(wide[0]), empty(wide.chunk(2, cut)[0])
    group.scatter_along(scattered_rows, wide, 0, 1)
    group.scatter_along(scattered_columns, wide, cut, 0)
    dist.all_reduce(reduced)
    dist.broadcast(root, 1)
    dist.all_gather_into_tensor(gathered, source)
    dist.reduce_scatter_tensor(scattered, source, dist.ReduceOp.MAX)
    dist.all_to_all_single(exchanged, source)
    dist.barrier()
    if rank == 0:
        dist.send(source, 1, tag=3)
        dist.recv(got, 1, tag=4)
    else:
        dist.recv(got, 0, tag=3)
        dist.send(source, 0, tag=4)
    parts = [rows, columns, scattered_rows, scattered_columns]
    return [reduced, root, gathered, scattered, exchanged, got, summed, *parts]


@pytest.mark.parametrize("program", [_wrong_calls, _one_where_another_was, _both_roads])
def test_two_ranks(process_pool, program):
    process_pool(2, "shm").run(program)


def test_tensors_that_are_not_plain_are_declined(process_pool):
    assert process_pool(2, "shm").run(_declined) == [[], []]
