"""Messages arrive once and in order, whatever happens to connections."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dure.rpc.links import Numbered, ReliableLink


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000)), max_size=80))
def test_all_arrive_once_and_in_order(moves: list[tuple[int, int]]) -> None:
    ends = [ReliableLink(), ReliableLink()]
    under_way: list[list[Numbered]] = [[], []]  # by sender
    said: list[list[bytes]] = [[], []]
    heard: list[list[bytes]] = [[], []]

    def deliver(by: int, which: int) -> None:
        if under_way[by]:
            message = under_way[by].pop(which % len(under_way[by]))
            heard[by] += ends[1 - by].receive(message)

    for kind, number in moves:
        by = number % 2
        match kind:
            case 0:
                body = b"%d" % len(said[by])
                said[by].append(body)
                under_way[by].append(ends[by].send(body))
            case 1:
                deliver(by, number // 2)  # in any order
            case 2:
                deliver(by, 0)
            case 3:
                under_way[by] = [m for n, m in enumerate(under_way[by]) if number >> (n + 1) & 1]
                under_way[by] += ends[by].again()
            case 4:
                under_way[by].append(ends[by].acknowledge())
    for _ in range(2):
        for by in (0, 1):
            under_way[by] += ends[by].again()
            while under_way[by]:
                deliver(by, 0)
            under_way[1 - by].append(ends[1 - by].acknowledge())
    assert heard == said
    for by in (0, 1):
        while under_way[by]:
            deliver(by, 0)
    assert [end.kept for end in ends] == [{}, {}]


def test_who_has_received_owes_until_something_is_sent() -> None:
    one, two = ReliableLink(), ReliableLink()
    first = one.send(b"a")
    assert (first.number, len(one.kept), two.acknowledged) == (1, 1, 0)
    assert two.receive(first) == [b"a"]
    assert two.acknowledged < two.received
    answer = two.send(b"b")
    assert two.acknowledged == two.received
    assert one.receive(answer) == [b"b"]
    assert len(one.kept) == 0
    assert two.receive(first) == []  # it came again, so the answer may be lost
    assert two.acknowledged < two.received


def test_what_comes_early_waits_for_what_is_before_it() -> None:
    one, two = ReliableLink(), ReliableLink()
    first, second = one.send(b"a"), one.send(b"b")
    assert two.receive(second) == []
    assert two.receive(first) == [b"a", b"b"]
