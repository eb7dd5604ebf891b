"""Torch's stores in our terms."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed

from dure.errors import StoreLost, StoreTimeout
from dure.torch_backend.store import TorchStore

td: Any = torch.distributed
SOON = timedelta(milliseconds=10)


@pytest.fixture(params=["hash", "file", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TorchStore:
    if request.param == "file":
        return TorchStore(td.FileStore(str(tmp_path / "store"), 1))
    made = td.HashStore()
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


@pytest.mark.parametrize("store", ["hash", "prefix"], indirect=True)  # a file looks every 2 s
def test_store_says_which_keys_are_missing(store: TorchStore):
    store.set("here", "1")
    with pytest.raises(StoreTimeout) as raised:
        store.wait(["here", "gone"], SOON)
    assert raised.value.keys == ("gone",)
    store.set_timeout(SOON)
    with pytest.raises(StoreTimeout):
        store.get("gone")


def test_a_wait_of_no_time_ends(store: TorchStore):
    """Torch's own stores of a file and of one process wait without end."""
    with pytest.raises(StoreTimeout):
        store.wait(["gone"], timedelta(0))


class _Broken:
    """One of torch's stores whose server has ended."""

    timeout = SOON

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise torch.distributed.DistNetworkError("Broken pipe")

        return fail


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.set("a", "1"),
        lambda store: store.add("n", 1),
        lambda store: store.append("a", "1"),
        lambda store: store.compare_set("a", "1", "2"),
        lambda store: store.check(["a"]),
        lambda store: store.get("a"),
        lambda store: store.multi_get(["a"]),
        lambda store: store.delete_key("a"),
    ],
    ids=["set", "add", "append", "compare_set", "check", "get", "multi_get", "delete_key"],
)
def test_a_store_whose_server_has_ended_is_lost(ask: Any):
    with pytest.raises(StoreLost):
        ask(TorchStore(cast("Any", _Broken())))


class _Calls:
    """One of torch's stores; counts the calls of its methods."""

    def __init__(self, store: Any, without: str = ""):
        self.num, self._store, self._without = 0, store, without

    def __getattr__(self, name: str) -> Any:
        self.num += 1
        if name == self._without:
            raise NotImplementedError
        return getattr(self._store, name)


def test_256_keys_take_one_request_and_missing_ones_two():
    calls: Any = _Calls(td.HashStore())
    store, keys = TorchStore(calls), [f"k{number}" for number in range(256)]
    store.multi_set(keys[:200], [""] * 200)
    calls.num = 0
    assert store.multi_get(keys[:200]) == [b""] * 200
    assert calls.num == 2  # it waits, and reads
    assert store.missing_keys(keys) == tuple(keys[200:])
    assert calls.num == 4


def test_a_store_that_lists_no_keys_is_asked_few_times_for_a_missing_one():
    calls: Any = _Calls(td.HashStore(), "list_keys")
    store, keys = TorchStore(calls), [f"k{number}" for number in range(256)]
    store.multi_set([*keys[:70], *keys[71:]], [""] * 255)
    calls.num = 0
    assert store.missing_keys(keys) == ("k70",)
    assert calls.num < 40  # eight halvings


def test_arguments_of_the_wrong_type_are_refused(store: TorchStore):
    store.multi_set(["a", "b"], ["1", "2"])
    wrong: Any = store
    for call in (
        lambda: wrong.set("k", 5),
        lambda: wrong.add("n", 1.5),
        lambda: wrong.check("ab"),  # its letters are keys
        lambda: wrong.wait("ab", SOON),
        lambda: wrong.multi_get("ab"),
        lambda: wrong.multi_set(["k"], [5]),
        lambda: wrong.get(3),
    ):
        with pytest.raises(TypeError):
            call()
    assert not store.check(["k"])
    assert not store.check(["n"])
