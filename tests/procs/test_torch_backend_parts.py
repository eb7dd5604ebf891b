"""The plug-in's parts by themselves: torch's stores in our terms, and who waits for what."""

from __future__ import annotations

import queue
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from dure.comm.futures import Waiters
from dure.comm.work import Work
from dure.errors import StoreTimeout
from dure.torch_backend.store import TorchStore
from dure.torch_backend.work import Keeper, TorchWork
from waiting import PATIENCE_S, until

td: Any = torch.distributed
SOON = timedelta(milliseconds=10)


@pytest.fixture(params=["hash", "file", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TorchStore:
    made = td.HashStore() if request.param == "hash" else td.FileStore(str(tmp_path / "store"), 1)
    return TorchStore(td.PrefixStore("below", made) if request.param == "prefix" else made)


def test_store_keeps_values(store: TorchStore):
    store.set("a", "text")
    store.set("b", b"\x00bytes")
    assert (store.get("a"), store.get("b")) == (b"text", b"\x00bytes")
    assert store.check(["a", "b"])
    assert not store.check(["a", "none"])
    assert [store.add("n", 2), store.add("n", -1)] == [2, 1]
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "other", "second") == b"first"
    assert store.compare_set("c", "first", "second") == b"second"
    assert store.delete_key("a")
    assert not store.check(["a"])


def test_store_says_which_keys_are_missing(store: TorchStore):
    store.set("here", "1")
    with pytest.raises(StoreTimeout) as raised:
        store.wait(["here", "gone"], SOON)
    assert raised.value.keys == ("gone",)
    store.set_timeout(SOON)
    with pytest.raises(StoreTimeout):
        store.get("gone")


def test_waiters_run_jobs_side_by_side_and_reuse_threads():
    waiters, names = Waiters(), []
    first, second = threading.Event(), threading.Event()
    done = [threading.Event(), threading.Event()]

    def job(number: int) -> None:
        names.append(threading.current_thread())
        (second, first)[number].set()
        (first, second)[number].wait(
            PATIENCE_S
        )  # each needs the other: one thread would be too few
        done[number].set()

    for number in (0, 1):
        waiters.run(lambda number=number: job(number))
    assert all(event.wait(PATIENCE_S) for event in done)

    def reuses_a_thread() -> bool:
        ran: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        waiters.run(lambda: ran.put(threading.current_thread()))
        return ran.get(timeout=PATIENCE_S) in names

    until(reuses_a_thread, "a job on a thread that has ended another")
    until(lambda: (waiters.close(), not any(t.is_alive() for t in names))[1], "the threads' end")


class Pending:
    """A request that ends when told to."""

    source = -1

    def __init__(self) -> None:
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.over.wait(timeout_s)


def test_dropped_work_is_kept_and_gives_up_large_tensors_when_it_has_ended():
    keeper, request, kept = Keeper(), Pending(), []
    for numel in (1 << 20, 1):
        tensor = torch.zeros(numel)
        kept.append(weakref.ref(tensor))
        TorchWork(Work(request, [tensor]), keeper, Waiters())  # pyright: ignore[reportArgumentType]
        del tensor
    assert None not in [ref() for ref in kept]
    request.over.set()
    for _ in range(2):
        TorchWork(Work(None, []), keeper, Waiters())
    assert [ref() is None for ref in kept] == [True, False]
    keeper.clear()
    assert kept[1]() is None


def test_waited_work_is_not_kept():
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    keeper = Keeper()
    TorchWork(Work(None, [tensor]), keeper, Waiters()).wait()
    del tensor
    assert kept() is None
