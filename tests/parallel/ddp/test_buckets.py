"""Plans of buckets: who travels with whom, and in what order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.ddp.buckets import GradientSize, plan_buckets


def sizes(*num_bytes: int) -> list[GradientSize]:
    return [GradientSize(num_bytes=n) for n in num_bytes]


def test_plan_last_cap_holds_for_all_further_buckets():
    plan = plan_buckets(sizes(*[10] * 7), caps=(10, 30, 20))
    assert plan == ((6,), (5, 4, 3), (2, 1), (0,))


def test_plan_follows_a_given_order():
    plan = plan_buckets(sizes(10, 10, 10), caps=(20, 20), order=[1, 0, 2])
    assert plan == ((1, 0), (2,))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), max_size=40),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_plan_holds_each_gradient_once_and_closes_in_time(entries, cap, first_cap):
    gradients = [GradientSize(num_bytes=n, kind=k) for n, k in entries]
    plan = plan_buckets(gradients, caps=(min(first_cap, cap), cap))
    assert sorted(i for bucket in plan for i in bucket) == list(range(len(gradients)))
    for bucket in plan:
        assert len({gradients[i].kind for i in bucket}) == 1
        assert list(bucket) == sorted(bucket, reverse=True)
        before_last = sum(gradients[i].num_bytes for i in bucket[:-1])
        assert before_last < cap
