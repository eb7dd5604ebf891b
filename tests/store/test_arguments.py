"""Arguments of the wrong type: refused by every kind of store, and nothing has changed."""

# Arguments are of the wrong type on purpose.
# pyright: reportArgumentType=false

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from dure.store import FileStore, HashStore, PrefixStore, Store, TCPStore

SOON = timedelta(milliseconds=30)
Pair = tuple[Store, Store]

NO_VALUES = [5, True, 1.5, None, ["x"]]
NO_KEYS = [3, None, ("a",), b"\xff", "\ud800"]


class TestEveryStore:
    @pytest.mark.parametrize("value", NO_VALUES)
    def test_a_value_that_is_no_text_or_bytes_is_refused(self, pair: Pair, value: object) -> None:
        store, other = pair
        for call in (
            lambda: store.set("k", value),
            lambda: store.append("k", value),
            lambda: store.compare_set("k", "", value),
            lambda: store.compare_set("k", value, "x"),
            lambda: store.multi_set(["j", "k"], ["x", value]),
        ):
            with pytest.raises(TypeError):
                call()
        assert other.list_keys() == []

    @pytest.mark.parametrize("key", NO_KEYS)
    def test_a_key_that_is_no_text_is_refused(self, pair: Pair, key: object) -> None:
        store, other = pair
        for call in (
            lambda: store.set(key, "x"),
            lambda: store.get(key),
            lambda: store.add(key, 1),
            lambda: store.append(key, "x"),
            lambda: store.compare_set(key, "", "x"),
            lambda: store.delete_key(key),
            lambda: store.check(["k", key]),
            lambda: store.wait(["k", key], SOON),
            lambda: store.multi_get([key]),
            lambda: store.multi_set(["k", key], ["x", "x"]),
        ):
            with pytest.raises(TypeError):
                call()
        assert other.list_keys() == []

    @pytest.mark.parametrize("keys", ["ab", b"ab", 2, None])
    def test_one_string_in_the_place_of_a_list_of_keys_is_refused(
        self, pair: Pair, keys: object
    ) -> None:
        store = pair[0]
        store.multi_set(["a", "b"], ["1", "2"])  # its letters are keys
        for call in (
            lambda: store.check(keys),
            lambda: store.wait(keys, SOON),
            lambda: store.multi_get(keys),
            lambda: store.multi_set(keys, ["3", "4"]),
            lambda: store.multi_set(["a", "b"], keys),
        ):
            with pytest.raises(TypeError):
                call()
        assert store.multi_get(["a", "b"]) == [b"1", b"2"]

    @pytest.mark.parametrize("amount", [1.5, 1.0, "1", None])
    def test_an_amount_that_is_no_integer_is_refused(self, pair: Pair, amount: object) -> None:
        with pytest.raises(TypeError):
            pair[0].add("n", amount)
        assert not pair[1].check(["n"])

    def test_integers_of_numpy_are_added_as_int(self, pair: Pair) -> None:
        got = pair[0].add("n", np.int64(3))
        assert type(got) is int
        assert got == 3
        assert pair[1].add("n", True) == 4  # as in torch

    def test_a_key_in_bytes_is_the_key_in_text(self, pair: Pair) -> None:
        pair[0].set("두레".encode(), bytearray(b"x"))
        assert pair[1].list_keys() == ["두레"]
        assert pair[1].get("두레") == b"x"
        assert pair[0].check(["두레".encode()])

    def test_keys_may_come_from_any_iterable(self, pair: Pair) -> None:
        pair[0].multi_set((key for key in "ab"), {"1": 0, "2": 0}.keys())
        assert pair[1].check({"a", "b"})
        assert pair[1].multi_get(key for key in "ba") == [b"2", b"1"]

    @pytest.mark.parametrize("timeout", ["1", True, [1], float("nan")])
    def test_a_timeout_that_is_no_duration_is_refused(self, pair: Pair, timeout: object) -> None:
        before = pair[0].timeout
        with pytest.raises(TypeError):
            pair[0].wait(["k"], timeout)
        with pytest.raises(TypeError):
            pair[0].set_timeout(timeout)
        assert pair[0].timeout == before

    def test_a_timeout_may_be_a_number_of_seconds(self, pair: Pair) -> None:
        with pytest.raises(TimeoutError):
            pair[0].wait(["k"], 0.01)
        pair[0].set_timeout(30)
        assert pair[0].timeout == timedelta(seconds=30)

    @pytest.mark.parametrize("timeout", [float("inf"), 1e300, timedelta.max])
    def test_a_timeout_may_be_longer_than_clocks_count(self, pair: Pair, timeout: object) -> None:
        pair[0].set("k", "x")
        pair[0].wait(["k"], timeout)
        pair[0].set_timeout(timeout)
        assert pair[0].get("k") == b"x"


@pytest.mark.parametrize(
    "make",
    [
        lambda path: HashStore("5"),
        lambda path: FileStore(path, "2"),
        lambda path: TCPStore(5, 0, is_master=True),
        lambda path: TCPStore("127.0.0.1", "0", is_master=True),
        lambda path: TCPStore("127.0.0.1", 0, "2", is_master=True),
        lambda path: TCPStore("127.0.0.1", 0, is_master=True, timeout="5"),
        lambda path: PrefixStore(5, HashStore()),
        lambda path: PrefixStore(HashStore(), "p"),
    ],
)
def test_a_store_is_not_made_of_the_wrong_types(tmp_path: Path, make) -> None:
    with pytest.raises(TypeError):
        make(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []
