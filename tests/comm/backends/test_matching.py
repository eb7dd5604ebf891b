"""Matching: which message goes to which receive, and what is refused."""

from __future__ import annotations

from dure.comm.backends.matching import Matching


def make() -> tuple[Matching[str, str], list[tuple[str, str]]]:
    """A message and its receive begin with the same letter; the rest is the length."""
    refused: list[tuple[str, str]] = []
    matching = Matching[str, str](
        lambda receive, message: receive[0] == message[0],
        lambda receive, message: receive[1:] == message[1:],
        lambda receive, message: refused.append((receive, message)),
    )
    return matching, refused


def test_first_message_that_meets_a_receive_is_taken_or_refuses_it_and_is_kept() -> None:
    matching, refused = make()
    assert [matching.arrive(m) for m in ("a1", "b1", "b2")] == [None] * 3
    assert matching.post("b2") is None
    assert refused == [("b2", "b1")]
    assert matching.receives == []
    assert [matching.post(r) for r in ("b1", "b2", "b3")] == ["b1", "b2", None]
    assert matching.messages == ["a1"]
    assert matching.receives == ["b3"]


def test_message_goes_to_the_first_receive_with_room_and_those_before_are_refused() -> None:
    matching, refused = make()
    assert [matching.post(r) for r in ("a1", "b1", "b2", "b2")] == [None] * 4
    assert matching.arrive("b2") == "b2"
    assert refused == [("b1", "b2")]
    assert matching.receives == ["a1", "b2"]
    assert matching.messages == []
