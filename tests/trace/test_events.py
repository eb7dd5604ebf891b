"""Events, hooks and the ring buffer."""

import pytest

from dure import trace


@pytest.fixture
def seen():
    """Events of a hook that lives as long as the test: ("before" | "after", event)."""
    events = []
    hook = trace.add_hook(
        before=lambda e: events.append(("before", e)), after=lambda e: events.append(("after", e))
    )
    yield events
    trace.remove_hook(hook)


def test_span_of_a_block_that_succeeds_emits_start_and_end(seen):
    with trace.span(trace.Event(group="g", op="all_reduce", seq=7, nbytes=64)):
        pass
    (first, started), (last, ended) = seen
    assert (first, last) == ("before", "after")
    assert (started.state, ended.state) == (trace.State.STARTED, trace.State.SUCCEEDED)
    assert started.start_ns == ended.start_ns and ended.end_ns >= ended.start_ns
    assert started.duration_ns == 0 and ended.duration_ns == ended.end_ns - ended.start_ns
    assert (ended.group, ended.op, ended.seq, ended.nbytes) == ("g", "all_reduce", 7, 64)


def test_span_of_a_block_that_raises_emits_a_failure_and_reraises(seen):
    with pytest.raises(ZeroDivisionError), trace.span(trace.Event(group="g", op="send")):
        raise ZeroDivisionError
    assert seen[-1][1].state is trace.State.FAILED
    assert seen[-1][1].error == "ZeroDivisionError"


def test_hooks_nest_and_are_removed_once():
    order = []
    outer = trace.add_hook(before=lambda e: order.append("o<"), after=lambda e: order.append("o>"))
    inner = trace.add_hook(before=lambda e: order.append("i<"), after=lambda e: order.append("i>"))
    with trace.span(trace.Event(group="g", op="barrier")):
        pass
    for hook in (outer, inner, inner):
        trace.remove_hook(hook)
    with trace.span(trace.Event(group="g", op="barrier")):
        pass
    assert order == ["o<", "i<", "i>", "o>"]
    assert outer not in trace.hooks and inner not in trace.hooks


def test_ring_keeps_the_last_events_and_counts_all():
    ring = trace.Ring(3)
    for seq in range(5):
        ring.append(trace.Event(group="g", op="barrier", seq=seq))
    assert [e.seq for e in ring.snapshot()] == [2, 3, 4]
    assert ring.num_seen == 5
    ring.clear()
    assert ring.snapshot() == []
