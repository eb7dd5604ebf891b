"""Arguments of the wrong type: refused by every kind of store, and nothing has changed."""

# Arguments are of the wrong type on purpose.
# pyright: reportArgumentType=false

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from dure.store import FileStore, HashStore, PrefixStore, Store, TCPStore

SOON = timedelta(milliseconds=30)
Pair = tuple[Store, Store]
Calls = Sequence[Callable[[Store, object], object]]

BAD: dict[str, tuple[list[object], Calls]] = {
    "a value": (
        [5, True, 1.5, None, ["x"]],
        [
            lambda store, value: store.set("k", value),
            lambda store, value: store.append("k", value),
            lambda store, value: store.compare_set("k", "", value),
            lambda store, value: store.compare_set("k", value, "x"),
            lambda store, value: store.multi_set(["j", "k"], ["x", value]),
        ],
    ),
    "a key": (
        [3, None, ("a",), b"\xff", "\ud800"],
        [
            lambda store, key: store.set(key, "x"),
            lambda store, key: store.get(key),
            lambda store, key: store.add(key, 1),
            lambda store, key: store.append(key, "x"),
            lambda store, key: store.compare_set(key, "", "x"),
            lambda store, key: store.delete_key(key),
            lambda store, key: store.check(["k", key]),
            lambda store, key: store.wait(["k", key], SOON),
            lambda store, key: store.multi_get([key]),
            lambda store, key: store.multi_set(["k", key], ["x", "x"]),
        ],
    ),
    "keys": (
        ["ab", b"ab", 2, None],
        [
            lambda store, keys: store.check(keys),
            lambda store, keys: store.wait(keys, SOON),
            lambda store, keys: store.multi_get(keys),
            lambda store, keys: store.multi_set(keys, ["3", "4"]),
            lambda store, keys: store.multi_set(["a", "b"], keys),
        ],
    ),
    "an amount": ([1.5, 1.0, "1", None], [lambda store, amount: store.add("n", amount)]),
    "a timeout": (
        ["1", True, [1], float("nan")],
        [
            lambda store, timeout: store.wait(["a"], timeout),
            lambda store, timeout: store.set_timeout(timeout),
        ],
    ),
}


class TestEveryStore:
    @pytest.mark.parametrize("what", BAD)
    def test_what_has_the_wrong_type_is_refused_and_changes_nothing(
        self, pair: Pair, what: str
    ) -> None:
        store, other = pair
        store.multi_set(["a", "b"], ["1", "2"])  # the letters of "ab" are keys
        before = store.timeout
        values, calls = BAD[what]
        for value in values:
            for call in calls:
                with pytest.raises(TypeError):
                    call(store, value)
        assert other.list_keys() == ["a", "b"]
        assert other.multi_get(["a", "b"]) == [b"1", b"2"]
        assert store.timeout == before

    def test_what_torch_takes_is_taken(self, pair: Pair) -> None:
        store, other = pair
        got = store.add("n", np.int64(3))
        assert type(got) is int
        assert got == 3
        assert other.add("n", True) == 4
        store.set("두레".encode(), bytearray(b"x"))
        assert other.list_keys() == ["n", "두레"]
        assert other.get("두레") == b"x"
        assert store.check(["두레".encode()])
        store.multi_set((key for key in "ab"), {"1": 0, "2": 0}.keys())
        assert other.check({"a", "b"})
        assert other.multi_get(key for key in "ba") == [b"2", b"1"]
        with pytest.raises(TimeoutError):
            store.wait(["k"], 0.01)

    @pytest.mark.parametrize("timeout", [30, float("inf"), 1e300, timedelta.max])
    def test_a_timeout_may_be_longer_than_clocks_count(self, pair: Pair, timeout: object) -> None:
        pair[0].set("k", "x")
        pair[0].wait(["k"], timeout)
        pair[0].set_timeout(timeout)
        later = threading.Timer(0.2, pair[1].set, ["later", "y"])
        later.start()
        assert pair[0].get("later") == b"y"  # the answer is waited for
        later.join()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: HashStore("5"),
        lambda path: FileStore(path, "2"),
        lambda path: TCPStore(5, 0, is_master=True),
        lambda path: TCPStore("127.0.0.1", "0", is_master=True),
        lambda path: TCPStore("127.0.0.1", 0, "2", is_master=True),
        lambda path: PrefixStore(5, HashStore()),
        lambda path: PrefixStore(HashStore(), "p"),
    ],
)
def test_a_store_is_not_made_of_the_wrong_types(tmp_path: Path, make) -> None:
    with pytest.raises(TypeError):
        make(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []
