"""Who waits for whom, in files that were written at different moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dure.trace.events import State
from dure.trace.merging import read
from dure.trace.waiting import waiting
from tests.trace.made_up import record, write

NOW_MS = 10_000  # when files are written, on the ranks' clock
RUNNING: dict[str, Any] = {"end_ns": 0, "state": State.STARTED}


def at_ms(ms: int) -> dict[str, Any]:
    return {"clock": {"monotonic_ns": ms * 10**6, "time_ns": 10**15 + ms * 10**6}}


def test_two_ranks_wait_for_the_third(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(0, 1), record(0, 2, start_ns=7 * 10**9, **RUNNING)])
    write(tmp_path, 1, [record(1, 1), record(1, 2, start_ns=9 * 10**9, **RUNNING)])
    write(tmp_path, 2, [record(2, 1)])
    found = [(w.rank, w.on, w.call.seq, w.since_s) for w in waiting(read(tmp_path))]
    assert found == [(0, (2,), 2, 3.0), (1, (2,), 2, 1.0)]


def test_older_file_says_nothing_of_a_call_made_since(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(0, 2, start_ns=9500 * 10**6, **RUNNING)])
    write(tmp_path, 1, [record(1, 1)], at_ms(9400))  # it may be in the call by now
    write(tmp_path, 2, [record(2, 1)], at_ms(9600))  # it was not, and the call had begun
    assert [(w.rank, w.on) for w in waiting(read(tmp_path))] == [(0, (2,))]


def test_rank_without_a_file_is_missing_and_one_that_went_on_is_not(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(0, 4, **RUNNING)])
    write(tmp_path, 1, [record(1, seq) for seq in (4, 5, 6)])  # a root need not wait
    assert [(w.rank, w.on) for w in waiting(read(tmp_path))] == [(0, (2,))]


def test_message_waits_for_its_peer(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(0, 1), record(0, 1, "recv", peer=1, **RUNNING)])
    write(tmp_path, 1, [record(1, 1)])
    assert [(w.rank, w.on, w.call.op) for w in waiting(read(tmp_path))] == [(0, (1,), "recv")]


def test_asynchronous_call_counts_when_it_takes_long(tmp_path: Path) -> None:
    late = {"start_ns": (NOW_MS - 400) * 10**6, "async_op": True}
    early = {"start_ns": (NOW_MS - 600) * 10**6, "async_op": True}
    write(tmp_path, 0, [record(0, 2, **RUNNING | late)])
    write(tmp_path, 1, [record(1, 2, **RUNNING | early)])
    write(tmp_path, 2, [record(2, 1)])
    assert [(w.rank, w.on) for w in waiting(read(tmp_path))] == [(1, (2,))]
