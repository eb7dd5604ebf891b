"""What is kept of a job on disk."""

import json
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


def test_logs_have_a_size_limit_and_the_latest_files_are_kept(tmp_path: Path) -> None:
    logs = Logs(JobSpec(program="x", nproc=2, log_dir=tmp_path, log_max_bytes=10, log_keep=2))
    logs.begin(round_())
    for text in (b"one\n", b"two\n", b"three\n", b"four\n", b"larger than ten bytes\n", b"six\n"):
        logs.write(1, "stdout", text)
    logs.close()
    kept = {path.name: path.read_text() for path in (tmp_path / "attempt_0/rank_1").iterdir()}
    assert kept == {
        "stdout.log": "six\n",
        "stdout.log.1": "larger than ten bytes\n",
        "stdout.log.2": "four\n",
        "stderr.log": "",
    }
