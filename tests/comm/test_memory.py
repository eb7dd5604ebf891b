"""Tensors in the heap as torch's storages; memory of other processes that cannot be mapped."""

import os
import threading
import warnings

import pytest
import torch

from dure import native
from dure.comm import memory
from dure.comm.memory import heap_address, heap_empty

pytestmark = pytest.mark.needs("engine")


def _in_heap(tensor: torch.Tensor) -> bool:
    return heap_address(tensor) is not None


def _used() -> int:
    return native.heap_usage()[0]


@pytest.mark.parametrize("count", [10, 1 << 19])
def test_a_storage_in_the_heap_gives_its_memory_back_when_it_is_resized_to_0(count: int) -> None:
    before = _used()
    tensor = heap_empty(count).fill_(3.0)
    storage = tensor.untyped_storage()
    assert storage.resizable()
    assert _in_heap(tensor)
    assert _used() - before >= 4 * count
    storage.resize_(0)
    assert (_used(), storage.nbytes(), tensor.shape) == (before, 0, (count,))
    storage.resize_(4 * count)
    tensor.fill_(2.0)
    assert tensor.sum() == 2 * count
    assert not _in_heap(tensor)
    assert _used() == before


@pytest.mark.parametrize("nbytes", [0, 100])
def test_memory_of_the_heap_is_on_the_cpu_whatever_the_default_device(nbytes: int) -> None:
    with torch.device("meta"):
        made = heap_empty(nbytes, dtype=torch.uint8, zeroed=True)
    assert made.is_cpu
    assert made.sum() == 0


def test_a_fork_warns_once_of_memory_that_it_does_not_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned() -> int:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            memory._warn_before_fork()
        return len(seen)

    monkeypatch.setattr(memory, "_has_warned", False)
    small = heap_empty(1 << 20, copied=True)
    own = heap_empty(1 << 20)  # of the library
    assert warned() == 0
    large = heap_empty(1 << 26, copied=True)  # 256 MiB
    assert (warned(), warned()) == (1, 0)
    del large
    monkeypatch.setattr(memory, "_has_warned", False)
    assert warned() == 0
    del small, own


def test_a_small_tensor_is_freed_while_another_thread_allocates_a_large_one() -> None:
    """The system clears the large one page by page; the heap's file tells how far it is."""
    large_bytes = 1 << 29

    def file_bytes() -> int:
        return os.fstat(native.heap_identity()[2]).st_blocks * 512

    def freed_meanwhile() -> bool:
        native.heap_trim()
        small = [heap_empty(1024)]
        before = file_bytes()
        kept: list[torch.Tensor] = []
        thread = threading.Thread(
            target=lambda: kept.append(heap_empty(large_bytes, dtype=torch.uint8))
        )
        thread.start()
        while file_bytes() < before + large_bytes // 64 and not kept:
            pass
        small.clear()
        after = file_bytes()
        thread.join()
        return after < before + large_bytes

    try:
        assert any(freed_meanwhile() for _ in range(10))
    finally:
        native.heap_trim()
