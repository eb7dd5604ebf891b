"""Launches of ranks that fit, that do not, and that wait for each other."""

from __future__ import annotations

from dure.testing.accelerator.launches import Launch, Launches, Part


def collective(number: int, form: str = "all_reduce") -> Launch:
    return Launch([Part("collective", -1, number, form, form)])


def messages(*parts: tuple[str, int, int]) -> Launch:
    return Launch(
        [Part(kind, peer, n, f"{kind} {peer} #{n}", "4 bytes") for kind, peer, n in parts]
    )


def test_a_collective_waits_for_all_other_ranks():
    seen = Launches(3)
    seen.add(0, collective(0))
    seen.add(2, collective(0))
    assert seen.missing(0, collective(0)) == [1]
    assert [*seen.needs(1)] == [("collective", -1, 0)] * 2
    seen.add(1, collective(0))
    assert seen.missing(0, collective(0)) == []
    assert [*seen.needs(1)] == []


def test_messages_wait_for_their_other_ends_by_number():
    seen = Launches(2)
    mine = messages(("send", 1, 1), ("recv", 1, 0))
    seen.add(0, mine)
    seen.add(1, messages(("recv", 0, 0), ("send", 0, 0)))
    assert seen.missing(0, mine) == [1]  # its second receive
    seen.add(1, messages(("recv", 0, 1)))
    assert seen.missing(0, mine) == []


def test_values_are_found_until_they_are_forgotten():
    seen = Launches(2)
    mine = collective(0)
    seen.add(0, mine)
    seen.add(1, Launch([Part("collective", -1, 0, "", "all_reduce", b"ab")]))
    (part,) = mine.parts
    assert seen.found(0, part)[1].values == b"ab"
    seen.forget(0, mine)
    assert seen.found(0, part) == {}
    assert seen.missing(0, mine) == []


def test_counterparts_of_other_forms_are_named():
    seen = Launches(2)
    seen.add(1, collective(0, "broadcast"))
    assert seen.mismatched(0, collective(0)) == {0: "all_reduce", 1: "broadcast"}
    assert seen.mismatched(0, collective(1)) == {}


def test_two_ranks_that_both_send_first_are_deadlocked():
    seen = Launches(2)
    seen.add(0, messages(("send", 1, 0)))
    assert seen.deadlocked(0) == {}
    seen.add(1, messages(("send", 0, 0)))
    circle = {0: "send 1 #0 (waits for rank 1)", 1: "send 0 #0 (waits for rank 0)"}
    assert seen.deadlocked(0) == seen.deadlocked(1) == circle


def test_three_ranks_in_a_circle_are_deadlocked_and_so_is_one_that_waits_for_them():
    seen = Launches(4)
    seen.add(0, messages(("send", 1, 0)))
    seen.add(1, messages(("send", 2, 0)))
    seen.add(3, messages(("recv", 0, 0)))
    assert seen.deadlocked(3) == {}
    seen.add(2, messages(("send", 0, 0)))
    assert [*seen.deadlocked(3)] == [0, 1, 2]
    seen.add(2, messages(("recv", 1, 0)))  # rank 2 has gone on: it knew more
    assert seen.deadlocked(3) == {}


def test_ranks_whose_messages_are_in_one_launch_are_not_deadlocked():
    seen = Launches(2)
    for rank in (0, 1):
        seen.add(rank, messages(("send", 1 - rank, 0), ("recv", 1 - rank, 0)))
    assert seen.deadlocked(0) == {}
    assert seen.missing(0, messages(("send", 1, 0), ("recv", 1, 0))) == []


def test_a_launch_without_parts_says_that_a_rank_has_left():
    seen = Launches(2)
    seen.add(1, Launch([]))
    assert seen.gone == {1}
