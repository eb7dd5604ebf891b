"""The summary of a job that failed: what the user reads last."""

from __future__ import annotations

import dataclasses
import json
import signal
from typing import Any

from dure.launch.ranks import child
from dure.launch.ranks.report import ReportReader
from dure.launch.show.summary import summary, where
from dure.launch.spec import Crash, Exit, Frame, JobResult, RankResult
from dure.trace.frames import is_library


def crash(kind: str = "ValueError", peer: int | None = None) -> Crash:
    return Crash(type=kind, message="m", traceback=f"Traceback\n{kind}: m\n", peer=peer)


def rank(number: int, exit: Exit, crash: Crash | None = None, ended: bool = False) -> RankResult:
    return RankResult(
        rank=number, host="h", pid=100 + number, exit=exit, crash=crash, ended_by_launcher=ended
    )


def test_where_names_the_users_line_and_what_it_called() -> None:
    library = Frame(json.__file__, 5, "loads")
    user = Frame("/home/me/train.py", 12, "step")
    assert where((library, user)).startswith("/home/me/train.py:12 in step")
    assert where((user,)) == "/home/me/train.py:12 in step"
    importer = Frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed")
    assert where((importer, user)) == "/home/me/train.py:12 in step"
    package = Frame("/opt/lib/python3.11/site-packages/trainer/main.py", 9, "run")
    assert where((library, package, library)).startswith(str(package))
    for without in ((), (library,), (Frame(child.__file__, 5, "main"), library)):
        assert where(without) == "in no line of the program (starting or ending)"


def test_summary_of_failure_names_every_rank_and_how_the_first_failed() -> None:
    ranks = (
        rank(0, Exit(code=1), crash("KeyError")),
        rank(1, Exit(signal=signal.SIGKILL)),
        rank(2, Exit(signal=signal.SIGRTMIN + 1)),
        rank(3, Exit(signal=15), ended=True),
        rank(4, Exit(code=3), crash("SystemExit")),
        rank(5, Exit(signal=signal.SIGKILL), crash()),
    )
    ends = (
        "it raised KeyError",
        "killed by SIGKILL",
        "killed by signal 35",
        "",
        "exit code 3",
        "SIGKILL",
    )
    for failure, how in zip(ranks, ends, strict=True):
        text = told(ranks, failure)
        assert all(f"rank {number}" in "\n".join(text) for number in range(5))
        assert f"pid {failure.pid}" in text[0]
        assert how in text[0]


def test_summary_tells_the_error_of_the_others_not_its_notes() -> None:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    boom()\n'
        "dure.errors.PeerLost: the process of rank 0 ended\na note on it"
    )
    second = dataclasses.replace(crash("PeerLost"), traceback=text)
    lines = told((rank(0, Exit(code=1), crash()), rank(1, Exit(code=1), second)))
    assert lines[-1].endswith("failed as well: dure.errors.PeerLost: the process of rank 0 ended")


def failed(number: int, text: str, **changes: Any) -> RankResult:
    own = Crash(type="E", message="m", traceback=text)
    return dataclasses.replace(rank(number, Exit(code=1), own), **changes)


def told(
    ranks: tuple[RankResult, ...],
    failure: RankResult | None = None,
    *,
    code: int = 1,
    shown: bool = False,
) -> list[str]:
    failure = failure or ranks[0]
    result = JobResult(exit_code=code, ranks=ranks, elapsed_s=1, first_failure=failure)
    return summary(result, lambda rank, text: shown)


TRACE = 'Traceback\n  File "a.py", line 1, in f\nE: rank {} of 4 is wrong'


def test_ranks_that_failed_alike_are_named_together() -> None:
    ranks = tuple(failed(n, TRACE.format(n)) for n in range(4))
    lines = told(ranks)
    assert [line for line in lines if "same way" in line] == ["ranks 1-3 failed in the same way"]
    assert sum("E: rank" in line for line in lines) == 1


def test_traceback_is_not_repeated_where_the_rank_was_seen_to_write_it() -> None:
    ranks = (failed(0, TRACE.format(0)),)
    assert sum("a.py" in line for line in told(ranks)) == 1
    assert sum("a.py" in line for line in told(ranks, shown=True)) == 0


def test_others_are_told_with_their_last_operation_and_those_alike_together() -> None:
    stack = (Frame("/home/me/train.py", 12, "step"),)
    waiting = [
        dataclasses.replace(
            rank(n, Exit(signal=15), ended=True),
            stack=stack,
            last=f"all_reduce #4, ended 0.{n} s earlier",
            progress="step 7 of 9",
        )
        for n in (1, 2, 3)
    ]
    lines = told((failed(0, "E: x"), *waiting))
    at = lines.index("where the others were:")
    assert len(lines) == at + 4
    assert lines[at + 1].startswith("  ranks 1-3: /home/me/train.py:12")
    assert "all_reduce #4" in lines[at + 2]
    assert "step 7 of 9" in lines[at + 3]


DESYNC = 'Traceback\n  File "a.py", line {0}, in f\ndure.errors.Desync: (rank {0} of 4) x'


def test_error_that_other_ranks_raised_in_the_same_words_is_told_once() -> None:
    ranks = tuple(failed(n, DESYNC.format(n)) for n in range(2))
    lines = told(ranks)
    assert sum("dure.errors.Desync" in line for line in lines) == 1
    assert lines[-1] == "  rank 1 (pid 101): raised the same E, at a.py:1 in f"


def test_rank_that_had_finished_is_told_so() -> None:
    reader = ReportReader()
    reader.feed(b'{"finished": true}\n')
    other = dataclasses.replace(rank(1, Exit(signal=15), ended=True), finished=reader.finished)
    last = "  rank 1 (pid 101): had finished its program"
    assert told((failed(0, "E: x"), other))[-1] == last
    outside = dataclasses.replace(other, ended_by_launcher=False)  # a SIGTERM to all processes
    assert told((failed(0, "E: x"), outside))[-1] == last


def test_summary_of_many_ranks_is_short() -> None:
    others = tuple(failed(n, f"E: {'x' * n}") for n in range(1, 200))
    assert len(told((failed(0, "E: first"), *others))) < 40


def test_replaced_rank_failed_first_and_its_replacement_went_on() -> None:
    dead = dataclasses.replace(rank(1, Exit(signal=signal.SIGKILL)), pid=7)
    lines = told((rank(0, Exit(code=0)), rank(1, Exit(code=0))), dead, code=0)
    assert "pid 7" in lines[0]
    assert "it was replaced, and the job succeeded:" in lines
    assert "ranks 0-1" in lines[-1]


def test_file_below_a_folder_called_dure_is_the_users() -> None:
    library = ("/usr/lib/python3.12/threading.py", "/opt/lib/python3.12/site-packages/zmq/poll.py")
    assert all(map(is_library, (child.__file__, *library)))
    assert not any(map(is_library, ("/home/me/dure/examples/train.py", "/home/me/torch/train.py")))
