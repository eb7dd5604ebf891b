"""What is kept of a job on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dure.launch.ranks.environment import Round
from dure.launch.show.logs import Logs, is_kept, is_shown
from dure.launch.spec import Exit, JobResult, JobSpec, RankResult, Std, Stream


def round_(number: int = 0, node: int = 0) -> Round:
    return Round.of(
        number=number,
        node=node,
        hosts=("a", "b"),
        nprocs=(2, 2),
        master_addr="127.0.0.1",
        master_port=1,
        store="127.0.0.1:2",
    )


def test_rounds_have_files_of_their_own_and_lines_with_a_word_one_for_all(tmp_path: Path) -> None:
    spec = JobSpec(program="x", nproc=2, log_dir=tmp_path, stdout_filters=("loss", "acc"))
    logs = Logs(spec)
    for number in (0, 1):
        logs.begin(round_(number, node=1))
        logs.write(3, "stdout", b"round %d" % number)
        logs.write(0, "stdout", b"a rank of another host")
        logs.lines(2, "stdout", [b"the loss", b"nothing"])
        logs.lines(3, "stdout", [b"accuracy"])
        logs.lines(3, "stderr", [b"loss"])
    logs.close()
    for number in (0, 1):
        attempt = tmp_path / f"attempt_{number}"
        assert (attempt / "rank_3/stdout.log").read_text() == f"round {number}"
        assert (attempt / "filtered_stdout.node1.log").read_text() == "[2] the loss\n[3] accuracy\n"
        assert {path.name for path in attempt.iterdir()} == {
            *("rank_2", "rank_3", "filtered_stdout.node1.log"),
        }


def test_error_of_an_earlier_job_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    (tmp_path / "real/attempt_0/rank_1").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")  # as the log directory a link is the user's choice
    old = tmp_path / "real/attempt_0/rank_1/error.json"
    old.write_text("{}")
    logs = Logs(JobSpec(program="x", log_dir=tmp_path / "link", redirects={0: Std.OUT}))
    logs.begin(round_())
    logs.close()
    assert not old.exists()
    assert (tmp_path / "real/attempt_0/rank_0/stdout.log").exists()


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


def test_journal_tells_what_happened_and_how_the_job_ended(tmp_path: Path) -> None:
    logs = Logs(JobSpec(program="train.py", args=("--x",), log_dir=tmp_path))
    logs.said("early")
    logs.begin(round_(1, node=1))
    logs.note("started", rank=2)
    logs.said("hello \udcff")
    failed = RankResult(rank=2, host="b", pid=7, exit=Exit(signal=9))
    logs.conclude(JobResult(exit_code=137, ranks=(failed,), elapsed_s=1.0, first_failure=failed))
    logs.close()
    lines = (tmp_path / "events.node1.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["round", "started", "job ended"]
    job = json.loads((tmp_path / "job.node1.json").read_text())
    assert (job["state"], job["exit_code"], job["rounds"]) == ("failed", 137, 2)
    assert (job["format"], job["version"], events[0]["version"]) == ("dure job", 1, 1)
    assert job["first_failure"]["exit"] == {"code": None, "signal": 9}
    assert job["program"] == ["train.py", "--x"]
    assert (tmp_path / "launcher.node1.log").read_text() == "early\nhello \\udcff\n"


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize(
    "name",
    [
        *("events.jsonl", "launcher.log", "job.json.part", "attempt_0", "attempt_0/rank_1"),
        *("attempt_0/rank_1/stderr.log", "attempt_0/filtered_stdout.log"),
    ],
)
def test_what_others_put_in_the_way_is_not_written_to(tmp_path: Path, kind: str, name: str) -> None:
    target, planted = tmp_path / "target", tmp_path / "logs" / name
    if planted.suffix:
        target.write_text("precious")
    else:
        target.mkdir()
    planted.parent.mkdir(parents=True)
    if kind == "link":
        planted.symlink_to(target)
    else:
        os.mkfifo(planted)
    spec = JobSpec(program="x", nproc=2, log_dir=tmp_path / "logs", stdout_filters=("loss",))
    logs = Logs(spec)
    try:
        logs.begin(round_())
        trouble = logs.trouble
    except OSError as error:
        trouble = error
    logs.close()
    assert "a link, or something else" in str(trouble)
    assert trouble is not None
    assert trouble.filename == str(planted)
    assert list(target.iterdir()) == [] if target.is_dir() else target.read_text() == "precious"
