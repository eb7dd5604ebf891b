"""What ranks tell of their end, and what the user reads."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest

import dure as dist
import dure.launch.child
from dure.errors import PeerLost
from dure.launch.report import ReportReader, root_cause, summary, where
from dure.launch.spec import Crash, Exit, Frame, JobResult, RankResult
from dure.testing import run_ranks

CHILD = dure.launch.child.__file__
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
    line = json.dumps({"type": "E", "message": "é\n", "traceback": "t", "peer": 3})
    data = (STACK + "\n" + line + "\n").encode()
    reader = ReportReader()
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
    assert reader.told
    assert reader.stack == (
        Frame("/home/me/a b/train.py", 12, "step"),
        Frame("/home/me/a b/train.py", 0, "<lambda>"),
    )
    assert reader.crash == Crash(type="E", message="é\n", traceback="t", peer=3)


@pytest.mark.parametrize("end", ["  ...\n", "  <no Python frame>\n"])
def test_reader_knows_every_end_of_a_stack(end: str) -> None:
    reader = ReportReader()
    reader.feed(b"Stack (most recent call first):\n")
    assert not reader.told
    reader.feed(end.encode())
    assert reader.told


@pytest.mark.parametrize("data", [b"{\n", b"{}\n", b'{"type": 1, "other": 2}\n', b"\xff\xfe\n"])
def test_reader_ignores_garbage(data: bytes) -> None:
    reader = ReportReader()
    reader.feed(data)
    assert reader.crash is None


def test_root_cause_is_the_peer_that_the_survivor_lost() -> None:
    ranks = (
        rank(0, Exit(code=1), crash("PeerLost", peer=2)),
        rank(1, Exit(signal=15), ended=True),
        rank(2, Exit(signal=9)),
    )
    assert root_cause(ranks[0], ranks) is ranks[2]


def test_root_cause_ignores_a_blamed_rank_that_did_not_fail() -> None:
    ranks = (rank(0, Exit(code=1), crash("PeerLost", peer=1)), rank(1, Exit(code=0)))
    assert root_cause(ranks[0], ranks) is ranks[0]


def test_root_cause_of_ranks_that_blame_each_other_ends() -> None:
    ranks = (
        rank(0, Exit(code=1), crash("PeerLost", peer=1)),
        rank(1, Exit(code=1), crash("PeerLost", peer=0)),
    )
    assert root_cause(ranks[0], ranks) in ranks


def test_status_is_the_code_that_the_rank_chose() -> None:
    assert rank(0, Exit(code=3)).status == 3
    assert rank(0, Exit(signal=9)).status == 137
    assert rank(0, Exit(signal=15), crash(), ended=True).status == 1


def test_where_names_the_users_line_and_what_it_called() -> None:
    library = Frame(json.__file__, 5, "loads")
    user = Frame("/home/me/train.py", 12, "step")
    assert where((library, user)).startswith("/home/me/train.py:12 in step")
    assert where((user,)) == "/home/me/train.py:12 in step"
    assert where((library,)) == str(library)


def test_summary_of_success_is_empty() -> None:
    assert summary(JobResult(exit_code=0, ranks=(rank(0, Exit(code=0)),), elapsed_s=1)) == []


def test_summary_of_failure_names_every_rank() -> None:
    ranks = (
        rank(0, Exit(code=1), crash("KeyError")),
        rank(1, Exit(signal=signal.SIGKILL)),
        rank(2, Exit(signal=signal.SIGRTMIN + 1)),
        rank(3, Exit(signal=15), ended=True),
        rank(4, Exit(code=0)),
    )
    for failure in ranks[:3]:
        result = JobResult(exit_code=1, ranks=ranks, elapsed_s=1, first_failure=failure)
        text = "\n".join(summary(result))
        assert all(f"rank {number}" in text for number in range(5))
        assert f"pid {failure.pid}" in text


def test_summary_tells_the_error_of_the_others_not_its_notes() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "    boom()\n"
        "dure.errors.PeerLost: the process of rank 0 ended\n"
        "a note on it"
    )
    second = dataclasses.replace(crash("PeerLost"), traceback=text)
    ranks = (rank(0, Exit(code=1), crash()), rank(1, Exit(code=1), second))
    result = JobResult(exit_code=1, ranks=ranks, elapsed_s=1, first_failure=ranks[0])
    shown = "\n".join(summary(result))
    assert "failed as well: dure.errors.PeerLost: the process of rank 0 ended\n" in shown + "\n"


def test_child_file_shares_its_directory_with_no_name_of_the_standard_library() -> None:
    import sys

    names = {path.stem for path in Path(CHILD).parent.glob("*.py")}
    assert names & set(sys.stdlib_module_names) == set()


def test_a_crash_blames_a_rank_of_the_job_not_of_a_group():
    def body(rank):
        group = dist.new_group([1, 2])
        if rank == 0:
            return dure.launch.child._blamed(ValueError("no peer"))
        error = PeerLost("lost", group=group.group_name, peer=1)
        return dure.launch.child._blamed(error)

    assert run_ranks(3, body) == [None, 2, 2]
    assert dure.launch.child._blamed(PeerLost("lost", group="gone", peer=1)) == 1
