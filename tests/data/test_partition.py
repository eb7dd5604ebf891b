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


def test_partition_is_set_by_its_seed():
    one, same, other = (DataPartitioner(range(100), seed=s).partitions for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_partition_use_maps_to_the_samples():
    letters = [chr(97 + i) for i in range(10)]
    part = DataPartitioner(letters, (0.5, 0.5)).use(1)
    assert len(part) == 5
    assert [part[i] for i in range(5)] == [letters[i] for i in part.index]


@pytest.mark.parametrize("sizes", [(), (0.7, 0.4), (-0.1, 1.1), (math.nan,), (math.inf,)])
def test_partition_with_impossible_sizes_is_refused(sizes):
    with pytest.raises(UsageError):
        DataPartitioner(range(10), sizes)
    for number in (-1, 3):
        with pytest.raises(UsageError):
            DataPartitioner(range(10)).use(number)
