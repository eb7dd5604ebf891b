"""The contract of `Store`: one class of tests, run over every kind of store."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.errors import QueueEmptyError, StoreError, StoreTimeout
from dure.store import Store

from .conftest import KINDS, TIMEOUT, opened

SOON = timedelta(milliseconds=30)
Pair = tuple[Store, Store]


class TestContract:
    def test_wait_needs_all_keys_at_one_time(self, pair: Pair) -> None:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(pair[1].wait, ["a", "b"])
            pair[0].set("a", "")
            pair[0].delete_key("a")
            pair[0].set("b", "")
            assert not done.done()
            pair[0].set("a", "")
            done.result()

    def test_a_queue_gives_each_value_once_in_order(self, pair: Pair) -> None:
        first, second = pair
        assert first.queue_len("q") == 0
        with pytest.raises(QueueEmptyError):
            second.queue_pop("q", block=False)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(second.queue_pop, "q")
            first.queue_push("q", "a")
            assert waits.result() == b"a"
        for value in ("b", b"c", "d"):
            first.queue_push("q", value)
        assert second.queue_len("q") == 3
        with ThreadPoolExecutor(2) as pool:
            popped = [pool.submit(store.queue_pop, "q", False) for store in (first, second)]
            assert {p.result() for p in popped} == {b"b", b"c"}
        assert (first.queue_pop("q"), second.queue_len("q")) == (b"d", 0)

    @pytest.mark.parametrize("block", [True, False])
    def test_many_pop_one_queue_and_each_gets_a_value(self, pair: Pair, block: bool) -> None:
        values = [str(number).encode() for number in range(80)]
        for value in values:
            pair[0].queue_push("q", value)

        def pops(place: int) -> list[bytes]:
            return [pair[place % 2].queue_pop("q", block) for _ in range(len(values) // 4)]

        with ThreadPoolExecutor(4) as pool:
            popped = [value for part in pool.map(pops, range(4)) for value in part]
        assert sorted(popped) == sorted(values)

    def test_a_barrier_is_passed_together_and_again(self, pair: Pair) -> None:
        for _ in range(2):
            with pytest.raises(StoreTimeout):
                pair[0].barrier("b", 2, SOON)
            pair[1].barrier("b", 2)

    def test_a_clone_has_the_keys_and_its_own_timeout(self, pair: Pair) -> None:
        clone = pair[1].clone()
        try:
            clone.set_timeout(SOON)
            clone.set("k", "v")
            assert type(clone) is type(pair[1])
            assert (pair[0].get("k"), pair[1].timeout) == (b"v", TIMEOUT)
        finally:
            clone.close()
        assert pair[1].get("k") == b"v"

    def test_several_keys_are_deleted_and_those_that_existed_counted(self, pair: Pair) -> None:
        one, other = pair
        one.multi_set(["a", "b", "c"], ["", "", ""])
        assert other.delete_keys(["a", "none", "c"]) == 2
        assert one.missing_keys(["a", "b", "c"]) == ("a", "c")
        assert one.delete_keys([]) == 0

    def test_wait_too_long_names_the_missing_keys(self, pair: Pair) -> None:
        pair[0].set("there", "")
        pair[1].set_timeout(SOON)
        with pytest.raises(StoreTimeout) as caught:
            pair[1].multi_get(["there", "nope"])
        assert [key.rpartition("/")[2] for key in caught.value.keys] == ["nope"]
        assert caught.value.elapsed_s is not None
        assert caught.value.elapsed_s >= SOON.total_seconds()
        assert isinstance(caught.value, TimeoutError)

    def test_add_from_many_threads_loses_nothing(self, pair: Pair) -> None:
        with ThreadPoolExecutor(4) as pool:
            sums = list(pool.map(lambda i: pair[i % 2].add("n", 1), range(40)))
        assert sorted(sums) == list(range(1, 41))

    def test_compare_set_has_one_winner(self, pair: Pair) -> None:
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda i: pair[i % 2].compare_set("k", "", str(i)), range(16)))
        assert len(set(got)) == 1

    def test_check_delete_and_count(self, pair: Pair) -> None:
        pair[0].multi_set(["b", "a"], ["1", b"2"])
        assert pair[1].check(["a", "b"])
        assert not pair[1].check(["a", "c"])
        assert pair[1].num_keys() == 2
        assert pair[1].list_keys() == ["a", "b"]
        assert pair[1].delete_key("a")
        assert not pair[0].delete_key("a")
        assert pair[0].list_keys() == ["b"]

    def test_multi_set_of_unequal_lengths_is_refused(self, pair: Pair) -> None:
        with pytest.raises(ValueError):
            pair[0].multi_set(["a", "b"], ["1"])

    def test_a_large_value_comes_back_whole(self, pair: Pair) -> None:
        value = bytes(range(256)) * 4096  # as long as etcd takes
        pair[0].set("big", value)
        assert pair[1].get("big") == value


KEYS = st.sampled_from(["a", "b", "c"])
TEXTS = st.sampled_from([b"", b"1", b"-3", b"x", "두".encode()])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, TEXTS),
        st.tuples(st.just("append"), KEYS, TEXTS),
        st.tuples(st.just("add"), KEYS, st.integers(-(2**62), 2**62)),
        st.tuples(st.just("compare_set"), KEYS, TEXTS, TEXTS),
        st.tuples(st.just("delete_key"), KEYS),
    ),
    max_size=20,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(steps=STEPS)
def test_any_sequence_of_operations_equals_a_dictionary(kind: str, steps: list[tuple]) -> None:
    model: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder, opened(kind, Path(folder)) as pair:
        for turn, (op, key, *values) in enumerate(steps):
            expected = step(model, op, key, *values)
            try:
                got = getattr(pair[turn % 2], op)(key, *values)
            except StoreError:
                got = StoreError
            assert got == expected
        assert {key: pair[0].get(key) for key in pair[1].list_keys()} == model


def step(model: dict[str, bytes], op: str, key: str, *values):
    """Do to a dictionary what the store's documentation says."""
    if op == "delete_key":
        return model.pop(key, None) is not None
    if op == "set":
        model[key] = values[0]
    elif op == "append":
        model[key] = model.get(key, b"") + values[0]
    elif op == "add":
        try:
            total = int(model.get(key, b"0") or b"0") + values[0]
        except ValueError:
            return StoreError
        if not -(2**63) <= total < 2**63:
            return StoreError
        model[key] = str(total).encode()
        return total
    elif key not in model:
        if values[0]:
            return values[0]
        model[key] = values[1]
        return values[1]
    else:
        if model[key] == values[0]:
            model[key] = values[1]
        return model[key]
    return None
