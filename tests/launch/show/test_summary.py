"""The summary of a job that failed: what the user reads last."""

import json
import signal
from typing import Any

import pytest

from dure.launch.ranks import child
from dure.launch.show.summary import summary, where
from dure.launch.spec import Crash, Exit, JobResult, RankResult, StackFrame

TRACE = 'Traceback\n  File "a.py", line {line}, in f\nValueError: rank {rank} of 4 is wrong'
LOST = "Traceback\n  boom()\ndure.errors.PeerLost: rank 0 ended\na note on it"
TERM = Exit(signal=15)
USER = StackFrame("/home/me/train.py", 12, "step")


def rank(number: int, exit: Exit = TERM, trace: str = "", **fields: Any) -> RankResult:
    crash = Crash(type="ValueError", message="m", traceback=trace) if trace else None
    fields = {"host": "h", "pid": 100 + number, "crash": crash, **fields}
    return RankResult(rank=number, exit=exit, **fields)


def shown(*ranks: RankResult, first: RankResult | None = None, code: int = 1, **how: Any) -> str:
    first = first or ranks[0]
    result = JobResult(exit_code=code, ranks=ranks, elapsed_s=1, first_failure=first)
    return "\n".join(summary(result, **how))


def waiting(number: int) -> RankResult:
    last = f"all_reduce #4, ended 0.{number} s earlier"
    return rank(number, ended_by_launcher=True, stack=(USER,), last=last, progress="step 7 of 9")


def test_summary_names_every_rank_and_those_with_the_same_text_together() -> None:
    ranks = [
        *(rank(n, Exit(code=1), TRACE.format(line=1, rank=n)) for n in range(3)),
        rank(3, Exit(code=1), TRACE.format(line=9, rank=3)),
        rank(4, Exit(code=1), LOST),
        *map(waiting, (5, 6)),
        rank(7, finished=True, ended_by_launcher=True),
        rank(8, finished=True),  # a SIGTERM to all processes
        rank(9, ended_by_launcher=True),
        rank(10, Exit(signal=9)),
        rank(11, Exit(code=0)),
    ]
    assert (
        shown(*ranks)
        == """\
rank 0 on h (pid 100) failed first: it raised ValueError
  | Traceback
  |   File "a.py", line 1, in f
  | ValueError: rank 0 of 4 is wrong
ranks 1-2 failed in the same way
where the others were:
  rank 3 (pid 103): raised the same ValueError, at a.py:9 in f
  rank 4 (pid 104): failed as well: dure.errors.PeerLost: rank 0 ended
  ranks 5-6: /home/me/train.py:12 in step
    its last operation: all_reduce #4, ended 0.5 s earlier
    it had come to step 7 of 9
  ranks 7-8: had finished its program
  rank 9 (pid 109): did not answer (starting, ending, or not a Python program)
  rank 10 (pid 110): had ended: killed by SIGKILL
  rank 11 (pid 111): ended with exit code 0"""
    )


@pytest.mark.parametrize(
    ("failure", "how"),
    [
        (rank(0, Exit(signal=signal.SIGKILL)), "killed by SIGKILL"),
        (rank(0, Exit(signal=signal.SIGRTMIN + 1)), "killed by signal 35"),
        (rank(0, Exit(signal=signal.SIGKILL), TRACE), "killed by SIGKILL"),
        (rank(0, Exit(code=3)), "exit code 3"),
    ],
)
def test_first_line_shows_how_the_first_rank_failed(failure: RankResult, how: str) -> None:
    assert how in shown(failure).splitlines()[0]


def test_traceback_is_not_repeated_if_the_rank_was_seen_to_write_it() -> None:
    text = shown(rank(0, Exit(code=1), TRACE), shown=lambda rank, text: True)
    assert "a.py" not in text
    assert "ValueError: rank" in text


def test_summary_of_many_ranks_is_short() -> None:
    others = [rank(n, Exit(code=1), f"E: {'x' * n}") for n in range(1, 200)]
    assert shown(rank(0, Exit(code=1), "E: first"), *others).count("\n") < 40


def test_rank_that_was_replaced_failed_first_and_the_job_succeeded() -> None:
    dead = rank(1, Exit(signal=signal.SIGKILL), pid=7)
    text = shown(rank(0, Exit(code=0)), rank(1, Exit(code=0)), first=dead, code=0)
    assert "pid 7" in text.splitlines()[0]
    assert "it was replaced, and the job succeeded:\n  ranks 0-1: " in text


def test_a_rank_that_ended_well_is_not_where_it_was_when_it_was_last_asked() -> None:
    asked = {"stack": (USER,), "last": "all_reduce #4, still in it", "progress": "step 7 of 9"}
    text = shown(rank(0, Exit(code=1)), rank(1, Exit(code=0), **asked))
    assert text.endswith("\n  rank 1 (pid 101): ended with exit code 0")


def test_where_names_the_users_line_and_what_it_called() -> None:
    library = StackFrame(json.__file__, 5, "loads")
    assert where((library, USER)).startswith("/home/me/train.py:12 in step (inside loads")
    importer = StackFrame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed")
    for stack in ((USER,), (importer, USER)):
        assert where(stack) == "/home/me/train.py:12 in step"
    package = StackFrame("/opt/lib/python3.11/site-packages/trainer/main.py", 9, "run")
    assert where((library, package, library)).startswith(str(package))
    for without in ((), (library,), (StackFrame(child.__file__, 5, "main"), library)):
        assert where(without) == "in no line of the program (starting or ending)"


def test_ranks_of_a_summary_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[object] = []
    monkeypatch.setattr(RankResult, "__eq__", lambda a, b: compared.append(b) or a is b)
    trace = [TRACE.format(line=1 + n % 2, rank=n) for n in range(256)]
    text = shown(*(rank(n, Exit(code=1), trace[n]) for n in range(256)))
    assert "253,254 failed in the same way" not in text
    assert "2,4,6" in text and len(text.splitlines()) < 12
    assert not compared
