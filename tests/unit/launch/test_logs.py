"""What is kept of a job on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dure.launch.ranks.environment import Round
from dure.launch.show.logs import Journal, RankLogs, is_kept, is_shown
from dure.launch.spec import Exit, JobResult, JobSpec, RankResult, Std, Stream


def round_(number: int = 0, node: int = 0) -> Round:
    return Round(
        number=number,
        node=node,
        hosts=("a", "b"),
        nprocs=(2, 2),
        master_addr="127.0.0.1",
        master_port=1,
        store="127.0.0.1:2",
    )


def test_restart_keeps_what_earlier_rounds_wrote(tmp_path: Path) -> None:
    spec = JobSpec(program="x", nproc=2, log_dir=tmp_path)
    for number in (0, 1):
        logs = RankLogs(spec, round_(number, node=1))
        logs.write(3, "stdout", b"round %d" % number)
        logs.write(0, "stdout", b"a rank of another host")
        logs.close()
    for number in (0, 1):
        file = tmp_path / f"attempt_{number}" / "rank_3" / "stdout.log"
        assert file.read_text() == f"round {number}"
    assert not (tmp_path / "attempt_0" / "rank_0").exists()


def test_lines_with_a_word_are_collected(tmp_path: Path) -> None:
    spec = JobSpec(program="x", nproc=2, log_dir=tmp_path, stdout_filters=("loss", "acc"))
    logs = RankLogs(spec, round_())
    logs.lines(0, "stdout", [b"the loss", b"nothing"])
    logs.lines(1, "stdout", [b"accuracy"])
    logs.lines(1, "stderr", [b"loss"])
    logs.close()
    directory = tmp_path / "attempt_0"
    assert (directory / "filtered_stdout.log").read_text() == "[0] the loss\n[1] accuracy\n"
    assert not (directory / "filtered_stderr.log").exists()


def test_error_of_an_earlier_job_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    spec = JobSpec(program="x", nproc=2, log_dir=tmp_path, redirects={0: Std.OUT})
    RankLogs(spec, round_()).close()
    old = tmp_path / "attempt_0" / "rank_1" / "error.json"
    old.write_text("{}")
    RankLogs(spec, round_()).close()
    assert old.parent.exists()
    assert not old.exists()


@pytest.mark.parametrize(
    ("redirects", "tee", "kept", "shown"),
    [
        (Std.NONE, Std.NONE, ["stdout", "stderr"], ["stdout", "stderr"]),
        (Std.ALL, Std.NONE, ["stdout", "stderr"], []),
        (Std.OUT, Std.NONE, ["stdout"], ["stderr"]),
        (Std.NONE, Std.ERR, ["stderr"], ["stdout", "stderr"]),
        (Std.ALL, Std.ERR, ["stdout", "stderr"], ["stderr"]),
        ({0: Std.ALL}, Std.NONE, [], ["stdout", "stderr"]),
        ({1: Std.ALL}, Std.NONE, ["stdout", "stderr"], []),
    ],
)
def test_streams_go_where_redirects_and_tee_say(
    redirects: Std | dict[int, Std], tee: Std, kept: list[Stream], shown: list[Stream]
) -> None:
    spec = JobSpec(program="x", log_dir=Path("logs"), redirects=redirects, tee=tee)
    streams: tuple[Stream, Stream] = ("stdout", "stderr")
    assert [stream for stream in streams if is_kept(spec, 1, stream)] == kept
    assert [stream for stream in streams if is_shown(spec, 1, stream)] == shown


def test_filter_hides_other_ranks() -> None:
    spec = JobSpec(program="x", local_ranks_filter=frozenset({1}))
    assert not is_shown(spec, 0, "stdout")
    assert is_shown(spec, 1, "stdout")


def test_journal_tells_what_happened_and_how_the_job_ended(tmp_path: Path) -> None:
    journal = Journal(tmp_path, node=1)
    journal.began(JobSpec(program="train.py", args=("--x",)), round_(1, node=1))
    journal.note("started", rank=2)
    failed = RankResult(rank=2, host="b", pid=7, exit=Exit(signal=9))
    journal.conclude(JobResult(exit_code=137, ranks=(failed,), elapsed_s=1.0, first_failure=failed))
    journal.close()
    lines = (tmp_path / "events.node1.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["round", "started", "job ended"]
    job = json.loads((tmp_path / "job.node1.json").read_text())
    assert (job["state"], job["exit_code"], job["rounds"]) == ("failed", 137, 2)
    assert job["first_failure"]["exit"] == {"code": None, "signal": 9}
    assert job["program"] == ["train.py", "--x"]


def test_journal_without_a_directory_writes_nothing(tmp_path: Path) -> None:
    journal = Journal(None)
    journal.note("started")
    journal.said("hello")
    journal.close()
    assert list(tmp_path.iterdir()) == []


def plant(path: Path, kind: str, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.symlink_to(target)
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize(
    "name",
    [
        "attempt_0",
        "attempt_0/rank_1",
        "attempt_0/rank_1/stderr.log",
        "attempt_0/filtered_stdout.log",
    ],
)
def test_what_others_put_in_the_way_is_not_written_to(tmp_path: Path, kind: str, name: str) -> None:
    target, logs = tmp_path / "target", tmp_path / "logs"
    if name.endswith(".log"):
        target.write_text("precious")
    else:
        target.mkdir()
    plant(logs / name, kind, target)
    spec = JobSpec(program="x", nproc=2, log_dir=logs, stdout_filters=("loss",))
    with pytest.raises(OSError, match="a link, or something else") as caught:
        RankLogs(spec, round_())
    assert caught.value.filename == str(logs / name)
    assert list(target.iterdir()) == [] if target.is_dir() else target.read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["events.jsonl", "launcher.log", "job.json.part"])
def test_journal_follows_no_link(tmp_path: Path, kind: str, name: str) -> None:
    target, logs = tmp_path / "target", tmp_path / "logs"
    target.write_text("precious")
    plant(logs / name, kind, target)
    if name == "job.json.part":
        journal = Journal(logs)
        journal.began(JobSpec(program="x"), round_())
        journal.close()
        assert isinstance(journal.trouble, OSError)
    else:
        with pytest.raises(OSError, match="a link, or something else"):
            Journal(logs)
    assert target.read_text() == "precious"


def test_link_as_the_log_directory_is_the_users_choice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    RankLogs(JobSpec(program="x", nproc=1, log_dir=tmp_path / "link"), round_()).close()
    assert (tmp_path / "real" / "attempt_0" / "rank_0" / "stdout.log").exists()
