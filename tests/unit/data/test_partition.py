"""DataPartitioner: every sample in exactly one part, the same cuts on every rank."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.data import DataPartitioner
from dure.errors import UsageError


@given(count=st.integers(0, 500), weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=9))
def test_partition_with_fractions_summing_to_one_holds_each_sample_once(count, weights):
    sizes = [w / sum(weights) for w in weights]
    parts = DataPartitioner(range(count), sizes).partitions
    assert sorted(i for part in parts for i in part) == list(range(count))
    assert all(abs(len(p) - f * count) <= 1 + 1e-6 for p, f in zip(parts, sizes, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_partition_into_equal_fractions_differs_by_one_at_most(ranks):
    lengths = [len(p) for p in DataPartitioner(range(1000), [1 / ranks] * ranks).partitions]
    assert sum(lengths) == 1000
    assert max(lengths) - min(lengths) <= 1


def test_partition_defaults_are_seven_two_one():
    cut = DataPartitioner(range(1797))
    assert [len(p) for p in cut.partitions] == [1258, 359, 180]


def test_partition_is_set_by_its_seed():
    one, same, other = (DataPartitioner(range(100), seed=s).partitions for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_partition_use_maps_to_the_samples():
    letters = [chr(97 + i) for i in range(10)]
    part = DataPartitioner(letters, (0.5, 0.5)).use(1)
    assert len(part) == 5
    assert [part[i] for i in range(5)] == [letters[i] for i in part.index]


def test_partition_with_less_than_the_whole_leaves_the_rest_out():
    parts = DataPartitioner(range(10), (0.2, 0.3)).partitions
    assert [len(p) for p in parts] == [2, 3]


@pytest.mark.parametrize("sizes", [(), (0.7, 0.4), (-0.1, 1.1), (math.nan,), (math.inf,)])
def test_partition_with_impossible_sizes_is_refused(sizes):
    with pytest.raises(UsageError):
        DataPartitioner(range(10), sizes)


@pytest.mark.parametrize("number", [-1, 3])
def test_partition_use_of_a_part_that_is_not_there_is_refused(number):
    with pytest.raises(UsageError):
        DataPartitioner(range(10)).use(number)
