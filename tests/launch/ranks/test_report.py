"""What ranks tell of their end, and whose failure explains the others'."""

import json
from typing import Any

import pytest

from dure.launch.ranks import child
from dure.launch.ranks.report import ReportedStep, ReportReader, root_cause
from dure.launch.spec import Crash, Exit, RankResult, StackFrame

CHILD = child.__file__
STACK = f"""Stack (most recent call first):
  File "/home/me/a b/train.py", line 12 in step
  File "/home/me/a b/train.py", line ??? in <lambda>
  File "{CHILD}", line 90 in main
  File "{CHILD}", line 200 in <module>
"""


def crash(kind: str = "ValueError", peer: int | None = None) -> Crash:
    return Crash(type=kind, message="m", traceback=f"Traceback\n{kind}: m\n", peer=peer)


def rank(number: int, exit: Exit, crash: Crash | None = None, ended: bool = False) -> RankResult:
    return RankResult(
        rank=number, host="h", pid=100 + number, exit=exit, crash=crash, ended_by_launcher=ended
    )


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_reader_understands_stack_and_crash_however_cut(size: int) -> None:
    line = json.dumps({"crash": {"type": "E", "message": "é\n", "traceback": "t", "peer": 3}})
    data = (STACK + "\n" + line + "\n").encode()
    reader = ReportReader()
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
    assert reader.answered
    assert reader.stack == (
        StackFrame("/home/me/a b/train.py", 12, "step"),
        StackFrame("/home/me/a b/train.py", 0, "<lambda>"),
    )
    assert reader.crash == Crash(type="E", message="é\n", traceback="t", peer=3)


def test_rank_whose_last_operation_failed_has_not_answered_until_it_reports_its_crash() -> None:
    reader = ReportReader()
    reader.feed(STACK.encode())
    reader.feed(
        b'{"answers": true}\n{"last": "all_reduce #1, failed with PeerLost 0.1 s earlier"}\n'
    )
    assert not reader.answered
    reader.feed(b'{"crash": {"type": "PeerLost", "message": "m", "traceback": "t"}}\n')
    assert reader.answered


def test_frames_of_a_record_that_is_written_after_the_program_are_left_out() -> None:
    reader = ReportReader()
    reader.feed(
        f"""Stack (most recent call first):
  File "/lib/dure/trace/files.py", line 182 in _threads
  File "{CHILD}", line 88 in become
  File "{CHILD}", line 70 in main
  File "{CHILD}", line 200 in <module>
""".encode()
    )
    assert reader.answered
    assert reader.stack == ()
    reader.feed(
        f"""Stack (most recent call first):
  File "/home/me/train.py", line 12 in <module>
  File "{CHILD}", line 120 in _run_script
  File "{CHILD}", line 82 in become
  ...
""".encode()  # too deep
    )
    assert reader.stack == (StackFrame("/home/me/train.py", 12, "<module>"),)


def test_reader_waits_for_the_last_operation_of_a_rank_that_tells_it() -> None:
    reader = ReportReader()
    reader.feed(
        b'{"answers": true}\n{"progress": {"step": 3, "total": 9, "values": {"loss": 1}}}\n'
    )
    reader.feed(STACK.encode())
    assert not reader.answered
    reader.feed(b'{"last": "all_reduce #4"}\n')
    assert reader.answered
    assert reader.last == "all_reduce #4"
    assert reader.step == ReportedStep(step=3, total=9, values={"loss": 1})
    assert not reader.elastic
    reader.feed(b'{"elastic": true}\n')
    assert reader.elastic and reader.crash is None


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        (((1, 2), (15, None, True), (9, None)), 2),  # whom the survivor lost
        (((1, 1), (0, None)), 0),  # the blamed rank has not failed
        (((1, 1), (1, 0)), 1),  # ranks that blame each other
    ],
)
def test_root_cause_is_the_last_that_is_blamed(ranks: Any, cause: int) -> None:
    """Of each rank: its exit code, the rank that it blames, and whether it was ended."""
    results = tuple(
        rank(n, Exit(code=code), None if peer is None else crash("PeerLost", peer=peer), *ended)
        for n, (code, peer, *ended) in enumerate(ranks)
    )
    assert root_cause(results[0], results) is results[cause]
