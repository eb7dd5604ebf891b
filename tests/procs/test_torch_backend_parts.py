"""The plug-in's parts by themselves: torch's stores in our terms, and who waits for what."""

from __future__ import annotations

import threading
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
        (first, second)[number].wait(10)  # each needs the other: one thread would be too few
        done[number].set()

    for number in (0, 1):
        waiters.run(lambda number=number: job(number))
    assert all(event.wait(10) for event in done)
    while not waiters._idle.acquire(timeout=10):
        pytest.fail("no thread came back")
    waiters._idle.release()
    again = threading.Event()
    waiters.run(lambda: (names.append(threading.current_thread()), again.set()))
    assert again.wait(10)
    assert names[2] in names[:2]
    while any(thread.is_alive() for thread in names):
        waiters.close()
        for thread in names:
            thread.join(0.05)


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
    keeper, request = Keeper(), Pending()
    large, small = torch.zeros(1 << 20), torch.zeros(1)
    for tensor in (large, small):
        TorchWork(Work(request, [tensor]), keeper, Waiters())  # pyright: ignore[reportArgumentType]
    assert len(keeper._pending) == 2
    request.over.set()
    TorchWork(Work(None, []), keeper, Waiters())
    TorchWork(Work(None, []), keeper, Waiters())
    kept = [t for w in keeper._ended for t in w.result()]
    assert kept == [small]
    keeper.clear()


def test_waited_work_is_not_kept():
    keeper = Keeper()
    TorchWork(Work(None, []), keeper, Waiters()).wait()
    assert not keeper._pending
    assert not keeper._ended
