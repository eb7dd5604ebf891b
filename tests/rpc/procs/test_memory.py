"""Memory that is shared: whoever holds it has the same, and it is freed when nobody does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dure import native
from dure.errors import UsageError
from dure.rpc import share
from dure.rpc.codec import Codec
from dure.rpc.memory import MemoryRow, give, own, take
from dure.rpc.tensors import rebuild
from tests.comm.forked_ranks import Ranks, Slot, in_child
from tests.waiting import until

pytestmark = pytest.mark.needs("engine")


held: list[torch.Tensor] = []
"""Of a process of `Ranks`: what it has taken."""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a process, and return how to have it run a function."""
    with Ranks(1, tmp_path) as ranks:

        def run(function: Callable[..., object], *arguments: object) -> Any:
            ranks.start(function, *arguments)
            return ranks.values()[0]

        yield run
    used()  # what it held is let go of


def who(_: Slot) -> tuple[int, int, int]:
    return native.heap_identity()


def hold(_: Slot, owner: tuple[int, int, int], *row: object) -> list[int]:
    found = native.heap_peer(*owner)
    assert found is not None
    held.append(take(found, MemoryRow(b"", *row)))  # pyright: ignore[reportArgumentType]
    return held[-1][:4].tolist()


def add_one(_: Slot) -> None:
    held[0].add_(1)


def first(_: Slot) -> list[int]:
    return held[0][:4].tolist()


def forks(_: Slot) -> tuple[bool, bool]:
    """Tell whether a child keeps what its parent changes, and the parent what its child changes."""
    memory = held[0]
    before = memory.clone()
    keeps = in_child(lambda: torch.equal(memory, before), lambda: memory.fill_(1))
    in_child(lambda: bool(memory.fill_(2).any()))
    return bool(keeps), bool((memory == 1).all())


def let_go(_: Slot) -> None:
    held.pop()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return Codec().pack(([tensor],)).memories[0]


def given_to(run: Callable[..., Any], memory: torch.Tensor) -> tuple[object, ...]:
    process = native.heap_peer(*run(who))
    assert process is not None
    row = give(process, memory)
    return row.offset, row.nbytes, row.hold


def used() -> int:
    native.heap_allocate(1, False)  # which looks for what is free
    return native.heap_usage()[0]


@pytest.mark.parametrize("count", [8, 100_000])
def test_both_have_the_same_memory_and_it_is_freed_when_nobody_has_it(peer, count: int) -> None:
    before = used()
    tensor = share(torch.full((count,), 3, dtype=torch.uint8))
    rows = [given_to(peer, bytes_of(tensor)) for _ in range(3)]
    assert len({row[2] for row in rows}) == 3  # each message holds it for itself
    for row in rows:
        assert peer(hold, native.heap_identity(), *row) == [3, 3, 3, 3]
    peer(add_one)
    assert tensor.unique().tolist() == [4]
    tensor[1] = 9
    assert peer(first) == [4, 9, 4, 4]
    del tensor
    peer(let_go)
    peer(let_go)
    assert used() > before
    assert peer(first) == [4, 9, 4, 4]
    peer(let_go)
    assert used() == before


def test_what_a_dead_process_held_is_freed(peer) -> None:
    before = used()
    tensor = share(torch.zeros(100_000))
    identity = peer(who)
    peer(hold, native.heap_identity(), *given_to(peer, bytes_of(tensor)))
    del tensor
    assert used() > before
    process = native.heap_peer(*identity)
    assert process is not None
    os.kill(process.pid, 9)
    until(process.dead, "its end")
    assert used() == before


def test_views_of_it_are_passed_and_other_memory_is_copied(peer) -> None:
    tensor = share(torch.arange(4000, dtype=torch.float64).reshape(40, 100))
    view = bytes_of(tensor[7, 8:])
    assert len(view) < tensor.nbytes / 10
    row = given_to(peer, view)
    assert row[:2] == (native.heap_offset(view.data_ptr(), 1), len(view))
    assert row[2]
    assert given_to(peer, torch.zeros(5000, dtype=torch.uint8))[2] == 0
    assert given_to(peer, torch.zeros(5, dtype=torch.uint8))[0] == -1


def test_it_is_a_tensor_like_the_one_it_was_made_of() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    shared = share(tensor)
    assert torch.equal(shared, tensor)
    assert shared.is_leaf
    assert shared.requires_grad
    assert share(shared) is shared
    assert own(bytes_of(shared)).data_ptr() == shared.data_ptr()
    packed = Codec().pack((share(torch.ones(2)),))
    assert rebuild(packed.body.tensors, b"", packed.memories)[0].tolist() == [1.0, 1.0]
    assert not packed.body.inline
    assert share(torch.zeros(0, 4)).shape == (0, 4)


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UsageError, match="only dense tensors of the CPU"):
        share(torch.eye(3).to_sparse())


def test_a_message_to_oneself_passes_what_is_shared() -> None:
    tensor = share(torch.arange(4000.0))
    packed = Codec().pack(([tensor[3000:]],))
    (got,) = rebuild(packed.body.tensors, b"", [own(memory) for memory in packed.memories])
    assert got[0] == 3000.0
    assert got.data_ptr() == tensor[3000:].data_ptr()
    plain = Codec().pack(([torch.ones(4000)],))
    (other,) = rebuild(plain.body.tensors, b"", [own(memory) for memory in plain.memories])
    assert other.data_ptr() != plain.memories[0].data_ptr()


@pytest.mark.parametrize("count", [5_000, 1_000_000])
def test_a_forked_child_has_a_copy_of_what_was_given(peer, count):
    row = given_to(peer, torch.arange(count).to(torch.uint8))
    peer(hold, native.heap_identity(), *row)
    assert peer(forks) == (True, True)
    peer(let_go)
