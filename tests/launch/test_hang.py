"""When a round hangs, from what was seen of its ranks."""

from dure.launch.hang import HangDetector, likely_cause

WAITS = "barrier #2 of group 'world', still in it"


def ended(number: int, ago_s: float) -> str:
    return f"barrier #{number} of group 'world' at train.py:4, ended {ago_s} s earlier"


def test_ranks_are_asked_twice_and_a_round_without_change_hangs() -> None:
    detector = HangDetector(10.0, now=100.0)
    assert detector.wake_at == 105.0
    assert detector.tick({0: "", 1: ""}, 104.0) == ""
    assert detector.tick({0: "", 1: ""}, 105.0) == "ask"
    assert detector.tick({0: WAITS, 1: ended(1, 3.5)}, 110.0) == "ask"
    assert detector.tick({0: WAITS, 1: ended(1, 8.5)}, 110.5) == ""
    assert detector.tick({0: WAITS, 1: ended(1, 8.5)}, 111.0) == "hung"


def test_an_operation_that_has_finished_is_a_sign_of_work() -> None:
    detector = HangDetector(10.0, now=0.0)
    detector.tick({}, 5.0)
    detector.tick({0: ended(1, 3.5)}, 10.0)
    assert detector.tick({0: ended(2, 3.5)}, 11.0) == ""
    assert detector.quiet_s(11.0) == 0.0
    assert detector.wake_at == 16.0


def test_output_between_the_questions_starts_the_time_again() -> None:
    detector = HangDetector(10.0, now=0.0)
    detector.tick({0: WAITS}, 5.0)
    detector.active(9.0)
    assert detector.wake_at == 14.0
    assert detector.tick({0: WAITS}, 10.0) == ""


def test_a_rank_that_does_not_answer_shows_no_sign_of_work() -> None:
    detector = HangDetector(4.0, now=0.0)
    detector.tick({}, 2.0)
    detector.tick({0: WAITS, 1: ended(1, 1)}, 4.0)
    assert detector.tick({0: "", 1: ended(1, 2)}, 5.0) == "hung"


def test_the_rank_that_waits_for_no_other_is_the_likely_cause() -> None:
    assert likely_cause({0: WAITS, 1: WAITS, 2: ended(1, 3), 3: ""}) == 2
    assert likely_cause({4: WAITS, 1: WAITS}) == 1


def test_ranks_that_wait_for_another_host_get_the_time_once_more() -> None:
    detector = HangDetector(4.0, now=0.0, alone=False)
    for now, answer in (2.0, "ask"), (4.0, "ask"), (5.0, ""), (7.0, "ask"), (9.0, "ask"):
        assert detector.tick({0: WAITS, 1: WAITS}, now) == answer
    assert detector.tick({0: WAITS, 1: WAITS}, 10.0) == "hung"


def test_a_host_with_a_rank_that_waits_for_none_does_not_wait_longer() -> None:
    detector = HangDetector(4.0, now=0.0, alone=False)
    detector.tick({}, 2.0)
    detector.tick({0: WAITS, 1: ended(1, 1)}, 4.0)
    assert detector.tick({0: WAITS, 1: ended(1, 2)}, 5.0) == "hung"
