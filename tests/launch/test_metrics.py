"""Metrics of a job: what its launcher makes of events and of what ranks publish."""

import json
import os
import urllib.request

import pytest

from dure.errors import LaunchError
from dure.launch.http_port import HttpPort
from dure.launch.metrics import JobMetrics, Waits, served_metrics
from dure.launch.ranks.report import ReportedStep
from dure.launch.show.watcher import Watchers
from dure.launch.spec import JobSpec
from tests.launch.prometheus_text import parsed

S = 1_000_000_000


def _published(folder, rank, pid, **content):
    text = {"pid": pid, "operations": {}, "unseen": 0, "starts": {}} | content
    (folder / f"rank{rank}.json").write_text(json.dumps(text))


def _of(text, name):
    return {labels: value for (found, labels), value in parsed(text).items() if found == name}


def test_a_rank_waits_from_its_call_to_the_last_ranks():
    waits = Waits()
    waits.note(0, "world", 3, [(1, 10 * S), (2, 20 * S)])
    waits.note(1, "world", 3, [(1, 12 * S), (2, 20 * S)])
    assert waits.seconds == {}  # rank 2 has not reported
    waits.note(2, "world", 3, [(1, 13 * S)])
    assert waits.seconds == {0: 3, 1: 1, 2: 0}
    waits.note(2, "world", 3, [(1, 13 * S), (2, 25 * S)])  # 1 again
    assert waits.seconds == {0: 8, 1: 6, 2: 0}
    assert waits.counts == {0: 2, 1: 2, 2: 2}
    for rank in range(3):  # what was added already
        waits.note(rank, "world", 3, [(1, 99 * S)])
    assert waits.counts == {0: 2, 1: 2, 2: 2}


def test_the_text_has_what_ranks_published_and_what_the_launcher_knows(tmp_path):
    metrics = JobMetrics(tmp_path)
    for rank in (0, 1):
        metrics.noted({"event": "started", "rank": rank, "pid": os.getpid(), "host": "h"})
        starts = {"world": [2, [[1, (rank + 1) * S]]]}
        operations = {"all_reduce": [3, 96, 0.5, 1]}
        _published(tmp_path, rank, os.getpid(), operations=operations, unseen=rank, starts=starts)
    metrics.progressed(1, ReportedStep(step=12))
    metrics.noted({"event": "ended", "rank": 0, "pid": os.getpid(), "code": 0})
    metrics.compare()
    text = metrics.text()
    rank0, rank1 = (("rank", "0"),), (("rank", "1"),)
    assert _of(text, "dure_rank_up") == {rank0: 0, rank1: 1}
    assert _of(text, "dure_rank_step") == {rank1: 12}
    assert _of(text, "dure_rank_restarts_total") == {rank0: 0, rank1: 0}
    assert _of(text, "dure_operations_unseen_total") == {rank0: 0, rank1: 1}
    assert _of(text, "dure_rank_wait_seconds_total") == {rank0: 1, rank1: 0}
    assert _of(text, "dure_rank_waits_total") == {rank0: 1, rank1: 1}
    of_rank0 = (("op", "all_reduce"), ("rank", "0"))
    assert _of(text, "dure_operations_total")[of_rank0] == 3
    assert _of(text, "dure_operation_bytes_total")[of_rank0] == 96
    assert _of(text, "dure_operation_seconds_total")[of_rank0] == 0.5
    assert _of(text, "dure_operation_failures_total")[of_rank0] == 1
    (memory,) = _of(text, "dure_rank_memory_bytes").values()  # of rank 1, which runs
    assert memory > 1_000_000


def test_a_rank_that_is_started_again_counts_as_a_restart_and_begins_anew(tmp_path):
    metrics = JobMetrics(tmp_path)
    metrics.noted({"event": "started", "rank": 0, "pid": os.getpid(), "host": "h"})
    _published(tmp_path, 0, os.getpid(), operations={"barrier": [7, 0, 0.1, 0]})
    metrics.noted({"event": "ended", "rank": 0, "pid": os.getpid(), "signal": 9})
    metrics.noted({"event": "started", "rank": 0, "pid": os.getppid(), "host": "h"})
    text = metrics.text()
    assert _of(text, "dure_rank_restarts_total") == {(("rank", "0"),): 1}
    assert _of(text, "dure_operations_total") == {}  # those of the process before


def test_what_a_rank_publishes_may_be_torn_or_absent(tmp_path):
    metrics = JobMetrics(tmp_path)
    metrics.noted({"event": "started", "rank": 0, "pid": os.getpid(), "host": "h"})
    metrics.compare()
    (tmp_path / "rank0.json").write_text('{"pid"')
    metrics.compare()
    assert _of(metrics.text(), "dure_rank_up") == {(("rank", "0"),): 1}


def test_the_server_answers_at_its_path_only_and_passes_events_on(port):
    seen = []
    spec = JobSpec(program="train.py", on_event=lambda event: seen.append(event["event"]))
    with served_metrics(spec, port) as served:
        assert served.env["DURE_METRICS_DIR"]
        assert served.on_event is not None
        served.on_event({"event": "started", "rank": 0, "pid": os.getpid(), "host": "h"})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            text = answer.read().decode()
        with pytest.raises(OSError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
    assert _of(text, "dure_rank_up") == {(("rank", "0"),): 1}
    assert seen == ["started"]


def test_a_port_that_is_taken_is_named(port):
    taken = HttpPort(port, "taken", pytest.fail)
    try:
        with (
            pytest.raises(LaunchError, match=f"port {port} cannot be used for metrics"),
            served_metrics(JobSpec(program="train.py"), port),
        ):
            pass
    finally:
        taken.close()


def test_several_watchers_are_told_at_their_times():
    class Noting:
        def __init__(self, due_at):
            self.due_at, self.seen = due_at, []

        def wrote(self, rank, stream, lines):
            self.seen.append(lines)

        def spoke(self, rank, line):
            self.seen.append(line)

        def progressed(self, rank, step):
            self.seen.append(step)

        def tick(self, now):
            self.seen.append(now)

    early, late = Noting(1.0), Noting(5.0)
    both = Watchers(early, late)
    assert both.due_at == 1
    both.tick(2.0)
    both.spoke(0, b"x")
    assert early.seen == [2.0, b"x"]
    assert late.seen == [b"x"]
